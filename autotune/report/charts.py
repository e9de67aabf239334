"""Draw the report's charts as SVG text, reproducibly and in colours that suit colour-blind readers."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any

from autotune.units import fmt_bytes

# the palette of Okabe and Ito, 2008
BLACK, ORANGE, SKY, GREEN = "#1b1f24", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8a9099"
PALE = "#c9cdd2"
GRID = "#e7e9ec"
MIB = 2**20
PIXEL = 1 / 500
"""Share of a chart's height or width below which two marks fall into the same pixel and are merged."""

WIDTH = 7.6
"""Width of a chart in inches, small enough that its text stays legible on a telephone."""
MIN_SPAN = 0.04
"""Least extent of an axis, as a share of its highest value: points of equal bytes would give an axis of digits."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "autotune",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": BLACK,
    "text.color": BLACK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "xtick.color": BLACK,
    "ytick.color": BLACK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


class PointKind(StrEnum):
    """Kind of a trial in the time-memory chart."""

    BASELINE = "baseline"
    BEST = "best"
    FRONT = "front"
    """Verified point of a study of the Pareto front."""
    WITHIN_BUDGET = "ok"
    OVER_BUDGET = "over"
    FAILED = "failed"
    """A failed trial, drawn at its predicted bytes and time."""
    PREDICTED = "predicted"
    """A trial that was predicted and not run."""

    @property
    def is_measured(self) -> bool:
        """True if bytes and time of such a trial are measured."""
        return self not in (PointKind.FAILED, PointKind.PREDICTED)


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """One trial in the time-memory chart: its bytes and its cost, measured or predicted."""

    number: int
    nbytes: float
    cost: float
    kind: PointKind
    interval: tuple[float, float] | None = None
    """Confidence interval of the cost, for a re-measured plan."""
    is_verified: bool = False
    """True if the plan is a verified point of the front."""


@dataclass(frozen=True, slots=True)
class MemoryPanel:
    """Memory of one step by role: `roles` holds the bytes from each of `seconds` to the next."""

    title: str
    seconds: Sequence[float]
    roles: Mapping[str, Sequence[float]]
    measured_bytes: float | None = None
    """Measured peak of the step."""
    phases: Sequence[tuple[float, str]] = ()
    """Start in seconds and name of each phase of the step."""


Bar = tuple[float, float, str]
"""Start and end in seconds, and the activity that gives the bar its colour."""
EngineBars = Mapping[str, Iterable[Bar]]
"""Bars of each engine: compute, loads, saves."""

MARKS: Mapping[PointKind, tuple[str, dict[str, Any]]] = {
    PointKind.PREDICTED: ("predicted, not run", {"marker": ".", "s": 60, "color": "#9aa1a9", "zorder": 2}),
    PointKind.OVER_BUDGET: (
        "over budget", {"marker": "v", "s": 40, "facecolors": "none", "edgecolors": VERMILION, "zorder": 3},
    ),
    PointKind.FAILED: (
        "failed, at its prediction", {"marker": "x", "s": 42, "color": VERMILION, "linewidths": 1.6, "zorder": 5},
    ),
    PointKind.WITHIN_BUDGET: (
        "within budget", {"marker": "o", "s": 40, "color": SKY, "edgecolors": BLUE, "zorder": 4},
    ),
    PointKind.FRONT: (
        "verified front", {"marker": "o", "s": 62, "color": GREEN, "edgecolors": BLACK, "linewidths": 0.8, "zorder": 5},
    ),
    PointKind.BASELINE: ("baseline: plain PyTorch", {"marker": "D", "s": 62, "color": BLACK, "zorder": 5}),
    PointKind.BEST: (
        "best", {"marker": "*", "s": 230, "color": ORANGE, "edgecolors": BLACK, "linewidths": 0.8, "zorder": 6},
    ),
}  # fmt: skip
"""Legend label and style of each kind of point."""


def draw_frontier(points: Sequence[TrialPoint], *, budget_bytes: float | None, cost_label: str) -> str:
    """Return the chart of step memory against cost, with the Pareto front and the budget."""
    with _figure(3.9, "Step memory against step time, one mark per trial") as (all_axes, svg):
        (axes,) = all_axes
        if budget_bytes is not None:
            _budget_line(axes.axvline, budget_bytes)
        if front := list(pareto_front(front_points(points))):
            nbytes, costs = zip(*front, strict=True)
            axes.step([n / MIB for n in nbytes], costs, where="post", color=BLUE, lw=1.1, zorder=1)
        for kind, (label, style) in MARKS.items():
            of_kind = [point for point in points if point.kind is kind]
            if of_kind:
                axes.scatter(
                    [point.nbytes / MIB for point in of_kind], [point.cost for point in of_kind], label=label, **style
                )
        for point in points:
            if point.interval is not None:
                axes.vlines(point.nbytes / MIB, *point.interval, color=BLACK, lw=1.1, zorder=4.5)
            if point.kind in (PointKind.BEST, PointKind.BASELINE):
                axes.annotate(
                    f"plan {point.number}" if point.kind is PointKind.BEST else "eager",
                    (point.nbytes / MIB, point.cost), xytext=(9, 7), textcoords="offset points", fontsize=9.5,
                )  # fmt: skip
        axes.set_xlabel("step memory, MiB (with parameters and optimizer state, without the idle process)")
        axes.set_ylabel(cost_label)
        axes.margins(0.08, 0.14)
        for get, set_ in ((axes.get_xlim, axes.set_xlim), (axes.get_ylim, axes.set_ylim)):
            set_(*_widen(*get()))
        _legend(axes.figure, [axes])
    return svg.text


def draw_memory(panels: Sequence[MemoryPanel], colours: Mapping[str, str], budget_bytes: float | None) -> str:
    """Return a chart of steps one above the other, stacked by role, on the same scales of seconds and bytes.

    The outline of the first panel is repeated in the others for comparison.
    """
    highest = max((sum(column) for panel in panels for column in zip(*panel.roles.values(), strict=True)), default=0)
    panels = [_simplify(panel, PIXEL * highest) for panel in panels]
    with _figure(0.9 + 2.1 * len(panels), "Memory during one step, stacked by role", len(panels)) as (all_axes, svg):
        for panel, axes in zip(panels, all_axes, strict=True):
            present = {role: nbytes for role, nbytes in panel.roles.items() if any(nbytes)}
            axes.stackplot(
                [1e3 * second for second in panel.seconds],
                [[n / MIB for n in nbytes] for nbytes in present.values()],
                labels=list(present), colors=[colours[role] for role in present], linewidth=0, step="post",
            )  # fmt: skip
            if panel is not panels[0]:
                totals = [sum(column) / MIB for column in zip(*panels[0].roles.values(), strict=True)]
                axes.plot(
                    [1e3 * second for second in panels[0].seconds], totals, color=BLACK, lw=0.9, drawstyle="steps-post",
                    label=panels[0].title.partition(":")[0],
                )  # fmt: skip
            if budget_bytes is not None:
                _budget_line(axes.axhline, budget_bytes)
            if panel.measured_bytes is not None:
                axes.axhline(panel.measured_bytes / MIB, color=BLACK, lw=1.1, ls=(0, (1, 2)), label="measured peak")
            _mark_phases(axes, panel.phases)
            axes.set_title(panel.title, loc="left", fontsize=10)
            axes.set_ylabel("MiB")
            axes.set_ylim(bottom=0)
            axes.margins(x=0)
        all_axes[-1].set_xlabel("time of one step, simulated, ms")
        _legend(all_axes[0].figure, all_axes)
    return svg.text


def draw_transfers(panels: Mapping[str, EngineBars], colours: Mapping[str, str]) -> str:
    """Return a chart of steps one above the other on the same time axis, with a row for each engine."""
    rows = max(len(engines) for engines in panels.values())
    width = max((end for engines in panels.values() for bars in engines.values() for _, end, _ in bars), default=0.0)
    height = 0.9 + (0.35 + 0.34 * rows) * len(panels)
    with _figure(height, "Compute and transfers during one step", len(panels)) as (all_axes, svg):
        for (title, engines), axes in zip(panels.items(), all_axes, strict=True):
            for row, bars in enumerate(engines.values()):
                for activity, extents in _merge_bars(bars, PIXEL * width).items():
                    drawn = [(1e3 * start, 1e3 * (end - start)) for start, end in extents]
                    axes.broken_barh(drawn, (row - 0.36, 0.72), facecolors=colours[activity], label=activity)
            axes.set_yticks(range(len(engines)), list(engines))
            axes.set_ylim(len(engines) - 0.4, -0.6)
            axes.grid(False, axis="y")
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlim(0, 1e3 * width)
        all_axes[-1].set_xlabel("time of one step, ms")
        _legend(all_axes[0].figure, all_axes)
    return svg.text


def front_points(points: Sequence[TrialPoint]) -> list[tuple[float, float]]:
    """Return the (bytes, cost) that the line of the front goes through, sorted: verified points, or else all measured ones.

    >>> front_points([TrialPoint(1, 2.0, 1.5, PointKind.FRONT, is_verified=True), TrialPoint(2, 1.0, 1.6, PointKind.WITHIN_BUDGET)])
    [(2.0, 1.5)]
    """
    verified = [point for point in points if point.is_verified]
    return sorted((point.nbytes, point.cost) for point in verified or points if point.kind.is_measured)


def pareto_front(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the (bytes, cost) of the Pareto front from points sorted by bytes.

    >>> list(pareto_front([(1, 5.0), (2, 6.0), (3, 4.0)]))
    [(1, 5.0), (3, 4.0)]
    """
    lowest = float("inf")
    for nbytes, cost in points:
        if cost < lowest:
            lowest = cost
            yield nbytes, cost


