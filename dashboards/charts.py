"""Draw the pages' charts with Altair, in the colours of the report."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import altair as alt
import pandas as pd

from autotune.nightly.history import NightVerdict
from autotune.report.charts import (
    BLUE,
    GREEN,
    GREY,
    MARKS,
    MIB,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    PointKind,
    TrialPoint,
    front_points,
    pareto_front,
)
from autotune.report.claims import ClaimVerdict
from dashboards.nightly_history import NightPoint
from dashboards.published_claims import ClaimRatio

EAGER = PURPLE
"""Colour of plain eager, which both of Streamlit's colour schemes show; black is lost on the dark one."""
LABELS = "#808892"
"""Colour of words in a chart, legible on both of Streamlit's backgrounds."""
POINT_STYLES = {
    PointKind.BASELINE: (EAGER, "diamond"),
    PointKind.BEST: (ORANGE, "triangle-up"),
    PointKind.FRONT: (GREEN, "circle"),
    PointKind.WITHIN_BUDGET: (BLUE, "circle"),
    PointKind.OVER_BUDGET: (VERMILION, "triangle-down"),
    PointKind.FAILED: (VERMILION, "cross"),
    PointKind.PREDICTED: (GREY, "circle"),
}
"""Colour and shape of each kind of point."""
NIGHT_COLOURS = {
    NightVerdict.SAME: BLUE, NightVerdict.NEW: SKY, NightVerdict.PROMOTED: GREEN, NightVerdict.REGRESSION: VERMILION,
    NightVerdict.INCONCLUSIVE: GREY, NightVerdict.FAILED: ORANGE,
}  # fmt: skip
CLAIM_COLOURS = {
    ClaimVerdict.REPRODUCED: GREEN, ClaimVerdict.RATIOS: BLUE, ClaimVerdict.BOUND: SKY, ClaimVerdict.NOT_REPRODUCED: VERMILION,
    ClaimVerdict.UNDECIDED: YELLOW, ClaimVerdict.NOT_COMPARABLE: GREY,
}  # fmt: skip


Chart = alt.LayerChart | alt.FacetChart


def frontier_chart(points: Sequence[TrialPoint], budget_bytes: float | None, cost_label: str) -> Chart:
    """Return the chart of step memory against cost, with the Pareto front and the budget."""
    # padding for the label of the last point
    x = alt.X("MiB:Q", title="step memory, MiB", scale=alt.Scale(zero=False, padding=50))
    y = alt.Y("cost:Q", title=cost_label, scale=alt.Scale(zero=False, padding=20))
    layers: list[Any] = [layer.encode(x=x, y=y) for layer in (_front(points), _marks(points), _labels(points))]
    if any(point.interval for point in points):
        layers.insert(0, _error_bars(points, x, cost_label))
    if budget_bytes is not None:
        layers.insert(0, _budget_line("x", budget_bytes / MIB, f"budget {budget_bytes / MIB:.1f} MiB"))
    return alt.layer(*layers).properties(height=380)


def memory_chart(rows: Sequence[tuple[str, float, float]], budgets: Sequence[tuple[str, float]]) -> Chart:
    """Return the chart of two plans' memory over time.

    `rows` are (plan, milliseconds, MiB), and `budgets` are (name, bytes) of horizontal lines.
    """
    data = pd.DataFrame(rows, columns=["plan", "ms", "MiB"])
    names = list(dict.fromkeys(data["plan"]))
    legend = alt.Legend(title=None, orient="top", columns=1, labelLimit=700, symbolOpacity=1)
    colour = alt.Color("plan:N", scale=alt.Scale(domain=names, range=[EAGER, ORANGE][: len(names)]), legend=legend)
    base = alt.Chart(data).encode(
        x=alt.X("ms:Q", title="time of one step, simulated, ms", scale=alt.Scale(nice=False)),
        y=alt.Y("MiB:Q", title="step memory, MiB", stack=None),
        color=colour,
    )
    layers: list[Any] = [
        base.mark_area(interpolate="step-after", opacity=0.12),
        base.mark_line(interpolate="step-after", strokeWidth=1.5),
    ]
    layers += [_budget_line("y", nbytes / MIB, f"{name} {nbytes / MIB:.1f} MiB") for name, nbytes in budgets]
    return alt.layer(*layers).properties(height=380)


def nightly_chart(points: Sequence[NightPoint]) -> Chart:
    """Return the chart of one entry's nights: champion's time over eager's, with a line per champion.

    Where eager does not fit, times are seconds. Nights of the other unit than the last one's are left out.
    """
    has_eager = points[-1].has_eager
    points = [point for point in points if point.has_eager is has_eager]
    title = "step time / eager step time" if has_eager else "step time, s"
    data = pd.DataFrame([asdict(point) for point in points])
    present = [verdict for verdict in NIGHT_COLOURS if any(point.verdict == verdict for point in points)]
    colours = [NIGHT_COLOURS[verdict] for verdict in present]
    scale = alt.Scale(domain=[verdict.value for verdict in present], range=colours)
    x = alt.X("started:T", title=None, scale=alt.Scale(padding=20))
    y = alt.Y("time:Q", title=title, scale=alt.Scale(zero=False, padding=20))
    line = alt.Chart(data).mark_line(color=GREY, strokeWidth=1).encode(x=x, y=y, detail="champion:N")
    marks = (
        alt.Chart(data)
        .mark_point(filled=True, size=100, opacity=1)
        .encode(
            x=x,
            y=y,
            color=alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
            tooltip=[
                "night:N", "verdict:N", alt.Tooltip("time:Q", format=".3f"),
                alt.Tooltip("charged_mib:Q", title="charged MiB", format=".1f"), "champion:N",
            ],
        )
    )  # fmt: skip
    return alt.layer(line, marks).properties(height=280)


