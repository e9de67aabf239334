"""Charts of the report as SVG text, the same bytes from the same numbers; colours that every eye tells apart."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from autotune.units import fmt_bytes

# Okabe and Ito 2008
BLACK, ORANGE, SKY, GREEN = "#1b1f24", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8a9099"
PALE = "#c9cdd2"
MIB = 2**20
FINE = 1 / 500
"""Of a picture's height or width: what differs by less falls into the same pixel and is drawn as one."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "autotune",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": BLACK,
    "xtick.color": BLACK,
    "ytick.color": BLACK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e7e9ec",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Dot:
    """One trial on the frontier: bytes and cost as measured, or as predicted where it failed before."""

    number: int
    nbytes: float
    cost: float
    kind: str
    """`baseline`, `best`, `ok`, `over`, `failed` or `predicted`."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plan through its step: bytes by what they are for, from each of `seconds` to the next."""

    title: str
    seconds: Sequence[float]
    roles: Mapping[str, Sequence[float]]


Tracks = Mapping[str, Iterable[tuple[float, float, str]]]
"""Per engine its bars: (start, end, what), in seconds."""

MARKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "predicted": ("predicted, not run", {"marker": ".", "s": 60, "color": "#9aa1a9", "zorder": 2}),
    "over": ("over budget", {"marker": "v", "s": 40, "facecolors": "none", "edgecolors": VERMILION, "zorder": 3}),
    "failed": ("failed, at its prediction", {"marker": "x", "s": 42, "color": VERMILION, "linewidths": 1.6, "zorder": 5}),
    "ok": ("fits", {"marker": "o", "s": 40, "color": SKY, "edgecolors": BLUE, "zorder": 4}),
    "baseline": ("baseline: plain PyTorch", {"marker": "D", "s": 62, "color": BLACK, "zorder": 5}),
    "best": ("best", {"marker": "*", "s": 230, "color": ORANGE, "edgecolors": BLACK, "linewidths": 0.8, "zorder": 6}),
}  # fmt: skip


def frontier(dots: Sequence[Dot], *, budget_bytes: float | None, cost: str) -> str:
    """Step bytes against cost, with the staircase of what nothing else beats and the budget's line."""
    with _figure(3.9, "Bytes of a step against its time, a mark for every trial") as (all_axes, svg):
        (axes,) = all_axes
        if budget_bytes is not None:
            _budget_line(axes.axvline, budget_bytes)
        fits = sorted((dot.nbytes, dot.cost) for dot in dots if dot.kind in ("ok", "best", "baseline", "over"))
        if stairs := list(unbeaten(fits)):
            axes.step(
                [nbytes / MIB for nbytes, _ in stairs],
                [c for _, c in stairs],
                where="post",
                color=BLUE,
                lw=1.1,
                zorder=1,
            )
        for kind, (label, mark) in MARKS.items():
            some = [dot for dot in dots if dot.kind == kind]
            if some:
                axes.scatter([dot.nbytes / MIB for dot in some], [dot.cost for dot in some], label=label, **mark)
        for dot in dots:
            if dot.kind in ("best", "baseline"):
                axes.annotate(
                    f"plan {dot.number}" if dot.kind == "best" else "eager",
                    (dot.nbytes / MIB, dot.cost), xytext=(9, 7), textcoords="offset points", fontsize=9.5,
                )  # fmt: skip
        axes.set_xlabel("bytes of the step, MiB (parameters and state included, the process's floor not)")
        axes.set_ylabel(cost)
        axes.margins(0.08, 0.14)
        _legend(axes.figure, [axes])
    return svg.text


def memory(panels: Sequence[Panel], colours: Mapping[str, str], budget_bytes: float | None) -> str:
    """Plans one above the other, each stacked by role, with the same seconds and the same bytes everywhere.

    The first one's height is drawn into the others as a line.
    """
    highest = max((sum(column) for panel in panels for column in zip(*panel.roles.values(), strict=True)), default=0)
    thin = [_thinned(panel, FINE * highest) for panel in panels]
    with _figure(0.9 + 2.1 * len(panels), "Memory through one step, stacked by role", len(panels)) as (all_axes, svg):
        for panel, axes in zip(thin, all_axes, strict=True):
            filled = {role: nbytes for role, nbytes in panel.roles.items() if any(nbytes)}
            axes.stackplot(
                [1e3 * at for at in panel.seconds],
                [[one / MIB for one in nbytes] for nbytes in filled.values()],
                labels=list(filled), colors=[colours[role] for role in filled], linewidth=0, step="post",
            )  # fmt: skip
            if panel is not thin[0]:
                totals = [sum(column) / MIB for column in zip(*thin[0].roles.values(), strict=True)]
                axes.plot(
                    [1e3 * at for at in thin[0].seconds], totals, color=BLACK, lw=0.9, drawstyle="steps-post",
                    label=thin[0].title.partition(":")[0],
                )  # fmt: skip
            if budget_bytes is not None:
                _budget_line(axes.axhline, budget_bytes)
            axes.set_title(panel.title, loc="left", fontsize=10)
            axes.set_ylabel("MiB")
            axes.set_ylim(bottom=0)
            axes.margins(x=0)
        all_axes[-1].set_xlabel("time of one step, simulated, ms")
        _legend(all_axes[0].figure, all_axes)
    return svg.text


