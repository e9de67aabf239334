"""One study, also while it runs: how far it is, what it has tried, and what stands against the budget."""

from pathlib import Path

import streamlit as st

from dashboards import page, pictures, studies
from dashboards.found import Broken, called

asked, found = page.begin("One study", "Looked at again every five seconds as long as it runs.")
if not found.runs:
    page.empty(f"No study lies in {asked.runs}.", page.TUNE)
    st.stop()


def shown(run_dir: Path) -> None:
    """The study as its directory says it now."""
    study = page.study(run_dir)
    if isinstance(study, Broken):
        now = studies.standing(run_dir, 0, {})
        # a run that has only begun is not broken
        if now.running:
            st.markdown(f"**{page.plain(now.words)}**")
        else:
            page.name_broken([study], asked.runs)
    else:
        now = studies.standing(run_dir, len(study.records.trials), study.records.config)
        picture(study, now)
    if live and not now.running:
        st.rerun()


def picture(study: studies.Study, now: studies.Standing) -> None:
    """All that is known of it."""
    st.markdown(f"**{page.plain(now.words)}**")
    if now.share is not None:
        st.progress(now.share)
    st.subheader(page.plain(study.headline))
    st.markdown(page.plain(study.story))
    if study.dots:
        chart = pictures.frontier(study.dots, study.records.budget_step_bytes, study.cost_label)
        st.altair_chart(chart, width="stretch")
    number = st.column_config.NumberColumn
    page.table(
        studies.COLUMNS,
        study.rows,
        columns={name: number(format="%.1f") for name in studies.COLUMNS if name.endswith((" MiB", " ms"))}
        | {"time": number("time, of eager's", format="%.3fx")},
    )
    for trial, outcome, detail in study.failures:
        with st.expander(f"plan {trial}: {outcome}"):
            st.code(detail, language=None)


names = {called(path, asked.runs): path for path in found.runs}
begun = [name for name, path in names.items() if studies.standing(path, 0, {}).running]
chosen = names[page.choose("study", list(names), lambda name: name in begun if begun else page.readable(names[name]))]
live = studies.standing(chosen, 0, {}).running
st.fragment(shown, run_every="5s" if live else None)(chosen)
