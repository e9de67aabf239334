"""Make one plan for a budget: choose planners of every kind together, by their estimates alone."""

import math
import time
from functools import partial

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners import KINDS
from autotune.planners.candidates import Candidate, find_smallest, make_candidate, propose
from autotune.planners.coordinate_descent import (
    Choices,
    PlanCache,
    Preset,
    default_preset,
    descend,
    first_planners,
)
from autotune.planners.space import Space, build_space, preset_settings


def best_plan(
    graph: TrainGraph,
    costs: Costs,
    budget_bytes: int,
    space: Space | None = None,
    *,
    choices: Choices | None = None,
    seconds: float = math.inf,
    accept_first: bool = False,
) -> Candidate:
    """Return the fastest plan within the budget, or one with the lowest peak if none fits.

    The result holds the plan, its estimate and the settings that make it again with `make_plan`. The caller compares
    `estimate.peak_bytes` with the budget: a plan that does not fit is returned, not refused.

    Args:
        graph: Training step to plan.
        costs: Seconds and scratch bytes per op, and the open stores.
        budget_bytes: Bytes that the step may use, static bytes included.
        space: Planners and knobs to choose from; by default every planner but the allocators, with default knobs.
        choices: Planner names per kind, to narrow the default. Ignored where `space` is passed.
        seconds: Time limit of the search. At least one plan is made.
        accept_first: Accept the first planners' plan if it fits, which takes seconds. Otherwise rank every proposal
            of `propose` and the smallest plan.

    Raises:
        ConfigError: A chosen planner needs a store that is not open.

    Examples:
        >>> from autotune.ir.costs import Costs
        >>> from autotune.testing.graphs import training_chain
        >>> graph = training_chain(8)
        >>> best = best_plan(graph, Costs.unit(graph), budget_bytes=0)
        >>> best.plan.recomputed > 0
        True
    """
    if accept_first:
        return _first_that_fits(graph, costs, budget_bytes, space or build_space(KINDS, costs.stores))
    if space is not None:
        choices = {kind: tuple(planners) for kind, planners in space.items()}
        preset: Preset = partial(preset_settings, KINDS, space)
    else:
        choices = choices or {kind: tuple(planners) for kind, planners in KINDS.items() if kind != "allocator"}
        preset = partial(default_preset, costs=costs)
    cache = PlanCache(graph, costs, budget_bytes)
    deadline = time.monotonic() + seconds
    steps = descend(cache, choices, preset)
    best = next(steps)
    while time.monotonic() <= deadline:
        improved = next(steps, None)
        if improved is None:
            break
        best = improved
    return Candidate(best, *cache.evaluate(best), budget_bytes)


def _first_that_fits(graph: TrainGraph, costs: Costs, budget_bytes: int, space: Space) -> Candidate:
    """Return the first planners' plan if it fits; otherwise the fastest proposal that fits, or the smallest plan."""
    first = make_candidate(graph, costs, preset_settings(KINDS, space, first_planners(space)), budget_bytes)
    if first.estimate.peak_bytes <= budget_bytes:
        return first
    proposals = (*propose(graph, costs, space, budget_bytes), find_smallest(graph, costs, space))
    return min(proposals, key=lambda candidate: _rank(candidate, budget_bytes))


def _rank(candidate: Candidate, budget_bytes: int) -> tuple[int, float]:
    return max(candidate.estimate.peak_bytes - budget_bytes, 0), candidate.estimate.seconds
