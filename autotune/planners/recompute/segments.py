"""Checkpoint segments: keep values that cross the cuts, recompute the rest before its gradients (Chen et al. 2016)."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Int, Knob
from autotune.planners.recompute.editable_order import EditableOrder, later_writers, refuse_inplace_and_offload


@dataclass(frozen=True, slots=True)
class Segments:
    """Planner that cuts the forward into `count` segments of equal bytes and recomputes all but the last.

    Memory falls with the number of cuts; time grows by at most one forward. The last segment stays in memory because
    its gradients come next. A plan that fits already, or whose peak would rise, is unchanged.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"count": Int(1, 64, log=True)}
    count: int = 8
    """Number of segments."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with all segments but the last recomputed at the first gradient that reads from them."""
        segments = _cut_forward(graph, plan.order, self.count)[:-1]
        return choose_replay(graph, plan, budget_bytes, costs, [segments])


def _cut_forward(graph: TrainGraph, order: tuple[int, ...], count: int) -> list[list[int]]:
    """Return the forward ops in order, cut into at most `count` segments with about equal output bytes."""
    forward = [op for op in order if graph.ops[op].phase is Phase.FORWARD]
    produced = list(accumulate(sum(graph.values[value].nbytes for value in graph.ops[op].outputs) for op in forward))
    total = produced[-1] if produced else 0
    cuts = [bisect_right(produced, total * index // count) for index in range(1, count)]
    edges = [0, *cuts, len(forward)]
    return [forward[low:high] for low, high in pairwise(edges) if low < high]


def choose_replay(
    graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs, alternatives: Iterable[Iterable[list[int]]]
) -> Plan:
    """Return the plan with the lowest peak: unchanged, or with all segments of one alternative recomputed.

    A plan that fits already, or that already recomputes an op, is unchanged.
    """
    refuse_inplace_and_offload(plan)

    def peak(candidate: Plan) -> int:
        """Return the bytes while ops run: after an op that is expected to overwrite its input, a `Free` would count it again."""
        return EditableOrder(graph, candidate.order, costs).peak

    if peak(plan) <= budget_bytes or plan.recomputed:
        return plan
    plans = [plan, *(replay_segments(graph, plan, segments) for segments in alternatives)]
    return min(plans, key=peak)


def replay_segments(graph: TrainGraph, plan: Plan, segments: Iterable[list[int]]) -> Plan:
    """Return the plan with every segment recomputed at the first gradient that reads from it."""
    positions = {op: position for position, op in enumerate(plan.order)}
    chains: dict[int, list[int]] = {}
    for segment in segments:
        anchor, chain = _replay(graph, positions, segment)
        chains.setdefault(anchor, []).extend(chain)
    return replace(
        plan,
        order=tuple(op for position, original in enumerate(plan.order) for op in (*chains.get(position, ()), original)),
    )


def _replay(graph: TrainGraph, positions: Mapping[int, int], segment: list[int]) -> tuple[int, list[int]]:
    """Return (position, ops to recompute before it) for one segment; no ops if nothing is gained."""
    members, end = set(segment), positions[segment[-1]]
    outputs = set(graph.outputs)
    readers = {value: graph.consumers[value] for op in segment for value in graph.ops[op].outputs}
    forward_reads = {
        value
        for value, ops in readers.items()
        if any(graph.ops[op].phase is Phase.FORWARD and op not in members for op in ops)
    }
    late = {value: [positions[op] for op in ops if positions[op] > end] for value, ops in readers.items()}
    needed = {value for value, late_positions in late.items() if late_positions} - forward_reads - outputs
    anchor = min((position for value in needed for position in late[value]), default=0)

    def replayable(op_id: int) -> bool:
        op = graph.ops[op_id]
        read_before = any(positions[reader] < anchor for value in op.outputs for reader in graph.consumers[value])
        harmless = op.repeatable and not op.random and not op.writes
        in_time = all(anchor <= positions[writer] for writer in later_writers(graph)[op_id])
        return harmless and read_before and in_time

    recomputed: set[int] = set()
    for op in reversed(segment):
        if not needed.isdisjoint(graph.ops[op].outputs) and replayable(op):
            recomputed.add(op)
            needed.update(v for v in graph.ops[op].inputs if graph.producer[v] in members and v not in forward_reads)
    return anchor, [op for op in segment if op in recomputed]
