"""What the results say: every point, ours against each peer's, one line of figures a model, and a plot. Pure functions of records."""

import csv
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scipy.optimize import isotonic_regression

sys.path.insert(0, str(Path(__file__).parents[1]))
from turns import beside, interval, ratios

WRONG, ROUNDINGS = 0.01, 10.0
"""Relative error of a gradient, from which on it is no rounding; and of what an ulp in every parameter does to it."""
SLACK = 1.005
"""Of a peer's bytes, that ours may take to be compared with it."""
NEARLY_EAGER = 1.03
MEAN, WORST, LOWEST, AT_NEARLY_EAGER = 0.92, 1.02, 0.75, 0.75
"""What ours is held to, in the units of the first table; the lowest only where a plan so low is not proved impossible."""
MIB = 2**20
Measure = Literal["peak", "charged"]


@dataclass(frozen=True, slots=True)
class Point:
    """One variant of one model."""

    model: str
    variant: str
    kind: Literal["eager", "peer", "compiler", "ours"]
    """A compiler's kernels are others than eager's."""
    peak_bytes: int | None = None
    """The step's own, with malloc returning memory at once."""
    charged_bytes: int | None = None
    """With the allocator of every day."""
    budget_bytes: int | None = None
    ratio: float | None = None
    """Of its median time to eager's in the same session."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    """95 % of it."""
    median_seconds: float | None = None
    samples: int = 0
    gradient_error: float | None = None
    gradient_worst: str = ""
    rounding: float = 0.0
    """What an ulp in every parameter makes of eager's own gradients: a relative error."""
    equal: bool | None = None
    """Loss and gradients have eager's bits."""
    buffer_error: float | None = None
    remark: str = ""

    @property
    def wrong(self) -> bool:
        """Its gradients are not eager's, nor a rounding of them."""
        return self.gradient_error is not None and not self.gradient_error <= max(WRONG, ROUNDINGS * self.rounding)

    @property
    def right(self) -> bool:
        """It ran, and computed what eager computes; ours bit for bit."""
        return self.peak_bytes is not None and (bool(self.equal) if self.kind == "ours" else not self.wrong)

    @property
    def counted(self) -> bool:
        """Whether times may be compared with it."""
        return self.right and self.ratio is not None


@dataclass(frozen=True, slots=True)
class Match:
    """A peer's point, and what ours gives for as many bytes."""

    model: str
    peer: str
    kind: str
    measure: Measure
    peer_bytes: int
    peer_ratio: float
    ours: str = ""
    ours_bytes: int | None = None
    ours_ratio: float | None = None
    ratio: float | None = None
    """Our time over the peer's; None where no plan of ours takes as few bytes."""


def points(model: str, record: dict[str, Any]) -> list[Point]:
    """Every variant of a model's record, eager first."""
    found = []
    for name, seen in {**record["peers"], **{f"ours: {name}": one for name, one in record["ours"].items()}}.items():
        ours = name.startswith("ours: ")
        variant = name.removeprefix("ours: ")
        kind = "ours" if ours else "eager" if name == "eager" else "compiler" if name.startswith("inductor") else "peer"
        session = next((s for s in reversed(record["sessions"]) if _blocks(s, variant)), None)
        failures = (s["failed"][variant] for s in record["sessions"] if variant in s["failed"])
        remark = seen.get("failed") or next(failures, "" if session else "not timed yet")
        timed = _timed(session, variant) if session and (variant in session["errors"] or kind == "eager") else {}
        if not timed and "errors" in seen:
            timed = _compared(seen["errors"])
        found.append(
            Point(
                model,
                variant,
                kind,  # type: ignore[arg-type]
                seen.get("step_peak_bytes"),
                seen.get("step_charged_bytes"),
                seen.get("budget_bytes"),
                rounding=record["rounding"]["gradients"]["error"] if "rounding" in record else 0.0,
                remark=remark,
                **timed,
            )
        )
    return found


