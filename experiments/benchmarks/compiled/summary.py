"""Table of all variants, and the figures that targets are set for."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.measure.interleaving import EAGER, pair_with_baseline, ratios_to_baseline
from autotune.study.verdicts.statistics import Interval, median_interval
from experiments.benchmarks.frontier.summary import ROUNDINGS, WRONG
from experiments.common.facts import format_interval, format_origin

SLACK = 1.005
"""Ratio to a peer's bytes up to which a plan of ours is compared with it."""
MEAN, WORST, LOWEST = 0.95, 1.00, 0.75
"""Targets: geometric mean and worst of our time over inductor's at its bytes; our lowest peak over the peers' lowest."""
SLOWER = 1.03
"""Ratio to the lowest estimated seconds within a peer's bytes up to which a plan is timed: estimates may be wrong by so much."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Pair:
    """Our fastest plan within the bytes of one peer."""

    model: str
    peer: str
    ours: str
    ratio: Interval
    """Our time over the peer's, by blocks of one round."""


def summarize(out: Path) -> str:
    """Write `summary.md` from the records in a directory, and return its targets as text."""
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))}
    pairs = [pair for name, record in records.items() for pair in compare(name, record)]
    head = _targets(pairs, {name: lowest for name, record in records.items() if (lowest := compare_lowest(record))})
    parts = [f"{head}\n", _pair_table(pairs)]
    parts += [_model_table(name, record) for name, record in records.items()]
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text("\n".join(parts), encoding="utf-8")
    return head


def block_ratios(record: dict[str, Any], variant: str) -> list[float]:
    """Return the ratio to eager of each block of a variant, in the order of rounds."""
    ratios: list[float] = []
    for session in record["sessions"]:
        blocks = [(block["variant"], block["seconds"]) for block in session["blocks"]]
        ratios += ratios_to_baseline(pair_with_baseline(blocks, variant))
    return ratios


def is_wrong(record: dict[str, Any], peer: str) -> bool:
    """Return True if a peer's gradients differ from eager's by more than rounding."""
    error, rounding = (
        gradient_error(errors) for errors in (record["peers"][peer].get("errors", {}), record.get("rounding", {}))
    )
    return not error <= max(WRONG, ROUNDINGS * rounding)


def gradient_error(errors: dict[str, Any]) -> float:
    """Return the largest error of a gradient. Results before 26 November 2026 hold those of the steps under `loss`."""
    kinds = [errors[kind] for kind in ("loss", "gradients") if kind in errors]
    return max(
        (kind["error"] for kind in kinds if "gradient" in kind["worst"] or kind["error"] == math.inf), default=0.0
    )


def compare(name: str, record: dict[str, Any]) -> list[Pair]:
    """Pair each timed peer with our fastest plan that takes at most its bytes and has the traced step's bits.

    Of each capture only the plan for most bytes counts: among many plans one is fast by luck.
    """
    medians = {plan: statistics.median(ratios) for plan in record["plans"] if (ratios := block_ratios(record, plan))}
    pairs = []
    for peer in record["peers"]:
        theirs = block_ratios(record, peer)
        fitting = fitting_plans(record, peer, medians)
        if peer == EAGER or not theirs or not fitting or is_wrong(record, peer):
            continue
        fastest = min(fitting, key=lambda plan: medians[plan])
        quotients = [ours / other for ours, other in zip(block_ratios(record, fastest), theirs, strict=False)]
        pairs.append(Pair(name, peer, fastest, median_interval(quotients)))
    return pairs


def fitting_plans(record: dict[str, Any], peer: str, names: Iterable[str]) -> list[str]:
    """Return of each capture the plan for most bytes that takes at most the peer's and has the traced step's bits."""
    plans, limit = record["plans"], SLACK * record["peers"][peer].get("step_peak_bytes", 0)
    fitting: dict[str, str] = {}
    for name in sorted(names, key=lambda name: plans[name]["step_peak_bytes"]):
        if plans[name]["equal_to_traced"] and plans[name]["step_peak_bytes"] <= limit:
            fitting[capture_of(record, name)] = name
    return list(fitting.values())