@dataclass
class _Svg:
    text: str = ""


@contextmanager
def _figure(height: float, label: str, rows: int = 1) -> Iterator[tuple[list[Any], _Svg]]:
    """Yield the axes of a new figure, one below the other, and draw the figure when the block ends.

    pyplot is avoided: its state is global.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        svg = _Svg()
        axes = figure.subplots(rows, 1, sharex=True, sharey=rows > 1, squeeze=False)
        yield list(axes[:, 0]), svg
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    svg.text = _make_inline(text.getvalue(), label)


def _make_inline(markup: str, label: str) -> str:
    """Return the `<svg>` element alone: in the page's font, without ids, coordinates rounded to pixels."""
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup[markup.index("<svg") :], flags=re.DOTALL)
    markup = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", markup)
    markup = re.sub(r"; font-family: [^;\"]*", "", markup)
    markup = re.sub(r"<g id=\"[^\"]*\"", "<g", markup)
    markup = re.sub(r" d=\"([^\"]*)\"", lambda match: f' d="{_shorten_path(match[1])}"', markup)
    markup = re.sub(r">\s+<", ">\n<", markup)
    # the page's colour scheme decides what is black on white
    markup = re.sub(f'{BLACK}(?=[;"])', "currentColor", markup)
    markup = re.sub(f'{GRID}(?=[;"])', f"var(--grid, {GRID})", markup)
    # alone, as in a README, a picture is black on white; the page's own style overrides both
    head = f'<svg role="img" aria-label="{label}" font-family="sans-serif" color="{BLACK}" style="background: #fff" '
    return markup.replace("<svg ", head, 1)