def matches(found: list[Point], measure: Measure) -> list[Match]:
    """Ours against every counted peer, eager among them: of our plans that take no more bytes the one that was made for most,
    which the planners say is the fastest. The fastest as measured would be the luckiest of a dozen noisy times.
    """
    made = []
    seen = [point for point in found if point.counted and (measure == "peak" or point.charged_bytes is not None)]
    ours = [point for point in seen if point.kind == "ours"]
    for peer in seen:
        if peer.kind == "ours":
            continue
        limit = _bytes(peer, measure) * SLACK
        kept = (p for p in ours if _bytes(p, measure) <= limit)
        best = max(kept, key=lambda p: -1 if p.budget_bytes is None else p.budget_bytes, default=None)
        shown = (peer.model, peer.variant, peer.kind, measure, _bytes(peer, measure), peer.ratio or 0.0)
        if best is None or best.ratio is None or not peer.ratio:
            made.append(Match(*shown))
        else:
            made.append(Match(*shown, best.variant, _bytes(best, measure), best.ratio, best.ratio / peer.ratio))
    return made


def geometric_mean(compared: Iterable[Match]) -> float | None:
    """Of our time over the peers'; None where a peer's bytes are below all of ours, or there is no peer."""
    ratios = [match.ratio for match in compared]
    if not ratios or None in ratios:
        return None
    return statistics.geometric_mean(ratio for ratio in ratios if ratio is not None)


def same_kernels(compared: Iterable[Match]) -> list[Match]:
    """Without the compilers."""
    return [match for match in compared if match.kind != "compiler"]


def lowest_ratio(found: list[Point]) -> float | None:
    """Our lowest peak over the lowest of any peer that computes what eager computes, compilers included, timed or not."""
    ours = [_bytes(p, "peak") for p in found if p.kind == "ours" and p.right]
    peers = lowest_peer(found)
    return min(ours) / peers if ours and peers else None


def lowest_peer(found: list[Point]) -> int | None:
    """Lowest peak of any peer that computes what eager computes."""
    return min((_bytes(p, "peak") for p in found if p.kind != "ours" and p.right), default=None)


def nearly_eager(found: list[Point]) -> float | None:
    """Our lowest peak over eager's at no more than 1.03 times eager's time.

    Fewer bytes never take less time: that is how plans are chosen. So times are first made to rise as bytes fall (isotonic
    regression), else one that was fast by luck would stand for all around it.
    """
    eager = next((p for p in found if p.kind == "eager" and p.peak_bytes), None)
    ours = [p for p in found if p.kind == "ours" and p.counted and p.variant != "traced"]
    if eager is None or not ours:
        return None
    ours.sort(key=lambda p: -_bytes(p, "peak"))
    fitted = isotonic_regression([p.ratio for p in ours]).x
    kept = [_bytes(p, "peak") for p, ratio in zip(ours, fitted, strict=True) if ratio <= NEARLY_EAGER]
    return min(kept) / _bytes(eager, "peak") if kept else None


def summarize(out: Path) -> str:
    """points.csv, ratios.csv, a plot for each model, and summary.md, which it returns; from every MODEL.json."""
    paths = sorted(path for path in out.glob("*.json") if not path.name.endswith(".plans.json"))
    records = {path.stem: json.loads(path.read_text()) for path in paths}
    found = {model: points(model, record) for model, record in records.items()}
    compared = [match for one in found.values() for measure in ("peak", "charged") for match in matches(one, measure)]  # type: ignore[arg-type]
    _csv(out / "points.csv", list(itertools.chain(*found.values())))
    _csv(out / "ratios.csv", compared)
    for model, one in found.items():
        if any(point.ratio for point in one):
            _plot(out / f"{model}.png", model, one)
    text = markdown(records, found)
    (out / "summary.md").write_text(text)
    return text


