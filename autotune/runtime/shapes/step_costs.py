"""Costs of a step for many shapes from one measurement: a new shape must not wait for a profile."""

import math
from collections.abc import Callable

from autotune.capture.program import Program
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph


class StepCosts:
    """Costs of the programs of one training loop.

    The first program of each structure is profiled, which takes seconds. Later ones, which differ in the sizes of their
    values alone, have costs scaled from it.
    """

    def __init__(self, profile: Callable[[Program], Costs]) -> None:
        self._profile = profile
        self._measured: list[tuple[TrainGraph, Costs]] = []

    def estimate(self, program: Program) -> Costs:
        """Return the costs of a program: measured, or scaled from a measured one with the same ops."""
        for graph, costs in self._measured:
            if has_same_structure(graph, program.graph):
                return scale_costs(costs, graph, program.graph)
        costs = self._profile(program)
        self._measured.append((program.graph, costs))
        return costs


def has_same_structure(graph: TrainGraph, other: TrainGraph) -> bool:
    """Return True if two graphs have the same ops on the same values, whatever the values' sizes.

    >>> from autotune.testing.graphs import training_chain
    >>> has_same_structure(training_chain(3), training_chain(3)), has_same_structure(training_chain(3), training_chain(4))
    (True, False)
    """
    return len(graph.values) == len(other.values) and list(map(_structure, graph.ops)) == list(
        map(_structure, other.ops)
    )


def scale_costs(costs: Costs, measured: TrainGraph, graph: TrainGraph) -> Costs:
    """Return the costs of a graph with the structure of a measured one.

    Seconds grow with the bytes that an op reads and writes. Scratch bytes of a smaller op stay as measured, and those of
    a larger one grow with the square of its bytes, as no known kernel exceeds: the budget holds either way.
    """
    ratios = [
        _op_bytes(graph, op) / max(1, _op_bytes(measured, old)) for op, old in zip(graph.ops, measured.ops, strict=True)
    ]
    return Costs(
        tuple(seconds * ratio for seconds, ratio in zip(costs.seconds, ratios, strict=True)),
        tuple(_scale_scratch(scratch, ratio) for scratch, ratio in zip(costs.scratch_bytes, ratios, strict=True)),
        costs.stores,
        costs.device_kind,
    )


def _structure(op: Op) -> tuple[object, ...]:
    return op.target, op.phase, op.inputs, op.outputs, op.writes, op.alias_of


def _op_bytes(graph: TrainGraph, op: Op) -> int:
    return sum(graph.values[value].nbytes for value in {*op.inputs, *op.outputs, *op.writes})


def _scale_scratch(scratch: int, ratio: float) -> int:
    if scratch < 0:  # an output that reuses the buffer of an input
        return math.ceil(scratch * ratio)
    return scratch if ratio <= 1 else math.ceil(scratch * ratio**2)
