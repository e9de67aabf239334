"""Nights in a row: regressions with their causes, and every entry's figures over time."""

import streamlit as st

from dashboards import nights, page, pictures
from dashboards.found import Broken, attempt

asked, found = page.begin(
    "Nights", "Each entry's champion, verified every night beside plain eager; red only after a second look."
)
read = {path.name: attempt(path, nights.history) for path in found.entries}
page.name_broken([one for one in read.values() if isinstance(one, Broken)], asked.runs)
histories = {name: one for name, one in read.items() if not isinstance(one, Broken) and one}
if not histories:
    page.empty(f"No night is on record in {asked.runs}.", page.NIGHTLY)
    st.stop()

st.subheader("The last night of each entry")
page.table(nights.HEAD, [row for night in nights.latest(histories) for row in nights.rows([night])])
st.subheader("Regressions")
red = nights.regressions(histories)
for night in red:
    causes = ", ".join(night.causes) or "not known"
    st.error(f"**{page.plain(night.entry)}**, night {night.night}, cause: **{causes}**. {page.plain(night.detail)}")
if not red:
    st.success("None on record.")

entry = page.choose("entry", list(histories))
some = {entry: histories[entry]}
if points := nights.points(some):
    st.altair_chart(pictures.nights(points), width="stretch")
page.table(nights.HEAD, nights.rows(some[entry]))