def markdown(records: dict[str, Any], found: dict[str, list[Point]]) -> str:
    """For people."""
    lines = [
        "Time: over the peer's that of our plan for most bytes that takes no more than 1.005 times the peer's, on the same"
        " kernels (without inductor)."
        " Lowest: our lowest peak over the lowest of any peer, inductor included. At 1.03: our peak over eager's at no"
        " more than 1.03 times its time, where times rise as bytes fall (isotonic regression). Bound: our lowest peak over the proved lower bound of any plan's; proved: that bound"
        " over the lowest of any peer, which lowest cannot be below. A peer whose gradients are wrong is not counted, nor ours"
        " where a bit of a result is not eager's. Missed: what is above"
        f" {MEAN} (mean), {WORST} (worst), {LOWEST} (lowest, unless that is proved impossible), {AT_NEARLY_EAGER} (at 1.03).",
        "",
        "| model | time at peak: mean | worst | time at charge: mean | worst | lowest | proved | at 1.03 | bound | peers | missed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for model, one in found.items():
        at_peak, at_charge = same_kernels(matches(one, "peak")), same_kernels(matches(one, "charged"))
        bounds = [o["estimate"]["lower_bound_bytes"] for o in records[model]["ours"].values() if "estimate" in o]
        ours = [_bytes(p, "peak") for p in one if p.kind == "ours" and p.counted]
        peer = lowest_peer(one)
        proved = max(bounds) / peer if bounds and peer else None
        cells = [
            *(f(side) for side in (at_peak, at_charge) for f in (geometric_mean, _worst)),
            lowest_ratio(one),
            proved,
            nearly_eager(one),
            min(ours) / max(bounds) if ours and bounds else None,
        ]
        held = [
            ("mean", geometric_mean(at_peak), MEAN),
            ("worst", _worst(at_peak), WORST),
            ("lowest", lowest_ratio(one), math.inf if (proved or 0.0) > LOWEST else LOWEST),
            ("at 1.03", nearly_eager(one), AT_NEARLY_EAGER),
        ]
        missed = [name for name, seen, limit in held if seen is None or seen > limit] if ours else ["not measured yet"]
        lines.append(
            f"| {model} | {' | '.join(map(_number, cells))} | {len(at_peak)} | {', '.join(missed) or 'nothing'} |"
        )
    lines += ["", "Wrong gradients, shown and not counted:", ""]
    lines += [
        f"- {p.model}, {p.variant}: off by {p.gradient_error:.2g} of {p.gradient_worst}'s norm"
        for p in itertools.chain(*found.values())
        if p.wrong
    ] or ["- none"]
    lines += ["", "Without a figure:", ""]
    lines += [f"- {p.model}, {p.variant}: {p.remark}" for p in itertools.chain(*found.values()) if p.remark] or [
        "- none"
    ]
    for model, one in found.items():
        lines += ["", f"## {model}", "", *_table(one), "", _conditions(records[model])]
    return "\n".join(lines) + "\n"


def _table(found: list[Point]) -> list[str]:
    lines = [
        "| variant | peak MiB | of eager | charged MiB | time to eager (95 %) | gradients | buffers | ours at its peak"
        " | at its charge |",
        "|---|--:|--:|--:|--:|---|---|--:|--:|",
    ]
    eager = next(p for p in found if p.kind == "eager")
    sides = [{m.peer: m for m in matches(found, measure)} for measure in ("peak", "charged")]  # type: ignore[arg-type]
    for p in sorted(found, key=lambda p: (p.kind != "eager", p.kind == "ours", -(p.peak_bytes or 0))):
        against = [_number(side[p.variant].ratio) if p.kind != "ours" and p.variant in side else "" for side in sides]
        cells = [
            p.variant if p.kind != "ours" or p.variant.startswith("ours") else f"ours {p.variant}",
            _mib(p.peak_bytes),
            f"{p.peak_bytes / eager.peak_bytes:.1%}" if p.peak_bytes and eager.peak_bytes else "",
            _mib(p.charged_bytes),
            f"{p.ratio:.3f} ({p.ratio_low:.3f} to {p.ratio_high:.3f})" if p.ratio else p.remark,
            ""
            if p.gradient_error is None
            else _error(p.gradient_error, bool(p.equal)) + (", WRONG" if p.wrong else ""),
            "" if p.buffer_error is None else _error(p.buffer_error, not p.buffer_error),
            *against,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _conditions(record: dict[str, Any]) -> str:
    machine = record["machine"]
    sessions = "; ".join(
        f"{len({block['round'] for block in s['blocks']})} rounds,"
        f" load {s['load']['began'][0]:.2f} to {s['load']['ended'][0]:.2f}"
        for s in record["sessions"]
    )
    rounding = (
        f" an ulp in every parameter takes eager's gradients off by {record['rounding']['gradients']['error']:.1e};"
        if "rounding" in record
        else ""
    )
    commands = [f"`{one['command']}` ({one['started']})" for one in record["commands"]]
    return (
        f"{machine['silicon']}, cores: {machine['cores']}, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['driver']},"
        f" torch {machine['torch']}; {record['model']} {json.dumps(record['arguments'])}; sessions: {sessions or 'none'};"
        f"{rounding} measured by {', then by '.join(commands)}"
    )


def _blocks(session: dict[str, Any], variant: str) -> list[tuple[list[float], list[float]]]:
    """Each block of a variant, and those of eager next to it."""
    # sessions that say nothing left one step unmeasured: the next is still slow for who must fetch memory again
    late = max(0, 2 - session.get("unmeasured", 1))
    return beside([(block["variant"], block["seconds"][late:]) for block in session["blocks"]], variant)


def _timed(session: dict[str, Any], variant: str) -> dict[str, Any]:
    pairs = _blocks(session, variant)
    found = ratios(pairs)
    seconds = list(itertools.chain(*(mine for mine, _ in pairs)))
    median = statistics.median(seconds)
    low, high = interval(found)
    return {
        "ratio": statistics.median(found),
        "ratio_low": low,
        "ratio_high": high,
        "median_seconds": median,
        "samples": len(seconds),
    } | _compared(session["errors"].get(variant))


def _compared(errors: dict[str, Any] | None) -> dict[str, Any]:
    """How far results lie from eager's; None: they are eager's."""
    return {
        "gradient_error": errors["gradients"]["error"] if errors else 0.0,
        "gradient_worst": errors["gradients"]["worst"] if errors else "",
        "equal": errors["gradients"]["equal"] and errors["loss"]["equal"] if errors else True,
        "buffer_error": errors["buffers"]["error"] if errors else 0.0,
    }


def _bytes(point: Point, measure: Measure) -> int:
    found = point.peak_bytes if measure == "peak" else point.charged_bytes
    assert found is not None
    return found


def _worst(compared: list[Match]) -> float | None:
    ratios = [match.ratio for match in compared]
    return None if not ratios or None in ratios else max(ratio for ratio in ratios if ratio is not None)


def _number(found: float | None) -> str:
    return "none" if found is None else f"{found:.3f}"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def _error(error: float, equal: bool) -> str:
    return "equal" if equal else "inf" if math.isinf(error) else f"off by {error:.1e}"


def _csv(path: Path, rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])) if rows else ["model"])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


