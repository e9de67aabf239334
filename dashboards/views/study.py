"""Show one study, also while it runs: progress, trials, and memory against time under the budget."""

from pathlib import Path

import streamlit as st

from autotune.records.run_dir import RunDir
from autotune.report import tables
from autotune.report.summary import list_run_facts
from dashboards import charts, page, studies
from dashboards.discovery import Unreadable, relative_name

arguments, index = page.start_page("Study", "Updated every five seconds while the study runs.")
if not index.runs:
    page.show_missing(f"No study in {arguments.runs}.", page.TUNE)
    st.stop()


def show_run(run_dir: Path) -> None:
    """Show the current state of a run directory."""
    study = page.load_study(run_dir)
    if isinstance(study, Unreadable):
        progress = studies.read_progress(run_dir, 0, {})
        # a run that has just begun has no records yet, which is no error
        if progress.running:
            st.markdown(f"**{page.escape_markdown(progress.text)}**")
        else:
            page.show_unreadable([study], arguments.runs)
    else:
        progress = studies.read_progress(run_dir, len(study.records.trials), study.records.config)
        show_study(study, progress)
    if is_live and not progress.running:
        st.rerun()


def show_study(study: studies.Study, progress: studies.StudyProgress) -> None:
    """Show progress, headline, chart, trials and failures."""
    st.markdown(f"**{page.escape_markdown(progress.text)}**")
    if progress.share is not None:
        st.progress(progress.share)
    st.subheader(page.escape_markdown(study.headline))
    st.markdown(page.escape_markdown(study.summary))
    facts = dict(list_run_facts(study.records))
    st.caption(page.escape_markdown(" · ".join(facts[term] for term in ("date", "machine") if facts[term] != "-")))
    if study.points:
        chart = charts.frontier_chart(study.points, study.records.budget_step_bytes, study.cost_label)
        st.altair_chart(chart, width="stretch")
    if study.front:
        st.subheader("Pareto front")
        page.show_table(tables.FRONT_COLUMNS, study.front)
    if study.confirmed:
        st.subheader("Re-measured plans")
        page.show_table(tables.CONFIRMED_COLUMNS, study.confirmed)
    show_report(study.records.run_dir)
    st.subheader("All trials")
    number = st.column_config.NumberColumn
    page.show_table(
        studies.COLUMNS,
        study.rows,
        columns={name: number(format="%.1f") for name in studies.COLUMNS if name.endswith((" MiB", " ms"))}
        | {"time": number("time / eager", format="%.3fx")},
    )
    for trial, outcome, detail in study.failures:
        with st.expander(f"plan {trial}: {outcome}"):
            st.code(detail, language=None)


def show_report(run_dir: Path | None) -> None:
    """Show a button that hands out the report; a browser opens no address of a file from a page."""
    path = RunDir(run_dir).report if run_dir is not None else None
    if path is not None and path.exists():
        st.download_button("Report as one HTML file", path.read_bytes(), f"{path.parent.name}.html", "text/html")
        st.caption(f"also in {path}")


runs = {relative_name(path, arguments.runs): path for path in index.runs}
running = [name for name, path in runs.items() if studies.read_progress(path, 0, {}).running]
selected = runs[
    page.select_name("study", list(runs), lambda name: name in running if running else page.is_readable(runs[name]))
]
is_live = studies.read_progress(selected, 0, {}).running
st.fragment(show_run, run_every="5s" if is_live else None)(selected)
