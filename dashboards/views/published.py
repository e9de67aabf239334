"""Show published numbers beside ours: every claim of the experiments, with its verdict."""

import streamlit as st

from autotune.report.claims import ClaimVerdict
from dashboards import charts, page, published_claims

arguments, _ = page.start_page(
    "Published claims",
    "Published numbers beside ours. Verdicts are computed from the figures and a stated tolerance. "
    "The conditions are in results/result.json in the experiment's folder.",
)
root = arguments.experiments
results, unreadable = published_claims.load_claims(root) if root else ({}, [])
page.show_unreadable(unreadable, root or arguments.runs)
if not results:
    page.show_missing("No experiment has results; from a checkout of the project:", page.REPRODUCE)
    st.stop()

for column, (verdict, count) in zip(
    st.columns(len(ClaimVerdict)), published_claims.count_by_verdict(results).items(), strict=True
):
    column.metric(verdict, count)
if ratios := published_claims.claim_ratios(results):
    st.altair_chart(charts.claims_chart(ratios), width="stretch")
names = st.multiselect("experiments", list(results), placeholder="all")
selected = {name: claims for name, claims in results.items() if not names or name in names}
sources = [claim.source for claims in selected.values() for claim in claims]
page.show_table(
    (*published_claims.HEAD, "source", "link"),
    [
        (*row, source, published_claims.link_source(source))
        for row, source in zip(published_claims.claim_rows(selected), sources, strict=True)
    ],
    columns={"link": st.column_config.LinkColumn(display_text="open")},
)
