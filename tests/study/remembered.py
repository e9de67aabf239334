"""A memory for planners, for tests of what is done with plans: many plan the same graphs for the same budget."""

from collections.abc import Callable

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners.candidates import Candidate


def remembered(make: Callable[..., Candidate]) -> Callable[..., Candidate]:
    """Return a planner that plans once for the same graph, costs and options."""
    known: dict[object, Candidate] = {}

    def plan(graph: TrainGraph, costs: Costs, *others: object, **options: object) -> Candidate:
        key = graph, costs.seconds, costs.scratch_bytes, repr((costs.stores, costs.device_kind, others, options))
        if key not in known:
            known[key] = make(graph, costs, *others, **options)
        return known[key]

    return plan
