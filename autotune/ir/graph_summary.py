"""Counts and bytes of a graph, which a plan file carries: they name what differs where a plan meets another graph."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.units import fmt_bytes

_NAMES = {Role.BATCH: "batch", Role.PARAM: "parameters", Role.STATE: "optimizer state", Role.BUFFER: "buffers"}


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """Counts and bytes of a graph."""

    tensors: dict[str, int]
    """Number of the user's tensors by role."""
    nbytes: dict[str, int]
    """Bytes of the user's tensors by role."""
    ops: dict[str, int]
    """Number of ops by phase."""


def summarize_graph(graph: TrainGraph) -> GraphSummary:
    """Return the counts and bytes of a graph.

    >>> from autotune.testing.graphs import training_chain
    >>> summarize_graph(training_chain(2)).ops
    {'forward': 3, 'backward': 4, 'update': 2}
    """
    own = [value for value in graph.values if value.role in _NAMES]
    counts = Counter(value.role for value in own)
    phases = Counter(op.phase for op in graph.ops)
    return GraphSummary(
        {role.value: counts[role] for role in _NAMES},
        {role.value: sum(value.nbytes for value in own if value.role is role) for role in _NAMES},
        {phase.value: phases[phase] for phase in Phase},
    )


def describe_differences(planned: GraphSummary, present: GraphSummary) -> str:
    """Name what differs between the graph of a plan and the present one.

    >>> from autotune.testing.graphs import training_chain
    >>> planned, present = (summarize_graph(training_chain(2, nbytes)) for nbytes in (10, 20))
    >>> describe_differences(planned, present)
    'batch of 20 B instead of 10 B'
    """
    return (
        ", ".join(_differences(planned, present))
        or "equal bytes and ops, but other shapes, types, arguments or wiring, or the plan is of an older autotune"
    )


def differ_in_batch_only(planned: GraphSummary, present: GraphSummary) -> bool:
    """Return True if the batch has other bytes and all else the same counts and bytes: the step of a batch of another shape.

    >>> from autotune.testing.graphs import training_chain
    >>> planned, present = (summarize_graph(training_chain(2, nbytes)) for nbytes in (10, 20))
    >>> differ_in_batch_only(planned, present), differ_in_batch_only(planned, planned)
    (True, False)
    """
    batch = Role.BATCH.value
    others = planned.nbytes.keys() | present.nbytes.keys()
    return (
        planned.ops == present.ops
        and planned.tensors == present.tensors
        and {role for role in others if planned.nbytes.get(role) != present.nbytes.get(role)} == {batch}
    )


def _differences(planned: GraphSummary, present: GraphSummary) -> Iterator[str]:
    for role, name in _NAMES.items():
        counts = [summary.tensors.get(role, 0) for summary in (present, planned)]
        numbers = [summary.nbytes.get(role, 0) for summary in (present, planned)]
        sizes = [fmt_bytes(number) for number in numbers]
        if numbers[0] != numbers[1] and sizes[0] == sizes[1]:  # equal when rounded
            sizes = [f"{number} B" for number in numbers]
        if present.nbytes.get(role) != planned.nbytes.get(role) or counts[0] != counts[1]:
            tensors = [f" in {count} tensor{'s' * (count != 1)}" if counts[0] != counts[1] else "" for count in counts]
            yield f"{name} of {sizes[0]}{tensors[0]} instead of {sizes[1]}{tensors[1]}"
    for phase in Phase:
        count, before = (summary.ops.get(phase, 0) for summary in (present, planned))
        if count != before:
            yield f"{count} ops of {phase.value} instead of {before}"
