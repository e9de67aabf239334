"""Models x devices: the plan that stands for each, and all that were found."""

import streamlit as st

from dashboards import champions, page
from dashboards.champions import Champion
from dashboards.found import Broken

asked, found = page.begin(
    "Models and devices",
    "For each model, device and budget the plan that stands: the night's champion, else the fastest of all studies. "
    "Bytes are charged for the step, above the process's floor; times beside plain eager's.",
)
on_disk, broken = page.champions(found)
seen = page.recorded(asked.runs)
recorded: list[Champion] = []
if isinstance(seen, Broken):
    st.warning(page.plain(f"{seen.why}. What follows is from {asked.runs} alone."))
else:
    recorded = [one for one in map(champions.of_logged, seen) if one is not None]
page.name_broken(broken, asked.runs)
everything = champions.once(recorded, on_disk)
if not everything:
    page.empty(
        f"No plan has won yet, neither in MLflow nor in {asked.runs}. A first one takes some minutes:", page.TUNE
    )
    st.stop()

standing = champions.reigning(everything)
head, rows = champions.grid(standing)
page.table(head, rows)


def address(one: Champion) -> str | None:
    """Of a study's page in MLflow."""
    return f"{asked.mlflow}/{one.page}" if one.page and asked.mlflow else None


st.subheader("Every plan that won")
page.table(
    ("stands", "model", "device", "budget", "charged MiB", "step ms", "time", "from", "when", "MLflow"),
    [
        (
            one in standing, one.model, one.device, one.budget,
            None if one.charged_bytes is None else one.charged_bytes / 2**20,
            None if one.seconds is None else 1e3 * one.seconds, one.ratio,
            f"night {one.origin}" if one.nightly else one.origin, page.when(one.at), address(one),
        )
        for one in sorted(everything, key=lambda one: (one.key, -one.at))
    ],
    columns={
        "charged MiB": st.column_config.NumberColumn(format="%.1f"),
        "step ms": st.column_config.NumberColumn(format="%.1f"),
        "time": st.column_config.NumberColumn(format="%.2fx", help="over plain eager's"),
        "when": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        "MLflow": st.column_config.LinkColumn(display_text="open"),
    },
)  # fmt: skip
