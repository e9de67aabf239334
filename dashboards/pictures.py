"""The charts of the pages, as Altair charts of plain rows; colours are the report's."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import altair as alt
import pandas as pd

from autotune.nightly.history import Verdict
from autotune.report.charts import BLACK, BLUE, GREEN, GREY, MARKS, MIB, ORANGE, PURPLE, SKY, VERMILION, Dot, unbeaten
from autotune.report.claims import Verdict as Claimed
from dashboards.nights import Point
from dashboards.reproductions import Beside

DOTS = {
    "baseline": (BLACK, "diamond"),
    "best": (ORANGE, "triangle-up"),
    "ok": (BLUE, "circle"),
    "over": (VERMILION, "triangle-down"),
    "failed": (VERMILION, "cross"),
    "predicted": (GREY, "circle"),
}
NIGHTS = {
    Verdict.SAME: BLUE, Verdict.NEW: SKY, Verdict.PROMOTED: GREEN, Verdict.REGRESSION: VERMILION,
    Verdict.INCONCLUSIVE: GREY, Verdict.FAILED: BLACK,
}  # fmt: skip
CLAIMS = {
    Claimed.REPRODUCED: GREEN, Claimed.RATIOS: BLUE, Claimed.NOT: VERMILION, Claimed.INCOMPARABLE: GREY,
}  # fmt: skip


Picture = alt.LayerChart | alt.FacetChart


def frontier(dots: Sequence[Dot], budget_bytes: float | None, cost: str) -> Picture:
    """Step bytes against cost, with the stairs of what nothing else beats and the budget's line."""
    # room for the words beside the last dot
    x = alt.X("MiB:Q", title="bytes of the step, MiB", scale=alt.Scale(zero=False, padding=50))
    y = alt.Y("cost:Q", title=cost, scale=alt.Scale(zero=False, padding=20))
    layers: list[Any] = [layer.encode(x=x, y=y) for layer in (_stairs(dots), _marks(dots), _names(dots))]
    if budget_bytes is not None:
        layers.insert(0, _line("x", budget_bytes / MIB, f"budget {budget_bytes / MIB:.1f} MiB"))
    return alt.layer(*layers).properties(height=380)


def _stairs(dots: Sequence[Dot]) -> alt.Chart:
    fits = sorted((dot.nbytes / MIB, dot.cost) for dot in dots if dot.kind in ("ok", "best", "baseline", "over"))
    data = pd.DataFrame(list(unbeaten(fits)), columns=["MiB", "cost"])
    drawn: alt.Chart = alt.Chart(data).mark_line(interpolate="step-after", color=BLUE, strokeWidth=1)
    return drawn


def _marks(dots: Sequence[Dot]) -> alt.Chart:
    """A dot a trial, its kind in colour and shape."""
    data = pd.DataFrame(
        {"MiB": dot.nbytes / MIB, "cost": dot.cost, "what": MARKS[dot.kind][0], "trial": dot.number} for dot in dots
    )
    shown = {MARKS[kind][0]: drawn for kind, drawn in DOTS.items() if any(dot.kind == kind for dot in dots)}
    legend = alt.Legend(title=None, orient="top", columns=3, labelLimit=400)
    colours = alt.Scale(domain=list(shown), range=[colour for colour, _ in shown.values()])
    shapes = alt.Scale(domain=list(shown), range=[shape for _, shape in shown.values()])
    drawn: alt.Chart = alt.Chart(data).mark_point(filled=True, size=90, opacity=0.9)
    return drawn.encode(
        color=alt.Color("what:N", scale=colours, legend=legend),
        shape=alt.Shape("what:N", scale=shapes, legend=legend),
        tooltip=["trial:Q", "what:N", alt.Tooltip("MiB:Q", format=".1f"), alt.Tooltip("cost:Q", format=".3f")],
    )


def _names(dots: Sequence[Dot]) -> alt.Chart:
    """Words at the best and at plain eager."""
    named = {"best": "plan {}", "baseline": "eager"}
    rows = [(dot.nbytes / MIB, dot.cost, named[dot.kind].format(dot.number)) for dot in dots if dot.kind in named]
    data = pd.DataFrame(rows, columns=["MiB", "cost", "name"])
    drawn: alt.Chart = alt.Chart(data).mark_text(align="left", dx=9, dy=-9, fontSize=12)
    return drawn.encode(text="name:N")