def _shorten_path(path: str) -> str:
    """Round a path's coordinates; long paths of straight lines also get H and V commands and lose empty moves."""
    words = path.split()
    if not set(words[::3]) <= {"M", "L", "z"} or len(words) < 20:
        return " ".join(word if word.isalpha() else _round(word, 2) for word in words)
    commands: list[str] = []
    position = ("", "")
    rest = iter(words)
    for command in rest:
        if command == "z":
            commands.append(command)
            continue
        target = _round(next(rest), 1), _round(next(rest), 1)
        if command == "M":
            commands.append(f"M{target[0]} {target[1]}")
        elif target[0] == position[0] and target[1] != position[1]:
            commands.append(f"V{target[1]}")
        elif target[1] == position[1] and target[0] != position[0]:
            commands.append(f"H{target[0]}")
        elif target != position:
            commands.append(f"L{target[0]} {target[1]}")
        position = target
    return "".join(commands)


def _round(number: str, decimals: int) -> str:
    return f"{float(number):.{decimals}f}".rstrip("0").rstrip(".")


def _simplify(panel: MemoryPanel, nbytes: float) -> MemoryPanel:
    """Merge neighbours whose boundaries all differ by less than `nbytes`, keeping the highest of them."""
    seconds: list[float] = []
    columns: list[tuple[float, ...]] = []
    levels: list[float] = []
    for second, column in zip(panel.seconds, zip(*panel.roles.values(), strict=True), strict=True):
        boundaries = list(accumulate(column))
        if levels and max(abs(new - old) for new, old in zip(boundaries, levels, strict=True)) < nbytes:
            columns[-1] = max(columns[-1], column, key=sum)
            continue
        seconds.append(second)
        columns.append(column)
        levels = boundaries
    if seconds and seconds[-1] != panel.seconds[-1]:  # keep the end of the step
        seconds.append(panel.seconds[-1])
        columns.append(columns[-1])
    roles = dict(zip(panel.roles, zip(*columns, strict=True), strict=True)) if columns else {}
    return replace(panel, seconds=seconds, roles=roles)


def _merge_bars(bars: Iterable[Bar], gap: float) -> dict[str, list[tuple[float, float]]]:
    """Return the (start, end) of the bars by activity, joining those closer together than `gap` seconds."""
    merged: dict[str, list[tuple[float, float]]] = {}
    for start, end, activity in bars:
        extents = merged.setdefault(activity, [])
        if extents and start - extents[-1][1] < gap:
            extents[-1] = extents[-1][0], max(end, extents[-1][1])
        else:
            extents.append((start, end))
    return merged


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return the limits of an axis, widened about their middle to `MIN_SPAN` of the higher one."""
    missing = max(0.0, MIN_SPAN * abs(high) - (high - low)) / 2
    return low - missing, high + missing


def _mark_phases(axes: Any, phases: Sequence[tuple[float, str]]) -> None:
    """Draw a line at the start of each phase but the first, and its name."""
    for number, (second, name) in enumerate(phases):
        if number:
            axes.axvline(1e3 * second, color=GREY, lw=0.9)
        place = {"xy": (1e3 * second, 1), "xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(name, xytext=(3, -10), fontsize=8.5, **place)


def _budget_line(draw: Any, nbytes: float) -> None:
    draw(nbytes / MIB, color=VERMILION, lw=1.4, ls=(0, (5, 3)), label=f"budget, {fmt_bytes(nbytes)}", zorder=3)


def _legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """Draw one legend above all axes of a figure."""
    handles = {label: mark for axes in all_axes for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper left",
        ncols=4,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.3,
    )
