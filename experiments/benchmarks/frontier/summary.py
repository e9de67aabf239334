"""Tables and plots from the records: every point, our plans against each peer, and one line of figures per model."""

import csv
import itertools
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scipy.optimize import isotonic_regression

from autotune.measure.interleaving import pair_with_baseline, ratios_to_baseline
from autotune.study.verdicts.statistics import median_interval

WRONG, ROUNDINGS = 0.01, 10.0
"""Relative error of a gradient that is more than rounding, and the factor over the effect of one ulp in every parameter."""
SLACK = 1.005
"""Ratio to a peer's bytes up to which a plan of ours is compared with it."""
NEARLY_EAGER = 1.03
MEAN, WORST, LOWEST, AT_NEARLY_EAGER = 0.92, 1.02, 0.75, 0.75
"""Targets for ours, in the units of the first table; the lowest only where no bound proves it impossible."""
MIB = 2**20
Measure = Literal["peak", "charged"]


@dataclass(frozen=True, slots=True)
class VariantPoint:
    """One variant of one model."""

    model: str
    variant: str
    kind: Literal["eager", "peer", "compiler", "ours"]
    """Group of the variant; a compiler's kernels differ from eager's."""
    peak_bytes: int | None = None
    """Peak of the step, with malloc returning memory at once."""
    charged_bytes: int | None = None
    """Charged bytes with the default allocator."""
    budget_bytes: int | None = None
    ratio: float | None = None
    """Median time over eager's in the same session."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    """Upper end of the ratio's interval: 95 % by order statistics, or the range of fewer than six blocks."""
    ratio_basis: str = ""
    median_seconds: float | None = None
    samples: int = 0
    gradient_error: float | None = None
    gradient_worst: str = ""
    rounding: float = 0.0
    """Relative error of eager's own gradients with every parameter off by one ulp."""
    equal: bool | None = None
    """True if loss and gradients equal eager's bit for bit."""
    buffer_error: float | None = None
    remark: str = ""

    @property
    def wrong(self) -> bool:
        """True if its gradients differ from eager's by more than rounding."""
        return self.gradient_error is not None and not self.gradient_error <= max(WRONG, ROUNDINGS * self.rounding)

    @property
    def right(self) -> bool:
        """True if it ran and computed the same as eager; ours bit for bit."""
        return self.peak_bytes is not None and (bool(self.equal) if self.kind == "ours" else not self.wrong)

    @property
    def counted(self) -> bool:
        """True if times may be compared with it."""
        return self.right and self.ratio is not None


@dataclass(frozen=True, slots=True)
class PeerMatch:
    """A peer's point, and our plan for as many bytes."""

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
    """Our time over the peer's; None where no plan of ours has as few bytes."""


def build_points(model: str, record: dict[str, Any]) -> list[VariantPoint]:
    """Return every variant of a model's record, eager first."""
    points = []
    for name, measured in {
        **record["peers"],
        **{f"ours: {name}": plan for name, plan in record["ours"].items()},
    }.items():
        ours = name.startswith("ours: ")
        variant = name.removeprefix("ours: ")
        kind = "ours" if ours else "eager" if name == "eager" else "compiler" if name.startswith("inductor") else "peer"
        session = next((s for s in reversed(record["sessions"]) if _blocks(s, variant)), None)
        failures = (s["failed"][variant] for s in record["sessions"] if variant in s["failed"])
        remark = measured.get("failed") or next(failures, "" if session else "not timed yet")
        timing = _timed(session, variant) if session and (variant in session["errors"] or kind == "eager") else {}
        if not timing and "errors" in measured:
            timing = _compared(measured["errors"])
        points.append(
            VariantPoint(
                model,
                variant,
                kind,  # type: ignore[arg-type]
                measured.get("step_peak_bytes"),
                measured.get("step_charged_bytes"),
                measured.get("budget_bytes"),
                rounding=record["rounding"]["gradients"]["error"] if "rounding" in record else 0.0,
                remark=remark,
                **timing,
            )
        )
    return points


def match_peers(points: list[VariantPoint], measure: Measure) -> list[PeerMatch]:
    """Match every counted peer, including eager, with our plan for the largest budget that has no more bytes.

    The planners estimate that plan as the fastest. The fastest as measured would be the luckiest of a dozen noisy times.
    """
    compared = []
    usable = [point for point in points if point.counted and (measure == "peak" or point.charged_bytes is not None)]
    ours = [point for point in usable if point.kind == "ours"]
    for peer in usable:
        if peer.kind == "ours":
            continue
        limit = _bytes(peer, measure) * SLACK
        fitting = (p for p in ours if _bytes(p, measure) <= limit)
        best = max(fitting, key=lambda p: -1 if p.budget_bytes is None else p.budget_bytes, default=None)
        fields = (peer.model, peer.variant, peer.kind, measure, _bytes(peer, measure), peer.ratio or 0.0)
        if best is None or best.ratio is None or not peer.ratio:
            compared.append(PeerMatch(*fields))
        else:
            compared.append(
                PeerMatch(*fields, best.variant, _bytes(best, measure), best.ratio, best.ratio / peer.ratio)
            )
    return compared


