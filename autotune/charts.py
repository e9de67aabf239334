"""Charts of the report as SVG text, the same bytes from the same numbers; colours that every eye tells apart."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Okabe and Ito 2008
BLACK, ORANGE, SKY, GREEN = "#1b1f24", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8a9099"
MIB = 2**20

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


Band = tuple[Sequence[float], Sequence[float]]
"""(seconds, bytes), one entry for each slice of time."""

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
    with _axes(9.4, 3.9) as (axes, svg):
        if budget_bytes is not None:
            _budget_line(axes.axvline, budget_bytes, "budget")
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
        _legend(axes, 6)
    return svg.text


def memory(traced: Band, best: Band | None, roles: Mapping[str, Sequence[float]], budget_bytes: float | None) -> str:
    """The traced plan as a line, the best plan stacked by role, over the simulated time of one step."""
    with _axes(9.4, 4.1) as (axes, svg):
        if best is not None:
            colours = dict(zip(roles, (BLUE, SKY, GREY, GREEN, ORANGE, PURPLE, YELLOW), strict=False))
            filled = {role: nbytes for role, nbytes in roles.items() if any(nbytes)}
            axes.stackplot(
                [1e3 * at for at in best[0]],
                [[one / MIB for one in nbytes] for nbytes in filled.values()],
                labels=list(filled), colors=[colours[role] for role in filled], linewidth=0, step="post",
            )  # fmt: skip
        axes.plot(
            [1e3 * at for at in traced[0]], [n / MIB for n in traced[1]],
            color=BLACK, lw=1.3, drawstyle="steps-post", label="as traced, no plan",
        )  # fmt: skip
        if budget_bytes is not None:
            _budget_line(axes.axhline, budget_bytes, "budget")
        axes.set_xlabel("time of one step, simulated, ms")
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        _legend(axes, 5)
    return svg.text


def lanes(tracks: Mapping[str, Iterable[tuple[float, float, str]]], colours: Mapping[str, str], seen: str) -> str:
    """One row a track; each bar (start, end, what), coloured by what; `seen`: simulated or measured."""
    with _axes(9.4, 0.9 + 0.42 * len(tracks)) as (axes, svg):
        labelled: set[str] = set()
        for row, bars in enumerate(tracks.values()):
            grouped: dict[str, list[tuple[float, float]]] = {}
            for start, end, what in bars:
                grouped.setdefault(what, []).append((1e3 * start, 1e3 * (end - start)))
            for what, extents in grouped.items():
                label = None if what in labelled else what
                labelled.add(what)
                axes.broken_barh(extents, (row - 0.36, 0.72), facecolors=colours[what], label=label)
        axes.set_yticks(range(len(tracks)), list(tracks))
        axes.set_ylim(len(tracks) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"time of one step, {seen}, ms")
        axes.margins(x=0)
        _legend(axes, 7)
    return svg.text


@dataclass
class _Svg:
    text: str = ""


@contextmanager
def _axes(width: float, height: float) -> Iterator[tuple[Any, _Svg]]:
    """Axes of a figure of its own (no pyplot, no global state), drawn when the block ends."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        drawn = _Svg()
        yield figure.add_subplot(), drawn
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    markup = text.getvalue()
    # inline in HTML a prolog is out of place, and the page's own font reads better than matplotlib's
    markup = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", markup[markup.index("<svg") :])
    drawn.text = re.sub(r"<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)


def unbeaten(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Of points sorted by bytes those that are cheaper than all smaller ones."""
    lowest = float("inf")
    for nbytes, cost in points:
        if cost < lowest:
            lowest = cost
            yield nbytes, cost


def _budget_line(draw: Any, nbytes: float, label: str) -> None:
    draw(nbytes / MIB, color=VERMILION, lw=1.4, ls=(0, (5, 3)), label=label, zorder=3)


def _legend(axes: Any, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, fontsize=9, handlelength=1.4, columnspacing=1.3
    )
