"""A plan measured beside plain eager steps through the harness: overheads that are ratios within one run."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulated import planned

from autotune.ir.plan import Plan
from autotune.measure.device.this_device import this_device
from autotune.measure.harness import Harness
from autotune.records.measurement import Measurement, Outcome
from autotune.report.claims import RESULT, Claim, Figure, read, write
from autotune.workloads.reference import WorkloadRef

SAMPLES = 4
"""Steps of each side, in blocks that take turns."""
AIM = 0.997
"""Of the budget: predicted peaks are up to a few parts in a thousand off."""
SLACK = 1.005
"""Over the budget, that still keeps it."""
PARTS = ("simulated", "measured")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A plan of one workload beside its plain eager steps; bytes above the process's floor."""

    share: float
    """Of eager's peak, that the plan was made for."""
    eager_bytes: int
    peak_bytes: int
    overhead_percent: float
    traced_percent: float
    """The same of the traced step, nothing computed again, in an arena like the plan's."""
    samples: int
    device: str


def measured(reference: str, arguments: dict[str, Any], share: float) -> Ratio:
    """A plan for that share of eager's peak, and the traced step, each in turns with eager; results compared bit for bit."""
    print(f"{reference.rpartition('/')[2]} {arguments} at {share:.0%} of eager's peak", file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="measured-") as logs,
        Harness(WorkloadRef(reference, arguments), log_dir=Path(logs), samples=SAMPLES) as harness,
    ):
        prepared, eager = harness.prepare(), harness.baseline().step_peak_bytes
        if eager is None:
            raise SystemExit(f"plain eager steps do not run here: {harness.baseline().detail}")
        graph = prepared.graph
        plan = planned(graph, prepared.costs, int(AIM * share * eager))[0]
        seen, plain = (_right(harness.measure(replace(one, allocator="arena"))) for one in (plan, Plan.traced(graph)))
        assert seen.step_peak_bytes is not None
        device = this_device("cpu")
        return Ratio(
            share, eager, seen.step_peak_bytes, _percent(seen), _percent(plain), len(seen.step_seconds),
            f"{device.silicon}, cores: {device.cores}, torch {device.torch}",
        )  # fmt: skip


def _right(seen: Measurement) -> Measurement:
    if seen.outcome is not Outcome.OK:
        raise SystemExit(f"a plan ended as {seen.outcome}: {seen.detail}")
    return seen


def _percent(seen: Measurement) -> float:
    assert seen.time_ratio is not None
    return 100 * (seen.time_ratio - 1)


def claim_of(claim: Claim, ratio: Ratio) -> Claim:
    """A published overhead with what was measured at its share of the bytes; of `claim` all but that counts."""
    how = (
        f"{claim.conditions}; a plan for {ratio.share:.1%} of eager's peak: {ratio.eager_bytes / 2**20:.0f} -> "
        f"{ratio.peak_bytes / 2**20:.0f} MiB above the process's floor; seconds beside plain eager's in turns, median of "
        f"{ratio.samples}, on {ratio.device}; the plan lies in an arena, in which the step as traced takes "
        f"{ratio.traced_percent:+.1f} %"
    )
    kept = ratio.peak_bytes <= SLACK * ratio.share * ratio.eager_bytes
    why = "" if kept else f"at this size no plan of ours goes below {ratio.peak_bytes / ratio.eager_bytes:.1%}"
    return replace(
        claim, conditions=how, unit="%", ours=Figure(ratio.overhead_percent), tolerance=0.1, sense="at most",
        transferred=True, why_not=why, kind="measured",
    )  # fmt: skip


def run(
    folder: Path,
    text: str,
    simulated: Callable[[], Sequence[Claim]],
    measure: Callable[[], Sequence[Claim]],
    draw: Callable[[Sequence[Claim]], None],
) -> None:
    """Make the parts that the command line asks for, claims of the other stay as they were written; then draw all."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="nothing: the picture alone")
    parts = parser.parse_args().parts
    known = read(folder) if (folder / RESULT).exists() else ()
    first = simulated() if "simulated" in parts else [claim for claim in known if claim.kind != "measured"]
    write(folder, [*first, *(claim for claim in known if claim.kind == "measured")])
    if "measured" in parts:
        write(folder, [*first, *measure()])
    draw([claim for claim in read(folder) if claim.kind == "measured"])