def geometric_mean(compared: Iterable[PeerMatch]) -> float | None:
    """Return the geometric mean of our time over the peers'; None where a peer has no match, or no peer exists."""
    ratios = [match.ratio for match in compared]
    if not ratios or None in ratios:
        return None
    return statistics.geometric_mean(ratio for ratio in ratios if ratio is not None)


def same_kernels(compared: Iterable[PeerMatch]) -> list[PeerMatch]:
    """Return the matches without compilers."""
    return [match for match in compared if match.kind != "compiler"]


def lowest_peak_ratio(points: list[VariantPoint]) -> float | None:
    """Return our lowest peak over the lowest of any correct peer, including compilers and untimed ones."""
    ours = [_bytes(p, "peak") for p in points if p.kind == "ours" and p.right]
    peers = lowest_peer_bytes(points)
    return min(ours) / peers if ours and peers else None


def lowest_peer_bytes(points: list[VariantPoint]) -> int | None:
    """Return the lowest peak of any peer that computes the same as eager."""
    return min((_bytes(p, "peak") for p in points if p.kind != "ours" and p.right), default=None)


def peak_near_eager_time(points: list[VariantPoint]) -> float | None:
    """Return our lowest peak over eager's at no more than 1.03 times eager's time.

    Fewer bytes never need less time, because plans are chosen so. Times are therefore fitted to rise as bytes fall
    (isotonic regression); otherwise one lucky measurement would stand for all its neighbours.
    """
    eager = next((p for p in points if p.kind == "eager" and p.peak_bytes), None)
    ours = [p for p in points if p.kind == "ours" and p.counted and p.variant != "traced"]
    if eager is None or not ours:
        return None
    ours.sort(key=lambda p: -_bytes(p, "peak"))
    fitted = isotonic_regression([p.ratio for p in ours]).x
    fitting = [_bytes(p, "peak") for p, ratio in zip(ours, fitted, strict=True) if ratio <= NEARLY_EAGER]
    return min(fitting) / _bytes(eager, "peak") if fitting else None


def summarize(out: Path) -> str:
    """Write points.csv, ratios.csv, a plot per model and summary.md from every MODEL.json; return the summary."""
    paths = sorted(path for path in out.glob("*.json") if not path.name.endswith(".plans.json"))
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    points_by_model = {model: build_points(model, record) for model, record in records.items()}
    compared = [
        match
        for points in points_by_model.values()
        for measure in ("peak", "charged")
        for match in match_peers(points, measure)
    ]  # type: ignore[arg-type]
    _csv(out / "points.csv", list(itertools.chain(*points_by_model.values())))
    _csv(out / "ratios.csv", compared)
    for model, points in points_by_model.items():
        if any(point.ratio for point in points):
            _plot(out / f"{model}.png", model, points)
    text = markdown(records, points_by_model)
    (out / "summary.md").write_text(text, encoding="utf-8")
    return text


