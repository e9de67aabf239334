"""Propose plans for a budget, with their simulated estimates. Nothing here is measured."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, make_plan
from autotune.planners.coordinate_descent import MIN_WEIGHT_BYTES, PlanCache, descend
from autotune.planners.knobs import Settings
from autotune.planners.moves.plan_moves import MoveSource
from autotune.planners.space import Space, preset_settings
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import Estimate, simulate

COMBINED = frozenset({"order", "update", "recompute", "offload"})
"""Planner kinds that `propose` combines exhaustively."""
LARGE_OPS = 1000
"""Number of ops above which the smallest plan is made in one pass, with the first in-place planner only.

Other in-place planners, and other choices at the end, repeat the searches.
"""

FITTING_SECONDS = 20.0
"""Time after which no other proposal is made where the smallest plan exceeds the budget."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, the plan that they make for one budget, and its estimate."""

    settings: Settings
    plan: Plan
    estimate: Estimate
    target_bytes: int | None = None
    """Peak bytes that the planners were asked to meet; None where it is unknown."""
    parent: int | None = None
    """Number of the trial whose plan a move changed; None for a plan that the settings make."""
    move: str = ""
    """Description of that change."""


class Planning(Protocol):
    """Source of a study's plans. `DevicePlanning` is the implementation used outside of tests and replays."""

    def find_smallest(self) -> Candidate:
        """Return the plan with the lowest peak that the planners reach."""
        ...

    def propose(self, budget_bytes: int, seconds: float = math.inf) -> Iterator[Candidate]:
        """Yield the planners' own plans for a budget, each plan once. After `seconds` no other plan is made."""
        ...

    def make_candidate(self, settings: Settings, budget_bytes: int) -> Candidate:
        """Return the plan of these settings; raise PlanError or InfeasibleError if there is none."""
        ...

    def estimate_layout(self, candidate: Candidate) -> Estimate:
        """Return the candidate's estimate, completed by the bytes of its arena layout."""
        ...

    def start_moves(self) -> MoveSource | None:
        """Return the source of moves around a plan; None where plans cannot be changed."""
        ...


@dataclass(frozen=True, slots=True)
class DevicePlanning:
    """Plans from the planners, for one graph on one device."""

    graph: TrainGraph
    costs: Costs
    space: Space

    def find_smallest(self) -> Candidate:
        return find_smallest(self.graph, self.costs, self.space)

    def propose(self, budget_bytes: int, seconds: float = math.inf) -> Iterator[Candidate]:
        return propose(self.graph, self.costs, self.space, budget_bytes, seconds)

    def make_candidate(self, settings: Settings, budget_bytes: int) -> Candidate:
        return make_candidate(self.graph, self.costs, settings, budget_bytes)

    def estimate_layout(self, candidate: Candidate) -> Estimate:
        return add_layout(self.graph, candidate.plan, self.costs, candidate.estimate)

    def start_moves(self) -> MoveSource | None:
        return MoveSource(self.graph, self.costs, self.space)


MakePlanning = Callable[[TrainGraph, Costs, Space], Planning]
"""Factory of a `Planning` for one graph, its costs on a device, and the planners to choose from."""


def make_candidate(graph: TrainGraph, costs: Costs, settings: Settings, budget_bytes: int) -> Candidate:
    """Make the plan of these settings and estimate it.

    Raises:
        ConfigError: The settings name an unknown planner or knob, or a store that is not open.
        PlanError: A planner returned an invalid plan.
    """
    plan = make_plan(graph, settings, budget_bytes, costs)
    return Candidate(settings, plan, simulate(graph, lower(graph, plan), costs, budget_bytes), budget_bytes)


def find_smallest(graph: TrainGraph, costs: Costs, space: Space) -> Candidate:
    """Return the plan with the lowest peak for a budget of 0 bytes, by choosing one planner kind after the other.

    Up to `LARGE_OPS` ops, the other update planners are tried once more at the end: recomputation may make them better.
    """
    cache = PlanCache(graph, costs, 0)  # candidates share the work of the planners that come first
    names = {kind: next(iter(planners)) for kind, planners in space.items()}
    best = _evaluate(cache, preset_settings(KINDS, space, names))
    for kind, planners in space.items():
        remaining = list(planners)[1:]
        if kind == "inplace" and len(graph.ops) > LARGE_OPS:
            remaining = []
        for name in remaining:
            other = _evaluate(cache, preset_settings(KINDS, space, names | {kind: name}))
            best = min(best, other, key=_peak_then_seconds)
        names[kind] = str(best.settings[kind]["planner"])
    if len(graph.ops) <= LARGE_OPS:
        others = [{**names, "update": update} for update in space.get("update", ()) if update != names["update"]]
        revised = (_evaluate(cache, preset_settings(KINDS, space, each)) for each in others)
        best = min((best, *revised), key=_peak_then_seconds)
    return best


