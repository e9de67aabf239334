"""Show the current plan for each model and device, and a table of all best plans."""

import streamlit as st

from dashboards import champions, page
from dashboards.champions import Champion
from dashboards.discovery import Unreadable

arguments, index = page.start_page(
    "Models and devices",
    "Current plan for each model, device, budget and training loop: the nightly champion, or else the fastest of all studies. "
    "Bytes are charged for the step, without the idle process; times are relative to plain eager.",
)
on_disk, unreadable = page.load_champions(index)
studies = page.load_mlflow_studies(arguments.runs)
logged: list[Champion] = []
if isinstance(studies, Unreadable):
    st.warning(page.escape_markdown(f"{studies.reason}. This page shows only {arguments.runs}."))
else:
    logged = [champion for champion in map(champions.from_logged_study, studies) if champion is not None]
page.show_unreadable(unreadable, arguments.runs)
everything = champions.merge_champions(logged, on_disk)
if not everything:
    message = (
        f"No study has a best plan yet, neither in MLflow nor in {arguments.runs}. A first one takes some minutes:"
    )
    page.show_missing(message, page.TUNE)
    st.stop()

current = champions.select_current(everything)
head, rows = champions.build_grid(current)
page.show_table(head, rows)


def mlflow_address(champion: Champion) -> str | None:
    """Return the address of a study's page in MLflow; None without a page or without a server."""
    return f"{arguments.mlflow}/{champion.page}" if champion.page and arguments.mlflow else None


st.subheader("All best plans")
page.show_table(
    ("current", "model", "device", "budget", "loop", "charged MiB", "step ms", "time", "from", "when", "MLflow"),
    [
        (
            champion in current, champion.model, champion.device, champion.budget, champion.loop,
            None if champion.charged_bytes is None else champion.charged_bytes / 2**20,
            None if champion.seconds is None else 1e3 * champion.seconds, champion.ratio,
            f"night {champion.origin}" if champion.nightly else champion.origin,
            page.to_datetime(champion.recorded), mlflow_address(champion),
        )
        for champion in sorted(everything, key=lambda champion: (champion.key, -champion.recorded))
    ],
    columns={
        "charged MiB": st.column_config.NumberColumn(format="%.1f"),
        "step ms": st.column_config.NumberColumn(format="%.1f"),
        "time": st.column_config.NumberColumn(format="%.2fx", help="relative to plain eager"),
        "when": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        "MLflow": st.column_config.LinkColumn(display_text="open"),
    },
)  # fmt: skip