def markdown(records: dict[str, Any], points_by_model: dict[str, list[VariantPoint]]) -> str:
    """Format the summary page."""
    lines = [
        "Time: step time of our plan over the peer's, on the same kernels (without inductor). Our plan is the one with the"
        " largest budget whose bytes are at most 1.005 times the peer's. Lowest: our lowest peak over the lowest peak of any"
        " peer, inductor included. At 1.03: our peak over eager's among plans that take at most 1.03 times eager's time; times"
        " are fitted to rise as bytes fall (isotonic regression). Bound: our lowest peak over the proved lower bound. Proved:"
        " that bound over the lowest peak of any peer; *lowest* cannot be below it. Peers with wrong gradients are excluded; so"
        " are plans of ours that differ from eager in any bit. Missed: figures above"
        f" {MEAN} (mean), {WORST} (worst), {LOWEST} (lowest, unless that is proved impossible), {AT_NEARLY_EAGER} (at 1.03).",
        "",
        "| model | time at peak: mean | worst | time at charge: mean | worst | lowest | proved | at 1.03 | bound | peers | missed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for model, points in points_by_model.items():
        at_peak, at_charge = same_kernels(match_peers(points, "peak")), same_kernels(match_peers(points, "charged"))
        bounds = [o["estimate"]["lower_bound_bytes"] for o in records[model]["ours"].values() if "estimate" in o]
        ours = [_bytes(p, "peak") for p in points if p.kind == "ours" and p.counted]
        peer = lowest_peer_bytes(points)
        proved = max(bounds) / peer if bounds and peer else None
        cells = [
            *(f(side) for side in (at_peak, at_charge) for f in (geometric_mean, _worst)),
            lowest_peak_ratio(points),
            proved,
            peak_near_eager_time(points),
            min(ours) / max(bounds) if ours and bounds else None,
        ]
        held = [
            ("mean", geometric_mean(at_peak), MEAN),
            ("worst", _worst(at_peak), WORST),
            ("lowest", lowest_peak_ratio(points), math.inf if (proved or 0.0) > LOWEST else LOWEST),
            ("at 1.03", peak_near_eager_time(points), AT_NEARLY_EAGER),
        ]
        missed = [name for name, seen, limit in held if seen is None or seen > limit] if ours else ["not measured yet"]
        lines.append(
            f"| {model} | {' | '.join(map(_number, cells))} | {len(at_peak)} | {', '.join(missed) or 'nothing'} |"
        )
    lines += ["", "Wrong gradients, shown and not counted:", ""]
    lines += [
        f"- {p.model}, {p.variant}: off by {p.gradient_error:.2g} of {p.gradient_worst}'s norm"
        for p in itertools.chain(*points_by_model.values())
        if p.wrong
    ] or ["- none"]
    lines += ["", "Without a figure:", ""]
    lines += [
        f"- {p.model}, {p.variant}: {p.remark}" for p in itertools.chain(*points_by_model.values()) if p.remark
    ] or ["- none"]
    for model, points in points_by_model.items():
        lines += ["", f"## {model}", "", *_table(points), "", _conditions(records[model])]
    return "\n".join(lines) + "\n"


def _table(points: list[VariantPoint]) -> list[str]:
    lines = [
        "| variant | peak MiB | of eager | charged MiB | time to eager | gradients | buffers | ours at its peak"
        " | at its charge |",
        "|---|--:|--:|--:|--:|---|---|--:|--:|",
    ]
    eager = next(p for p in points if p.kind == "eager")
    sides = [{m.peer: m for m in match_peers(points, measure)} for measure in ("peak", "charged")]  # type: ignore[arg-type]
    for p in sorted(points, key=lambda p: (p.kind != "eager", p.kind == "ours", -(p.peak_bytes or 0))):
        against = [_number(side[p.variant].ratio) if p.kind != "ours" and p.variant in side else "" for side in sides]
        cells = [
            p.variant if p.kind != "ours" or p.variant.startswith("ours") else f"ours {p.variant}",
            _mib(p.peak_bytes),
            f"{p.peak_bytes / eager.peak_bytes:.1%}" if p.peak_bytes and eager.peak_bytes else "",
            _mib(p.charged_bytes),
            f"{p.ratio:.3f} ({p.ratio_low:.3f} to {p.ratio_high:.3f}; {p.ratio_basis})" if p.ratio else p.remark,
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
    """Return each block of a variant with the neighbouring blocks of eager."""
    # sessions that say nothing left one step unmeasured: the next is still slow for who must fetch memory again
    late = max(0, 2 - session.get("unmeasured", 1))
    return pair_with_baseline([(block["variant"], block["seconds"][late:]) for block in session["blocks"]], variant)


def _timed(session: dict[str, Any], variant: str) -> dict[str, Any]:
    pairs = _blocks(session, variant)
    ratios = ratios_to_baseline(pairs)
    seconds = list(itertools.chain(*(seconds_of_block for seconds_of_block, _ in pairs)))
    median = statistics.median(seconds)
    interval = median_interval(ratios)
    return {
        "ratio": interval.middle,
        "ratio_low": interval.low,
        "ratio_high": interval.high,
        "ratio_basis": interval.basis,
        "median_seconds": median,
        "samples": len(seconds),
    } | _compared(session["errors"].get(variant))


def _compared(errors: dict[str, Any] | None) -> dict[str, Any]:
    """Return the errors against eager's results; None stands for eager itself."""
    return {
        "gradient_error": errors["gradients"]["error"] if errors else 0.0,
        "gradient_worst": errors["gradients"]["worst"] if errors else "",
        "equal": errors["gradients"]["equal"] and errors["loss"]["equal"] if errors else True,
        "buffer_error": errors["buffers"]["error"] if errors else 0.0,
    }


def _bytes(point: VariantPoint, measure: Measure) -> int:
    nbytes = point.peak_bytes if measure == "peak" else point.charged_bytes
    assert nbytes is not None
    return nbytes


def _worst(compared: list[PeerMatch]) -> float | None:
    ratios = [match.ratio for match in compared]
    return None if not ratios or None in ratios else max(ratio for ratio in ratios if ratio is not None)


def _number(number: float | None) -> str:
    return "none" if number is None else f"{number:.3f}"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def _error(error: float, equal: bool) -> str:
    return "equal" if equal else "inf" if math.isinf(error) else f"off by {error:.1e}"


def _csv(path: Path, rows: list[Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
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


def _plot(path: Path, model: str, points: list[VariantPoint]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for style, (label, marker, color) in STYLES.items():
        variants = sorted(
            (p for p in points if _style(p) == style and p.ratio and p.peak_bytes), key=lambda p: p.peak_bytes or 0
        )
        right, wrong = [p for p in variants if not p.wrong], [p for p in variants if p.wrong]
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


def _x(point: VariantPoint) -> float:
    return _bytes(point, "peak") / MIB


def _style(point: VariantPoint) -> str:
    if point.kind in ("eager", "ours"):
        return point.kind
    word = point.variant.split()[0]
    return word if word in STYLES else "checkpoint"
