"""Compare two plans: memory over one step on the same axes, decisions, and figures side by side."""

from pathlib import Path

import streamlit as st

from autotune.records.run_dir import RunDir
from dashboards import charts, page, plan_comparison
from dashboards.discovery import Unreadable, relative_name, try_read
from dashboards.plan_comparison import PlanSide

arguments, index = page.start_page(
    "Compare plans",
    "Two plans of one study or of two studies; plain eager is the step as traced. Bytes exclude the idle process.",
)
runs = {relative_name(path, arguments.runs): path for path in index.runs if RunDir(path).trials.exists()}
if not runs:
    page.show_missing(f"No study with a trial in {arguments.runs}.", page.TUNE)
    st.stop()


def select_side(label: str, default: int) -> PlanSide | Unreadable:
    """Show the choice of study and plan, and return the chosen plan; the `default`-th choice comes first."""
    name = page.select_name(f"{label} study", list(runs), lambda name: page.is_readable(runs[name]))
    path: Path = runs[name]
    study = page.load_study(path)
    if isinstance(study, Unreadable):
        return study
    choices = plan_comparison.list_choices(study.records)
    if not choices:
        return Unreadable(path, "no plan was tried yet; wait, or go on with autotune resume")
    numbers = list(choices)
    default = min(default, len(numbers) - 1)
    number = st.selectbox(f"{label} plan", numbers, index=default, format_func=choices.__getitem__)
    title = f"{label}: {choices[number]}, of {name}"
    return try_read(path, lambda _: plan_comparison.build_side(study.records, number, title))


left, right = st.columns(2)
with left:
    first = select_side("first", 1)
with right:
    second = select_side("second", 0)
page.show_unreadable([side for side in (first, second) if isinstance(side, Unreadable)], arguments.runs)
if isinstance(first, Unreadable) or isinstance(second, Unreadable):
    st.stop()

if first.timeline.graph.digest != second.timeline.graph.digest:
    st.warning("The two plans belong to different graphs: another model, batch or version of torch.")
if first.device != second.device:
    st.warning(f"Measured on different devices: {first.device} and {second.device}.")
st.subheader("Memory during one step")
chart = charts.memory_chart(plan_comparison.memory_points(first, second), plan_comparison.list_budgets(first, second))
st.altair_chart(chart, width="stretch")
st.subheader("Figures")
page.show_table(("", "first", "second", "difference"), plan_comparison.compare_figures(first, second))
st.subheader("Decisions")
page.show_table(("", "first", "second"), plan_comparison.compare_decisions(first, second))
st.subheader("Live memory at the peak, by layer")
number_column = st.column_config.NumberColumn(format="%.1f")
page.show_table(
    ("layer", "first MiB", "second MiB", "difference MiB"),
    plan_comparison.compare_peaks(first, second),
    columns=dict.fromkeys(("first MiB", "second MiB", "difference MiB"), number_column),
)