def timelines(rows: Sequence[tuple[str, float, float]], budgets: Sequence[tuple[str, float]]) -> Picture:
    """(plan, milliseconds, MiB) of two plans on one axis, and (name, bytes) of their budgets across it."""
    data = pd.DataFrame(rows, columns=["plan", "ms", "MiB"])
    names = list(dict.fromkeys(data["plan"]))
    legend = alt.Legend(title=None, orient="top", columns=1, labelLimit=700, symbolOpacity=1)
    colour = alt.Color("plan:N", scale=alt.Scale(domain=names, range=[BLACK, ORANGE][: len(names)]), legend=legend)
    drawn = alt.Chart(data).encode(
        x=alt.X("ms:Q", title="time of one step, simulated, ms", scale=alt.Scale(nice=False)),
        y=alt.Y("MiB:Q", title="bytes of the step, MiB", stack=None),
        color=colour,
    )
    layers: list[Any] = [
        drawn.mark_area(interpolate="step-after", opacity=0.12),
        drawn.mark_line(interpolate="step-after", strokeWidth=1.5),
    ]
    layers += [_line("y", nbytes / MIB, f"{name} {nbytes / MIB:.1f} MiB") for name, nbytes in budgets]
    return alt.layer(*layers).properties(height=380)


def nights(points: Sequence[Point]) -> Picture:
    """The champion's time over plain eager's, night by night, of one entry; a line as long as a champion stands."""
    data = pd.DataFrame([asdict(point) for point in points])
    shown = [verdict for verdict in NIGHTS if any(point.verdict == verdict for point in points)]
    scale = alt.Scale(domain=[verdict.value for verdict in shown], range=[NIGHTS[verdict] for verdict in shown])
    x = alt.X("at:T", title=None, scale=alt.Scale(padding=20))
    y = alt.Y("ratio:Q", title="time, of plain eager's", scale=alt.Scale(zero=False, padding=20))
    line = alt.Chart(data).mark_line(color=GREY, strokeWidth=1).encode(x=x, y=y, detail="champion:N")
    dots = (
        alt.Chart(data)
        .mark_point(filled=True, size=100, opacity=1)
        .encode(
            x=x,
            y=y,
            color=alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
            tooltip=[
                "night:N", "verdict:N", alt.Tooltip("ratio:Q", format=".3f"),
                alt.Tooltip("charged_mib:Q", title="charged MiB", format=".1f"), "champion:N",
            ],
        )
    )  # fmt: skip
    return alt.layer(line, dots).properties(height=280)


def published(found: Sequence[Beside]) -> Picture:
    """Ours over published, a row an experiment; equal lies on the line."""
    data = pd.DataFrame([asdict(one) for one in found])
    shown = [verdict for verdict in CLAIMS if any(one.verdict == verdict for one in found)]
    scale = alt.Scale(domain=[verdict.value for verdict in shown], range=[CLAIMS[verdict] for verdict in shown])
    dots = (
        alt.Chart(data)
        .mark_point(filled=True, size=80, opacity=0.75)
        .encode(
            x=alt.X(
                "ours_over_published:Q",
                title="our number over the published one",
                scale=alt.Scale(type="log"),
                axis=alt.Axis(values=[0.001, 0.01, 0.1, 0.5, 1, 2, 10, 100], format="~g"),
            ),
            y=alt.Y("experiment:N", title=None, axis=alt.Axis(labelLimit=300)),
            color=alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
            tooltip=["experiment:N", "claim:N", alt.Tooltip("ours_over_published:Q", format=".3f"), "verdict:N"],
        )
    )
    equal = alt.Chart(pd.DataFrame({"at": [1.0]})).mark_rule(color=PURPLE, strokeDash=[5, 3]).encode(x="at:Q")
    return alt.layer(equal, dots).properties(height=80 + 34 * data["experiment"].nunique())


def _line(axis: str, at: float, label: str) -> Picture:
    """A budget across the chart, with its words at an end."""
    data = pd.DataFrame({"at": [at], "label": [label]})
    rule = alt.Chart(data).mark_rule(color=VERMILION, strokeDash=[5, 3], strokeWidth=1.5)
    if axis == "x":
        words = alt.Chart(data).mark_text(color=VERMILION, align="left", dx=5, dy=8, baseline="top")
        return alt.layer(rule.encode(x="at:Q"), words.encode(x="at:Q", y=alt.value(0), text="label:N"))
    words = alt.Chart(data).mark_text(color=VERMILION, align="right", dx=-4, dy=-6)
    return alt.layer(rule.encode(y="at:Q"), words.encode(y="at:Q", x=alt.value("width"), text="label:N"))
