"""Make one plan for a budget: choose planners of every kind together, by their estimates alone."""

import math
import time
from collections.abc import Iterator
from functools import partial

from autotune.errors import ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners import KINDS
from autotune.planners.candidates import Candidate, find_smallest
from autotune.planners.coordinate_descent import (
    Choices,
    PlanCache,
    Preset,
    default_preset,
    descend,
)
from autotune.planners.knobs import Settings
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
    or_smallest: bool = False,
) -> Candidate:
    """Return the fastest plan within the budget, or one with the lowest peak if none fits.

    The result holds the plan, its estimate and the settings that make it again with `make_plan`. The caller compares
    `estimate.peak_bytes` with the budget: a plan that does not fit is returned, not refused.

    Args:
        graph: Training step to plan.
        costs: Seconds and scratch bytes per op, and the open stores.
        budget_bytes: Bytes that the step may use, static bytes included.
        space: Planners and knobs to choose from; by default every planner but the allocators, with default knobs.
        choices: Planner names of some kinds. The other kinds have the planners of `make_plan`, or all of theirs with
            `accept_first`. Ignored where `space` is passed.
        seconds: Time limit of the search. At least one plan is made.
        accept_first: Accept the first planners' plan if it fits, which takes seconds. Otherwise accept the first plan
            of the coordinate descent that fits, or the smallest plan.
        or_smallest: Where the time limit ends the search before a plan fits, return the smallest plan if its peak is
            lower. It may take another minute. Without effect with `accept_first`.

    Raises:
        ConfigError: A choice names an unknown kind or planner, or all its planners need a store that is not open.

    Examples:
        >>> from autotune.ir.costs import Costs
        >>> from autotune.testing.graphs import training_chain
        >>> graph = training_chain(8)
        >>> best = best_plan(graph, Costs.unit(graph), budget_bytes=0)
        >>> best.plan.recomputed > 0
        True
    """
    if choices and space is None:
        _refuse_unusable(choices, costs)
    if accept_first:
        space = space or _narrowed(build_space(KINDS, costs.stores), choices or {})
        return _first_that_fits(graph, costs, budget_bytes, space, time.monotonic() + seconds)
    if space is not None:
        choices = {kind: tuple(planners) for kind, planners in space.items()}
        preset: Preset = partial(preset_settings, KINDS, space)
    else:
        choices = choices or {kind: tuple(planners) for kind, planners in KINDS.items() if kind != "allocator"}
        preset = partial(default_preset, costs=costs)
    deadline = time.monotonic() + seconds
    cache = PlanCache(graph, costs, budget_bytes, deadline)
    steps = descend(cache, choices, preset)
    best = next(steps)
    while time.monotonic() <= deadline:
        improved = next(steps, None)
        if improved is None:
            break
        best = improved
    result = Candidate(best, *cache.evaluate(best), budget_bytes)
    if not or_smallest or result.estimate.peak_bytes <= budget_bytes or time.monotonic() <= deadline:
        return result
    if space is None:
        usual: Choices = {kind: tuple(planners)[:1] for kind, planners in KINDS.items()}
        space = _narrowed(build_space(KINDS, costs.stores), {**usual, **choices})
    return min(result, find_smallest(graph, costs, space), key=lambda candidate: candidate.estimate.peak_bytes)


def _refuse_unusable(choices: Choices, costs: Costs) -> None:
    """Raise ConfigError for choices that leave a kind without a planner, or that name an unknown one."""
    usable = build_space(KINDS, costs.stores)
    for kind, names in choices.items():
        known = KINDS.get(kind, {})
        if kind not in KINDS or not names or not known.keys() >= set(names):
            options = f"{kind}: {', '.join(known)}" if known else f"kinds: {', '.join(KINDS)}"
            raise ConfigError(f"planners {', '.join(names) or 'none'} of {kind!r} cannot be chosen; known {options}")
        if usable.get(kind, {}).keys().isdisjoint(names):
            raise ConfigError(f"{kind}: {', '.join(names)} needs a store, and none is open; use --store ssd=DIR")


def _narrowed(space: Space, choices: Choices) -> Space:
    """Return the space with the chosen planners of each kind that is chosen from."""
    return {
        kind: {name: knobs for name, knobs in planners.items() if name in choices.get(kind, planners)}
        for kind, planners in space.items()
    }


def _first_that_fits(graph: TrainGraph, costs: Costs, budget_bytes: int, space: Space, deadline: float) -> Candidate:
    """Return the first plan of the coordinate descent that fits, or else the smallest plan.

    A plan that had to be searched for is compared with the smallest one, which may be faster. After the `deadline`, a time of
    the monotonic clock, the best plan so far is returned.
    """
    choices = {kind: tuple(planners) for kind, planners in space.items()}
    cache = PlanCache(graph, costs, budget_bytes, deadline)
    descent = list(_until_fit(cache, descend(cache, choices, partial(preset_settings, KINDS, space)), deadline))
    first = Candidate(descent[-1], *cache.evaluate(descent[-1]), budget_bytes)
    if (len(descent) == 1 and first.estimate.peak_bytes <= budget_bytes) or time.monotonic() > deadline:
        return first
    return min(first, find_smallest(graph, costs, space), key=lambda candidate: _rank(candidate, budget_bytes))


def _until_fit(cache: PlanCache, steps: Iterator[Settings], deadline: float) -> Iterator[Settings]:
    """Yield the steps of a descent up to the first one whose plan fits the budget, or that ends after the deadline."""
    for settings in steps:
        yield settings
        if time.monotonic() > deadline or cache.evaluate(settings)[1].peak_bytes <= cache.budget_bytes:
            return


def _rank(candidate: Candidate, budget_bytes: int) -> tuple[int, float]:
    return max(candidate.estimate.peak_bytes - budget_bytes, 0), candidate.estimate.seconds
