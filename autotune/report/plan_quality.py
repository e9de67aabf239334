"""Compare the best plan's predicted peak and time with lower bounds, and list the use it makes of its store."""

from autotune.predict.order_bounds import order_lower_bound
from autotune.predict.simulate import Estimate
from autotune.study.recorded_run import RecordedRun
from autotune.units import fmt_bytes, fmt_seconds

SECONDS_A_DAY = 86_400
RATED_BYTES = 600 * 10**12
"""Total bytes written over its life that a typical 1 TB drive is rated for."""


def list_plan_quality(records: RecordedRun) -> list[tuple[str, str]]:
    """Return peak, time, lower bounds and transfers of the best plan as (term, value); empty without a plan."""
    estimate = records.best.estimate if records.best else None
    if estimate is None:
        return []
    slower = f"the plan is {100 * estimate.seconds_gap:.1f} % above"
    where = f", for {estimate.lower_bound_op}" if estimate.lower_bound_op else ""
    return [
        ("predicted peak of the step", f"{fmt_bytes(estimate.peak_bytes)}, at {estimate.peak_op or 'rest'}"),
        ("mean memory of the step", fmt_bytes(estimate.mean_bytes)),
        ("lower bound of the peak, any plan", f"{fmt_bytes(estimate.lower_bound_bytes)}{where}"),
        ("peak above its lower bound", f"{100 * estimate.gap:.1f} %"),
        *_arena_facts(estimate),
        *_order_bound(records),
        ("predicted step time", fmt_seconds(estimate.seconds)),
        ("recomputation time", fmt_seconds(estimate.recompute_seconds)),
        ("time waiting for the store", fmt_seconds(estimate.stall_seconds)),
        ("lower bound of the time within the budget", f"{fmt_seconds(estimate.lower_bound_seconds)} ({slower})"),
        ("transferred to and from the store", fmt_bytes(estimate.transfer_bytes)),
        *_store_facts(records),
    ]


def _arena_facts(estimate: Estimate) -> list[tuple[str, str]]:
    if estimate.charged_bytes is None:
        return []
    if estimate.reserved_bytes:
        return [("predicted reserve of the GPU's allocator", fmt_bytes(estimate.reserved_bytes))]
    above = f"{100 * estimate.layout_gap:.1f} % above the live bytes at its peak"
    return [
        ("arena of the step's buffers", f"{fmt_bytes(estimate.layout_bytes)}, {above}"),
        ("predicted charge of the step", fmt_bytes(estimate.charged_bytes)),
    ]


def _store_facts(records: RecordedRun) -> list[tuple[str, str]]:
    """Return the measured transfer overlap and the drive wear of one step's offloading."""
    best = records.best
    measurement = best.measurement if best else None
    if best is None or best.plan is None or measurement is None or measurement.lanes is None:
        return []
    facts: list[tuple[str, str]] = []
    hidden = measurement.lanes.hidden
    if hidden is not None:
        facts.append(("measured transfer overlap", f"{hidden:.0%} of the transfer time hidden behind compute"))
    # every other store is memory, which does not wear
    if best.plan.store == "ssd" and measurement.transfer_bytes and measurement.median_seconds:
        written = measurement.transfer_bytes / 2  # the other half is read back
        daily = written / measurement.median_seconds * SECONDS_A_DAY
        facts.append((
            "written to the drive",
            f"{fmt_bytes(int(written))} a step, {daily / 1e12:.1f} TB a day: "
            f"a drive rated for {RATED_BYTES // 10**12} TB written lasts {RATED_BYTES / daily:.0f} days of such steps",
        ))  # fmt: skip
    return facts


def _order_bound(records: RecordedRun) -> list[tuple[str, str]]:
    graph, costs = records.graph, records.costs
    if graph is None or costs is None or not costs.matches(graph):
        return []
    low, op = order_lower_bound(graph, costs, inplace=True)
    return [("lower bound without recomputation and offload", f"{fmt_bytes(low)}, for {graph.ops[op].name}")]
