"""A plan measured beside plain eager steps in one run, so that its overhead is a ratio within that run."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.ir.plan import Plan
from autotune.measure.device.this_device import this_device
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.records.measurement import Measurement, Outcome
from autotune.report.claims import RESULT, Claim, Figure, read, write
from autotune.study.verdicts.statistics import RatioInterval, block_ratios, compare_ratios
from autotune.workloads.reference import WorkloadRef
from experiments.common.facts import collect_facts
from experiments.common.simulated import CAPTURED, collect_origin, plan_for_budget

SAMPLES = 16
"""Measured steps of each variant, in alternating blocks of two: eight blocks, whose rank-sum test gives 95 % intervals."""
AIM = 0.997
"""Share of the budget to plan for, since predicted peaks are off by a few parts in a thousand."""
SLACK = 1.005
"""Ratio of the measured peak to the budget up to which the plan fits."""
PARTS = ("simulated", "measured")


@dataclass(frozen=True, slots=True)
class MeasuredOverhead:
    """Plan of one workload beside its plain eager steps; bytes are above the process's floor."""

    share: float
    """Budget of the plan, as a share of eager's peak."""
    eager_bytes: int
    peak_bytes: int
    eager_percent: float
    """Overhead of the plan over plain eager, whose allocator is another one."""
    traced_percent: float
    """Overhead over plain eager of the traced step in the same kind of arena, without recomputation."""
    over_traced: RatioInterval
    """Time of the plan over that of the traced step, both in an arena: what a paper reports of one allocator.

    Each of them ran in turns with eager steps, in a process of its own. Their ratios to eager are compared by the rank-sum
    test.
    """
    blocks: int
    """Blocks of each of the two."""
    device: str

    @property
    def overhead(self) -> Figure:
        """Overhead of the plan over the traced step in percent, with the ends of its 95 % interval."""
        ratios = self.over_traced.ratio, self.over_traced.low, self.over_traced.high
        value, low, high = (round(100 * (ratio - 1), 4) for ratio in ratios)
        return Figure(value, low=low, high=high)


def measure_plan(reference: str, arguments: dict[str, Any], share: float) -> MeasuredOverhead:
    """Measure a plan for a share of eager's peak, and the traced step, interleaved with eager.

    Results are compared bit for bit. SystemExit: eager or a plan does not run here.
    """
    print(f"{reference.rpartition('/')[2]} {arguments} at {share:.0%} of eager's peak", file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="measured-") as logs,
        Harness(Spec(WorkloadRef(reference, arguments), Path(logs), samples=SAMPLES)) as harness,
    ):
        prepared, eager = harness.prepare(), harness.baseline().step_peak_bytes
        if eager is None:
            raise SystemExit(f"plain eager steps do not run here: {harness.baseline().detail}")
        graph = prepared.graph
        CAPTURED[f"{reference.rpartition('/')[2]} {arguments}"] = graph.digest
        plan = plan_for_budget(graph, prepared.costs, int(AIM * share * eager))[0]
        measurement, traced = (
            _require_ok(harness.measure(replace(variant, allocator="arena"))) for variant in (plan, Plan.traced(graph))
        )
        assert measurement.step_peak_bytes is not None
        device = this_device("cpu")
        return MeasuredOverhead(
            share, eager, measurement.step_peak_bytes, _overhead_percent(measurement), _overhead_percent(traced),
            compare_ratios(block_ratios(measurement), block_ratios(traced)), len(block_ratios(measurement)),
            f"{device.silicon}, cores: {device.cores}, torch {device.torch}",
        )  # fmt: skip


def _require_ok(measurement: Measurement) -> Measurement:
    if measurement.outcome is not Outcome.OK:
        raise SystemExit(f"a plan ended as {measurement.outcome}: {measurement.detail}")
    return measurement


def _overhead_percent(measurement: Measurement) -> float:
    assert measurement.time_ratio is not None
    return 100 * (measurement.time_ratio - 1)


def build_measured_claim(claim: Claim, overhead: MeasuredOverhead) -> Claim:
    """Return a published overhead with the measured one, at the same share of the bytes."""
    conditions = (
        f"{claim.conditions}; a plan for {overhead.share:.1%} of eager's peak: {overhead.eager_bytes / 2**20:.0f} -> "
        f"{overhead.peak_bytes / 2**20:.0f} MiB above the process's floor; time over that of the step as traced, both in an "
        f"arena: over plain eager's, in turns, the plan takes {overhead.eager_percent:+.1f} %, the step as traced "
        f"{overhead.traced_percent:+.1f} %; {overhead.blocks} blocks of each, with the 95 % interval, on {overhead.device}"
    )
    fits = overhead.peak_bytes <= SLACK * overhead.share * overhead.eager_bytes
    # a plan that takes more bytes and more time than the published one is a failure, however small the model
    is_slower = claim.published is not None and overhead.overhead.value > claim.published.value
    lowest = f"at this size no plan of ours goes below {overhead.peak_bytes / overhead.eager_bytes:.1%}"
    why = claim.why_not or ("" if fits or is_slower else lowest)
    conditions += "" if fits or not is_slower else f"; {lowest}"
    return replace(
        claim, conditions=conditions, unit="%", ours=overhead.overhead, tolerance=0.1, sense="at most",
        transferred=True, why_not=why, kind="measured",
    )  # fmt: skip


def run_parts(
    folder: Path,
    text: str | None,
    simulated: Callable[[], Sequence[Claim]],
    measure: Callable[[], Sequence[Claim]],
    draw: Callable[[Sequence[Claim]], None],
) -> None:
    """Regenerate the parts of an experiment that the command line names, then draw the picture.

    Claims of a part that is not named stay as they are stored.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="nothing: the picture alone")
    parts = parser.parse_args().parts
    stored = read(folder) if (folder / RESULT).exists() else ()
    rows = simulated() if "simulated" in parts else [claim for claim in stored if claim.kind != "measured"]
    origins = {"simulated": collect_origin()} if "simulated" in parts else {}
    write(folder, [*rows, *(claim for claim in stored if claim.kind == "measured")], origins)
    if "measured" in parts:
        facts = collect_facts()
        write(folder, [*rows, *measure()], {"measured": collect_origin(facts)})
    draw([claim for claim in read(folder) if claim.kind == "measured"])
