"""Two plans: their memory over one step on one axis, what each decides, and their figures side by side."""

from pathlib import Path

import streamlit as st

from dashboards import page, pairs, pictures
from dashboards.found import Broken, attempt, called
from dashboards.pairs import Side

asked, found = page.begin(
    "Two plans", "Of one study or of two; plain eager is the step as traced. Bytes are the step's own."
)
names = {called(path, asked.runs): path for path in found.runs if (path / "trials.jsonl").exists()}
if not names:
    page.empty(f"No study with a trial lies in {asked.runs}.", page.TUNE)
    st.stop()


def choose(which: str, at: int) -> Side | Broken:
    """One of the two, chosen by study and trial; at first the `at`-th of its trials."""
    name = page.choose(f"{which} study", list(names), lambda name: page.readable(names[name]))
    path: Path = names[name]
    study = page.study(path)
    if isinstance(study, Broken):
        return study
    trials = pairs.choices(study.records)
    if not trials:
        return Broken(path, "no plan was tried yet; wait, or go on with autotune resume")
    numbers = list(trials)
    number = st.selectbox(f"{which} plan", numbers, index=min(at, len(numbers) - 1), format_func=trials.__getitem__)
    called_it = f"{which}: {trials[number]}, of {name}"
    return attempt(path, lambda _: pairs.side(study.records, number, called_it))


left, right = st.columns(2)
with left:
    first = choose("first", 1)
with right:
    second = choose("second", 0)
page.name_broken([one for one in (first, second) if isinstance(one, Broken)], asked.runs)
if isinstance(first, Broken) or isinstance(second, Broken):
    st.stop()

if first.walk.graph.digest != second.walk.graph.digest:
    st.warning("The two are plans of different graphs: another model, batch or version of torch.")
if first.device != second.device:
    st.warning(f"Measured on different devices: {first.device} and {second.device}.")
st.subheader("Memory over one step")
drawn = pictures.timelines(pairs.timelines(first, second), pairs.budgets(first, second))
st.altair_chart(drawn, width="stretch")
st.subheader("Figures")
page.table(("", "first", "second", "second beside first"), pairs.figures(first, second))
st.subheader("Decisions")
page.table(("", "first", "second"), pairs.decisions(first, second))
st.subheader("Alive at the peak, by layer")
page.table(
    ("layer", "first MiB", "second MiB", "difference MiB"),
    pairs.alive(first, second),
    columns={
        name: st.column_config.NumberColumn(format="%.1f") for name in ("first MiB", "second MiB", "difference MiB")
    },
)