def lanes(panels: Mapping[str, Tracks], colours: Mapping[str, str]) -> str:
    """Steps one above the other under the same clock, one row for each engine; every bar coloured by what it is."""
    rows = max(len(tracks) for tracks in panels.values())
    width = max((end for tracks in panels.values() for bars in tracks.values() for _, end, _ in bars), default=0.0)
    height = 0.9 + (0.35 + 0.34 * rows) * len(panels)
    with _figure(height, "When a step computes, saves and loads", len(panels)) as (all_axes, svg):
        for (title, tracks), axes in zip(panels.items(), all_axes, strict=True):
            for row, bars in enumerate(tracks.values()):
                for what, extents in _joined(bars, FINE * width).items():
                    drawn = [(1e3 * start, 1e3 * (end - start)) for start, end in extents]
                    axes.broken_barh(drawn, (row - 0.36, 0.72), facecolors=colours[what], label=what)
            axes.set_yticks(range(len(tracks)), list(tracks))
            axes.set_ylim(len(tracks) - 0.4, -0.6)
            axes.grid(False, axis="y")
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlim(0, 1e3 * width)
        all_axes[-1].set_xlabel("time of one step, ms")
        _legend(all_axes[0].figure, all_axes)
    return svg.text


@dataclass
class _Svg:
    text: str = ""


@contextmanager
def _figure(height: float, label: str, rows: int = 1) -> Iterator[tuple[list[Any], _Svg]]:
    """Axes under each other, of a figure of its own (no pyplot, no global state), drawn when the block ends."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.4, height), layout="constrained")
        drawn = _Svg()
        axes = figure.subplots(rows, 1, sharex=True, sharey=rows > 1, squeeze=False)
        yield list(axes[:, 0]), drawn
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    drawn.text = _inline(text.getvalue(), label)


def _inline(markup: str, label: str) -> str:
    """The picture alone, fit to stand in a page: its font where the page has none, and coordinates to the pixel."""
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup[markup.index("<svg") :], flags=re.DOTALL)
    markup = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", markup)
    markup = re.sub(r"; font-family: [^;\"]*", "", markup)
    markup = re.sub(r"<g id=\"[^\"]*\"", "<g", markup)
    markup = re.sub(r" d=\"([^\"]*)\"", lambda found: f' d="{_rounded(found[1])}"', markup)
    markup = re.sub(r">\s+<", ">\n<", markup)
    return markup.replace("<svg ", f'<svg role="img" aria-label="{label}" font-family="sans-serif" ', 1)


def _rounded(path: str) -> str:
    """A path of lines alone, with a decimal at most and no coordinate that stays as it is; others with two decimals."""
    words = path.split()
    if not set(words[::3]) <= {"M", "L", "z"} or len(words) < 20:
        return " ".join(word if word.isalpha() else _short(word, 2) for word in words)
    made: list[str] = []
    at = ("", "")
    rest = iter(words)
    for command in rest:
        if command == "z":
            made.append(command)
            continue
        to = _short(next(rest), 1), _short(next(rest), 1)
        if command == "M":
            made.append(f"M{to[0]} {to[1]}")
        elif to[0] == at[0] and to[1] != at[1]:
            made.append(f"V{to[1]}")
        elif to[1] == at[1] and to[0] != at[0]:
            made.append(f"H{to[0]}")
        elif to != at:
            made.append(f"L{to[0]} {to[1]}")
        at = to
    return "".join(made)


def _short(number: str, decimals: int) -> str:
    return f"{float(number):.{decimals}f}".rstrip("0").rstrip(".")


def _thinned(panel: Panel, nbytes: float) -> Panel:
    """Neighbours of which no boundary differs by as much as that are one: the highest of them."""
    seconds: list[float] = []
    kept: list[tuple[float, ...]] = []
    levels: list[float] = []
    for at, column in zip(panel.seconds, zip(*panel.roles.values(), strict=True), strict=True):
        mine = list(accumulate(column))
        if levels and max(abs(one - other) for one, other in zip(mine, levels, strict=True)) < nbytes:
            kept[-1] = max(kept[-1], column, key=sum)
            continue
        seconds.append(at)
        kept.append(column)
        levels = mine
    if seconds and seconds[-1] != panel.seconds[-1]:  # where the step ends
        seconds.append(panel.seconds[-1])
        kept.append(kept[-1])
    return Panel(panel.title, seconds, dict(zip(panel.roles, zip(*kept, strict=True), strict=True)) if kept else {})


def _joined(bars: Iterable[tuple[float, float, str]], gap: float) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of the bars of each kind; those that no pixel parts are one."""
    found: dict[str, list[tuple[float, float]]] = {}
    for start, end, what in bars:
        mine = found.setdefault(what, [])
        if mine and start - mine[-1][1] < gap:
            mine[-1] = mine[-1][0], max(end, mine[-1][1])
        else:
            mine.append((start, end))
    return found


def unbeaten(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Of points sorted by bytes those that are cheaper than all smaller ones."""
    lowest = float("inf")
    for nbytes, cost in points:
        if cost < lowest:
            lowest = cost
            yield nbytes, cost


def _budget_line(draw: Any, nbytes: float) -> None:
    draw(nbytes / MIB, color=VERMILION, lw=1.4, ls=(0, (5, 3)), label=f"budget, {fmt_bytes(nbytes)}", zorder=3)


def _legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """One for all axes of a figure, above them."""
    named = {label: mark for axes in all_axes for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        named.values(), named.keys(), loc="outside upper left", ncols=5, fontsize=9, handlelength=1.4, columnspacing=1.3
    )