STYLES = {
    "eager": ("eager", "*", "black"),
    "checkpoint": ("checkpoint, its forms", "s", "tab:blue"),
    "aot_eager": ("budget, aot_eager", "^", "tab:green"),
    "inductor": ("budget, inductor", "v", "tab:purple"),
    "ours": ("ours", "o", "tab:red"),
}


def _plot(path: Path, model: str, found: list[Point]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for style, (label, marker, color) in STYLES.items():
        mine = sorted(
            (p for p in found if _style(p) == style and p.ratio and p.peak_bytes), key=lambda p: p.peak_bytes or 0
        )
        right, wrong = [p for p in mine if not p.wrong], [p for p in mine if p.wrong]
        line = "-" if style == "ours" else ""
        axes.plot([_x(p) for p in right], [p.ratio for p in right], linestyle=line, marker=marker, color=color,
                  label=label if right else None)  # fmt: skip
        if wrong:
            axes.plot([_x(p) for p in wrong], [p.ratio for p in wrong], linestyle="", marker=marker, color=color,
                      fillstyle="none", label=f"{label}: wrong gradients")  # fmt: skip
    axes.set_xlabel("peak of the step, MiB")
    axes.set_ylabel("time, eager = 1")
    axes.set_title(model)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _x(point: Point) -> float:
    return _bytes(point, "peak") / MIB


def _style(point: Point) -> str:
    if point.kind in ("eager", "ours"):
        return point.kind
    word = point.variant.split()[0]
    return word if word in STYLES else "checkpoint"
