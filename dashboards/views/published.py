"""Published numbers and ours: every claim of the experiments, with its verdict."""

import streamlit as st

from dashboards import page, pictures, reproductions

asked, _ = page.begin(
    "Published and ours",
    "Verdicts follow from the figures, their sense and a stated tolerance; nobody types one. "
    "Conditions stand in experiments/NAME/results/result.json.",
)
root = asked.experiments
results, broken = reproductions.claims(root) if root else ({}, [])
page.name_broken(broken, root or asked.runs)
if not results:
    page.empty("No experiment has written its claims; from a checkout of the project:", page.REPRODUCE)
    st.stop()

for column, (verdict, count) in zip(st.columns(4), reproductions.counted(results).items(), strict=True):
    column.metric(verdict, count)
if compared := reproductions.beside(results):
    st.altair_chart(pictures.published(compared), width="stretch")
names = st.multiselect("experiments", list(results), placeholder="all")
shown = {name: claims for name, claims in results.items() if not names or name in names}
page.table(reproductions.HEAD, list(reproductions.rows(shown)))
