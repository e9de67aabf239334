"""What no plan of a graph can do better than: the certificate beside every plan."""

from autotune.costs import Costs
from autotune.graph import TrainGraph


def peak_lower_bound(graph: TrainGraph, costs: Costs) -> tuple[int, int]:
    """(bytes, op): every op needs its inputs, its outputs and its scratch at once, beside the static bytes.

    Where it may run in place, its output and one input are one buffer.
    """
    static = graph.static

    def needs(op_id: int) -> int:
        op = graph.ops[op_id]
        made = sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs) if value not in static)
        shared = max((graph.values[value].nbytes for value in op.inplace if value not in static), default=0)
        return made - shared + costs.scratch_bytes[op_id]

    if not graph.ops:
        return graph.static_bytes, -1
    worst = max(range(len(graph.ops)), key=needs)
    return graph.static_bytes + needs(worst), worst


def seconds_lower_bound(costs: Costs) -> float:
    """Every op runs at least once."""
    return sum(costs.seconds)