def _peak_then_seconds(candidate: Candidate) -> tuple[int, float]:
    return candidate.estimate.peak_bytes, candidate.estimate.seconds


def find_lowest(planning: Planning, budget_bytes: int, seconds: float = FITTING_SECONDS) -> Candidate:
    """Return the smallest plan, or a proposal with a lower peak if the smallest plan exceeds the budget.

    The first proposal is the smallest plan with weights and optimizer state offloaded, too. Proposals are made until one
    meets the budget or the time is up. The result may still exceed the budget. The
    smallest plan comes from one pass over most kinds of planners, so a later choice may make an earlier one wrong:
    an order, for example, may have the lowest peak only after recomputation.

    Args:
        planning: Source of the plans.
        budget_bytes: Maximum estimated peak bytes.
        seconds: Time after which no other proposal is made; a slow one is not ended.
    """
    lowest, deadline = planning.find_smallest(), time.monotonic() + seconds
    if lowest.estimate.peak_bytes <= budget_bytes:
        return lowest
    for candidate in _smaller_plans(planning, lowest.settings, budget_bytes, deadline):
        if candidate.estimate.peak_bytes < lowest.estimate.peak_bytes:
            lowest = candidate
        if lowest.estimate.peak_bytes <= budget_bytes or time.monotonic() > deadline:
            break
    return lowest


def _smaller_plans(planning: Planning, smallest: Settings, budget_bytes: int, deadline: float) -> Iterator[Candidate]:
    """Yield the smallest plan with weights and optimizer state offloaded, and then the planners' own plans."""
    for settings in _offload_weights(smallest):
        yield planning.make_candidate(settings, 0)
    yield from planning.propose(budget_bytes, deadline - time.monotonic())


def _offload_weights(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with weights and optimizer state among the offloaded values, if activations alone are."""
    offload = settings.get("offload", {})
    if offload.get("what", "all") != "all":
        yield {**settings, "offload": {**offload, "what": "all", "least_bytes": MIN_WEIGHT_BYTES}}


def _evaluate(cache: PlanCache, settings: Settings) -> Candidate:
    return Candidate(settings, *cache.evaluate(settings), cache.budget_bytes)


def propose(
    graph: TrainGraph, costs: Costs, space: Space, budget_bytes: int, seconds: float = math.inf
) -> Iterator[Candidate]:
    """Yield distinct plans for a budget: the steps of coordinate descent, then all combinations of default planners.

    The first plan is made in any case. The limit of `seconds` is checked after each evaluation of a plan.
    """
    until = time.monotonic() + seconds
    plans: set[Plan] = set()
    cache = PlanCache(graph, costs, budget_bytes, until)
    for settings in _proposed_settings(cache, space):
        plan, estimate = cache.evaluate(settings)
        if plan not in plans:
            plans.add(plan)
            yield Candidate(settings, plan, estimate, budget_bytes)
        if time.monotonic() > until:
            return


def _proposed_settings(cache: PlanCache, space: Space) -> Iterator[Settings]:
    choices = {kind: tuple(planners) for kind, planners in space.items()}
    best: Settings = {}
    for best in descend(cache, choices, functools.partial(preset_settings, KINDS, space)):
        yield best
    yield from _combinations(space, best)


def _combinations(space: Space, chosen: Settings) -> Iterator[Settings]:
    """Yield every combination of the `COMBINED` kinds, defaults last; the other kinds stay as chosen."""
    free = {
        kind: reversed(names) if kind in COMBINED else [str(chosen[kind]["planner"])] for kind, names in space.items()
    }
    for names in itertools.product(*free.values()):
        settings = preset_settings(KINDS, space, dict(zip(space, names, strict=True)))
        yield settings
        if "store" in settings["offload"] and "share" in settings["recompute"]:
            # a recompute planner meets the budget alone by default, so here the store takes half of the excess
            yield settings | {"recompute": {**settings["recompute"], "share": 0.5}}
