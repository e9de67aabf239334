"""Plans and measurements as lines of text."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.predict.order_bounds import order_lower_bound
from autotune.predict.simulate import Estimate
from autotune.records.measurement import Measurement
from autotune.records.plan_file import PlanFile
from autotune.report.tables import format_knobs
from autotune.units import fmt_bytes, fmt_seconds, mib

T = TypeVar("T")


def describe_plan(file: PlanFile, graph: TrainGraph | None = None, costs: Costs | None = None) -> list[str]:
    """Return a plan's decisions, estimate and measurement as lines of text.

    With `graph` the lines also name the layers of the decisions; with `costs` of its ops also the lowest peak of any order.
    """
    plan, expected = file.plan, file.estimate
    lines = [
        f"workload   {file.workload}",
        *([f"loop       {file.loop}"] if file.loop else []),
        f"budget     {file.budget}: {fmt_bytes(file.budget_bytes)} for the step, floor {fmt_bytes(file.floor_bytes)}",
        f"device     {file.device.title}, torch {file.device.torch}" if file.device else
        "device     not recorded",
        f"kernels    {file.plan.capture_name}",
        f"order      {format_knobs(file.settings.get('order', {}))}",
        f"update     {format_knobs(file.settings.get('update', {}))}",
        f"recompute  {_describe_recompute(file, graph)}",
        *([f"changed    {file.move}"] if file.move else []),
        f"in place   {len(plan.inplace) or 'no'} runs overwrite an input",
        f"offload    {_describe_offload(file, graph)}",
        f"results    {file.verified}",
        "",
    ]  # fmt: skip
    lines += compare_measurement(expected, file.measurement)
    lines.append(
        f"no plan of this graph peaks below {fmt_bytes(expected.lower_bound_bytes)}; "
        f"this one is {100 * expected.gap:.1f} % above"
        if expected.lower_bound_bytes
        else "no lower bound is known"
    )
    if graph is not None and costs is not None:
        low, op = order_lower_bound(graph, costs, inplace=True)
        lines.append(f"without recompute and offload, no order peaks below {fmt_bytes(low)}, at {graph.ops[op].name}")
    lines.append(
        f"no plan within the budget takes less than {fmt_seconds(expected.lower_bound_seconds)}; "
        f"this one takes {100 * expected.seconds_gap:.1f} % more"
    )
    if expected.layout_bytes:
        lines.append(
            f"its buffers lie in an arena of {fmt_bytes(expected.layout_bytes)}, "
            f"{100 * expected.layout_gap:.1f} % above its live bytes"
        )
    if graph is not None and (handed := _handed_over_bytes(graph)):
        lines.append(
            f"{fmt_bytes(handed)} of gradients are handed to the loop at the end of the step; "
            "a loop that accumulates has as much again in .grad"
        )
    if not plan.recomputed and not plan.offload:
        lines.append("nothing is recomputed and nothing offloaded: only the order saves memory")
    return lines


def compare_measurement(
    estimate: Estimate, measurement: Measurement | None, baseline: Measurement | None = None
) -> list[str]:
    """Return a table of estimate and measurement, with a column for the baseline if it was measured too."""
    peak = measurement.step_peak_bytes if measurement else None
    charged = measurement.step_charged_bytes if measurement else None
    seconds = measurement.median_seconds if measurement else None
    ratio = measurement.time_ratio if measurement else None
    stall = measurement.stall_seconds if measurement else None
    transferred = measurement.transfer_bytes if measurement else None
    table = [
        ("", "estimate", "measured"),
        ("peak of the step, MiB", mib(estimate.peak_bytes), mib(peak)),
        ("charged for the step, MiB", mib(estimate.charged_bytes), mib(charged)),
        ("step", fmt_seconds(estimate.seconds), _format_time(seconds)),
        ("ratio to baseline", "-", "-" if ratio is None else f"{ratio:.3f}"),
        ("recompute", fmt_seconds(estimate.recompute_seconds), "-"),
        ("stalls for the store", fmt_seconds(estimate.stall_seconds), _format_time(stall)),
        ("through the store, MiB", mib(estimate.transfer_bytes), mib(transferred)),
        ("outcome", "-", measurement.outcome.value if measurement else "not measured"),
    ]
    lines = [f"{name:<26}{left:>12}{right:>14}" for name, left, right in table]
    if baseline is not None:
        plain = (
            "baseline", mib(baseline.step_peak_bytes), mib(baseline.step_charged_bytes), _format_time(baseline.median_seconds),
            "1.000", "-", "-", "-", baseline.outcome.value,
        )  # fmt: skip
        lines = [f"{line}{cell:>14}" for line, cell in zip(lines, plain, strict=True)]
    return lines


def _handed_over_bytes(graph: TrainGraph) -> int:
    """Return the bytes of the gradients that are results of a step; 0 for a step that updates, and for inference."""
    if any(op.phase is Phase.UPDATE and op.target != "commit" for op in graph.ops):
        return 0
    backward = {value for op in graph.ops if op.phase is Phase.BACKWARD for value in op.outputs}
    return sum(graph.values[value].nbytes for value in backward.intersection(graph.outputs))


def _format_time(seconds: float | None) -> str:
    return "-" if seconds is None else fmt_seconds(seconds)


def _describe_recompute(file: PlanFile, graph: TrainGraph | None) -> str:
    order = file.plan.order
    runs = file.plan.recomputed
    if not runs:
        return "nothing"
    counts = Counter(order)
    ops = [op for op, count in counts.items() if count > 1]
    text = f"{len(ops)} ops, {runs} runs more than traced, {fmt_seconds(file.estimate.recompute_seconds)} a step"
    text += f" ({format_knobs(file.settings.get('recompute', {}))})"
    return text + (_format_layers(graph, ops) if graph else "")


def _describe_offload(file: PlanFile, graph: TrainGraph | None) -> str:
    plan = file.plan
    if not plan.offload:
        return "nothing"
    values = sorted({swap.value for swap in plan.offload})
    text = f"{len(values)} values to {plan.store}, window of {plan.window} layers, "
    text += f"{fmt_bytes(file.estimate.transfer_bytes)} written and read a step"
    makers = [maker for value in values if graph and (maker := graph.producer[value]) is not None]
    return text + (_format_layers(graph, makers) if graph else "")


def _format_layers(graph: TrainGraph, ops: Iterable[int], most: int = 4) -> str:
    names = list(dict.fromkeys(graph.ops[op].layer or graph.ops[op].name for op in sorted(ops)))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f": {', '.join(names[:most])}{more}"
