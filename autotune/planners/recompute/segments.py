"""Cut the forward into pieces, keep what crosses the cuts, recompute the rest before its gradients (Chen et al. 2016)."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Int, Knob
from autotune.planners.recompute.editable_order import refuse_offload, spoilers
from autotune.predict.simulate import peak_bytes


@dataclass(frozen=True, slots=True)
class Segments:
    """Cut the forward into `count` pieces of equal bytes. Memory falls with the cuts, time grows by at most one forward.

    The last piece is kept whole: its gradients come next. A plan that fits already, or that would grow, stays as it is.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"count": Int(1, 64, log=True)}
    count: int = 8

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with every piece but the last computed again at the first gradient that reads into it."""
        pieces = _pieces(graph, plan.order, self.count)[:-1]
        return lowest_replay(graph, plan, budget_bytes, costs, [pieces])


def _pieces(graph: TrainGraph, order: tuple[int, ...], count: int) -> list[list[int]]:
    """The forward ops in their order, cut into at most `count` pieces that make about equal bytes."""
    forward = [op for op in order if graph.ops[op].phase is Phase.FORWARD]
    made = list(accumulate(sum(graph.values[value].nbytes for value in graph.ops[op].outputs) for op in forward))
    total = made[-1] if made else 0
    cuts = [bisect_right(made, total * index // count) for index in range(1, count)]
    edges = [0, *cuts, len(forward)]
    return [forward[low:high] for low, high in pairwise(edges) if low < high]


def lowest_replay(
    graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs, ways: Iterable[Iterable[list[int]]]
) -> Plan:
    """The plan with the lowest peak: as it is, or with every piece of one of these ways computed again.

    A plan that fits already, or that computes something again, stays as it is.
    """
    refuse_offload(plan)
    if peak_bytes(graph, plan, costs) <= budget_bytes or plan.recomputed:
        return plan
    plans = [plan, *(replayed(graph, plan, pieces) for pieces in ways)]
    return min(plans, key=lambda made: peak_bytes(graph, made, costs))


def replayed(graph: TrainGraph, plan: Plan, pieces: Iterable[list[int]]) -> Plan:
    """The plan with every piece computed again at the first gradient that reads into it."""
    place = {op: position for position, op in enumerate(plan.order)}
    chains: dict[int, list[int]] = {}
    for piece in pieces:
        anchor, chain = _replay(graph, place, piece)
        chains.setdefault(anchor, []).extend(chain)
    return replace(plan, order=tuple(op for at, own in enumerate(plan.order) for op in (*chains.get(at, ()), own)))


def _replay(graph: TrainGraph, place: Mapping[int, int], piece: list[int]) -> tuple[int, list[int]]:
    """(position, ops to run again before it) for one piece; no ops where nothing is gained. `place`: of every op."""
    members, end = set(piece), place[piece[-1]]
    outputs = set(graph.outputs)
    readers = {value: graph.consumers[value] for op in piece for value in graph.ops[op].outputs}
    forward_reads = {
        value
        for value, ops in readers.items()
        if any(graph.ops[op].phase is Phase.FORWARD and op not in members for op in ops)
    }
    late = {value: [place[op] for op in ops if place[op] > end] for value, ops in readers.items()}
    wanted = {value for value, places in late.items() if places} - forward_reads - outputs
    anchor = min((position for value in wanted for position in late[value]), default=0)

    def replayable(op_id: int) -> bool:
        op = graph.ops[op_id]
        read_before = any(place[reader] < anchor for value in op.outputs for reader in graph.consumers[value])
        harmless = op.repeatable and not op.random and not op.writes
        in_time = all(anchor <= place[writer] for writer in spoilers(graph)[op_id])
        return harmless and read_before and in_time

    again: set[int] = set()
    for op in reversed(piece):
        made = graph.ops[op].outputs
        needed = {value for value in made if value in wanted}
        if needed and replayable(op):
            again.add(op)
            wanted.update(v for v in graph.ops[op].inputs if graph.producer[v] in members and v not in forward_reads)
    return anchor, [op for op in piece if op in again]