def fast_plans(record: dict[str, Any]) -> list[str]:
    """Return the plans to time: within each peer's bytes, those that are fastest by estimate, or nearly so."""
    seconds = {name: plan["estimate"]["seconds"] for name, plan in record["plans"].items() if "estimate" in plan}
    fast: list[str] = []
    for peer in record["peers"]:
        fitting = [] if peer == EAGER else fitting_plans(record, peer, seconds)
        least = min((seconds[name] for name in fitting), default=0.0)
        fast += [name for name in fitting if seconds[name] <= SLOWER * least]
    return list(dict.fromkeys(fast))


def capture_of(record: dict[str, Any], plan: str) -> str:
    """Return the capture that a plan's name begins with, the longest one."""
    return max((name for name in record["captures"] if plan.startswith(name)), key=len, default="")


def compare_lowest(record: dict[str, Any]) -> tuple[float, float] | None:
    """Return our lowest peak, and the lowest proved bound of any plan, over the peers' lowest peak."""
    peers = [
        peer["step_peak_bytes"]
        for name, peer in record["peers"].items()
        if "step_peak_bytes" in peer and not is_wrong(record, name)
    ]
    ours = [plan["step_peak_bytes"] for plan in record["plans"].values() if plan["equal_to_traced"]]
    bounds = [capture["bound_bytes"] for capture in record["captures"].values() if "bound_bytes" in capture]
    if not (peers and ours and bounds):
        return None
    return min(ours) / min(peers), min(bounds) / min(peers)


def _targets(pairs: list[Pair], lowest: dict[str, tuple[float, float]]) -> str:
    ratios = {(pair.model, pair.peer): pair.ratio.middle for pair in pairs if pair.peer.startswith("inductor")}
    lines = []
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        worst = max(ratios, key=lambda key: ratios[key])
        lines.append(
            f"At inductor's own bytes, our time over inductor's: geometric mean {mean:.3f} (target {MEAN:.2f}, "
            f"{'met' if mean <= MEAN else 'missed'}), worst {ratios[worst]:.3f} for {' '.join(worst)} (target {WORST:.2f}, "
            f"{'met' if ratios[worst] <= WORST else 'missed'})."
        )
    for name, (ours, bound) in lowest.items():
        verdict = "met" if ours <= LOWEST else "proved impossible on these graphs" if bound > LOWEST else "missed"
        lines.append(
            f"{name}: our lowest peak is {ours:.3f} of the lowest of any peer (target {LOWEST:.2f}, {verdict}; bound {bound:.3f})."
        )
    return "\n".join(f"- {line}" for line in lines) or "Nothing is measured yet."


def _pair_table(pairs: list[Pair]) -> str:
    rows = [f"| {pair.model} | {pair.peer} | {pair.ours} | {format_interval(pair.ratio)} |" for pair in pairs]
    return "\n".join(
        ["| model | peer | our fastest plan within its bytes | time over the peer's |", "|---|---|---|--:|", *rows, ""]
    )


def _model_table(name: str, record: dict[str, Any]) -> str:
    eager = record["peers"].get("eager", {}).get("step_peak_bytes", 0)
    rows = []
    for variant, measured in {**record["peers"], **record["plans"]}.items():
        peak = measured.get("step_peak_bytes")
        bytes_text = f"{peak / MIB:.1f} | {peak / eager:.3f}" if peak and eager else " | "
        ratios = block_ratios(record, variant)
        time_text = format_interval(median_interval(ratios)) if ratios else measured.get("failed", "not timed")
        estimate = measured.get("estimate", {}).get("peak_bytes")
        error = f"{100 * (estimate / peak - 1):+.2f} %" if estimate and peak else ""
        wrong = " (wrong gradients)" if variant in record["peers"] and is_wrong(record, variant) else ""
        rows.append(f"| {variant}{wrong} | {bytes_text} | {error} | {time_text} |")
    gates = [
        f"- {capture}: {described.get('gate') or described.get('failed')}"
        for capture, described in record["captures"].items()
    ]
    if any("inductor" in name and "rebuild_price" not in capture for name, capture in record["captures"].items()):
        gates.append("- recorded when regions had a rebuild price of 0.05 by default")
    gates += [f"- dropped: {session['dropped']}" for session in record["sessions"] if "dropped" in session]
    table = ["| variant | own peak MiB | of eager | predicted | time over eager |", "|---|--:|--:|--:|--:|", *rows]
    return "\n".join([f"## {name}", "", *table, "", *gates, "", format_origin(record), ""])
