"""Show the nightly histories: regressions with their causes, and every entry's figures over time."""

from functools import partial

import streamlit as st

from dashboards import charts, nightly_history, page
from dashboards.discovery import Unreadable, try_read

arguments, index = page.start_page(
    "Nights",
    "Each entry's champion, verified every night beside plain eager; a regression is re-measured before it is reported.",
)
results = {
    name: try_read(path, partial(nightly_history.load_history, name=name))
    for name, path in nightly_history.name_entries(index.entries, arguments.runs).items()
}
page.show_unreadable([result for result in results.values() if isinstance(result, Unreadable)], arguments.runs)
histories = {name: nights for name, nights in results.items() if not isinstance(nights, Unreadable) and nights}
if not histories:
    page.show_missing(f"No night on record in {arguments.runs}.", page.NIGHTLY)
    st.stop()

st.subheader("All entries, the latest nights")
page.show_table(*nightly_history.build_overview(histories))
st.subheader("Latest night of each entry")
latest = nightly_history.latest_nights(histories)
page.show_table(nightly_history.HEAD, [row for night in latest for row in nightly_history.history_rows([night])])
st.subheader("Regressions")
regressions = nightly_history.list_regressions(histories)
for night in regressions:
    causes = ", ".join(night.causes) or "unknown"
    entry, detail = page.escape_markdown(night.entry), page.escape_markdown(night.detail)
    st.error(f"**{entry}**, night {night.night}, cause: **{causes}**. {detail}")
if not regressions:
    st.success("None on record.")

name = page.select_name("entry", list(histories))
if points := nightly_history.night_points({name: histories[name]}):
    st.altair_chart(charts.nightly_chart(points), width="stretch")
page.show_table(nightly_history.HEAD, nightly_history.history_rows(histories[name]))