def claims_chart(ratios: Sequence[ClaimRatio]) -> Chart:
    """Return the chart of our figures over published ones, a row per experiment, with a line at equality."""
    data = pd.DataFrame([asdict(ratio) for ratio in ratios])
    present = [verdict for verdict in CLAIM_COLOURS if any(ratio.verdict == verdict for ratio in ratios)]
    colours = [CLAIM_COLOURS[verdict] for verdict in present]
    scale = alt.Scale(domain=[verdict.value for verdict in present], range=colours)
    marks = (
        alt.Chart(data)
        .mark_point(filled=True, size=80, opacity=0.75)
        .encode(
            x=alt.X(
                "ours_over_published:Q",
                title="our figure over the published one",
                scale=alt.Scale(type="log"),
                axis=alt.Axis(values=[0.001, 0.01, 0.1, 0.5, 1, 2, 10, 100], format="~g"),
            ),
            y=alt.Y("experiment:N", title=None, axis=alt.Axis(labelLimit=300)),
            color=alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
            tooltip=["experiment:N", "claim:N", alt.Tooltip("ours_over_published:Q", format=".3f"), "verdict:N"],
        )
    )
    equality = alt.Chart(pd.DataFrame({"position": [1.0]})).mark_rule(color=PURPLE, strokeDash=[5, 3])
    height = 80 + 34 * data["experiment"].nunique()
    return alt.layer(equality.encode(x="position:Q"), marks).properties(height=height)


def _front(points: Sequence[TrialPoint]) -> alt.Chart:
    front = [(nbytes / MIB, cost) for nbytes, cost in pareto_front(front_points(points))]
    data = pd.DataFrame(front, columns=["MiB", "cost"])
    line: alt.Chart = alt.Chart(data).mark_line(interpolate="step-after", color=BLUE, strokeWidth=1)
    return line


def _marks(points: Sequence[TrialPoint]) -> alt.Chart:
    """Return a mark per trial, with its kind as colour and shape."""
    data = pd.DataFrame(
        {"MiB": point.nbytes / MIB, "cost": point.cost, "kind": MARKS[point.kind][0], "trial": point.number}
        for point in points
    )
    present = {MARKS[kind][0]: style for kind, style in POINT_STYLES.items() if any(p.kind is kind for p in points)}
    legend = alt.Legend(title=None, orient="top", columns=3, labelLimit=400)
    colours = alt.Scale(domain=list(present), range=[colour for colour, _ in present.values()])
    shapes = alt.Scale(domain=list(present), range=[shape for _, shape in present.values()])
    marks: alt.Chart = alt.Chart(data).mark_point(filled=True, size=90, opacity=0.9)
    return marks.encode(
        color=alt.Color("kind:N", scale=colours, legend=legend),
        shape=alt.Shape("kind:N", scale=shapes, legend=legend),
        tooltip=["trial:Q", "kind:N", alt.Tooltip("MiB:Q", format=".1f"), alt.Tooltip("cost:Q", format=".3f")],
    )


def _error_bars(points: Sequence[TrialPoint], x: alt.X, cost_label: str) -> alt.Chart:
    """Return the confidence intervals of the re-measured plans."""
    rows = [(point.nbytes / MIB, *point.interval) for point in points if point.interval is not None]
    bars: alt.Chart = alt.Chart(pd.DataFrame(rows, columns=["MiB", "low", "high"])).mark_rule(
        color=LABELS, strokeWidth=1.5
    )
    return bars.encode(x=x, y=alt.Y("low:Q", title=cost_label), y2="high:Q")


def _labels(points: Sequence[TrialPoint]) -> alt.Chart:
    """Return text labels of the best trial and of eager."""
    labels = {PointKind.BEST: "plan {}", PointKind.BASELINE: "eager"}
    rows = [(p.nbytes / MIB, p.cost, labels[p.kind].format(p.number)) for p in points if p.kind in labels]
    data = pd.DataFrame(rows, columns=["MiB", "cost", "name"])
    text: alt.Chart = alt.Chart(data).mark_text(align="left", dx=9, dy=-9, fontSize=12, color=LABELS)
    return text.encode(text="name:N")


def _budget_line(axis: str, position: float, label: str) -> Chart:
    """Return a labelled line across the chart."""
    data = pd.DataFrame({"position": [position], "label": [label]})
    rule = alt.Chart(data).mark_rule(color=VERMILION, strokeDash=[5, 3], strokeWidth=1.5)
    if axis == "x":
        text = alt.Chart(data).mark_text(color=VERMILION, align="left", dx=5, dy=8, baseline="top")
        return alt.layer(rule.encode(x="position:Q"), text.encode(x="position:Q", y=alt.value(0), text="label:N"))
    text = alt.Chart(data).mark_text(color=VERMILION, align="right", dx=-4, dy=-6)
    return alt.layer(rule.encode(y="position:Q"), text.encode(y="position:Q", x=alt.value("width"), text="label:N"))
