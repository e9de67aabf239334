"""What planners answer to a budget, with the simulator's word on it: nothing here is measured."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, make_plan, space
from autotune.planners.auto import Plans, leaders
from autotune.planners.knobs import Settings
from autotune.planners.space import Space
from autotune.predict.plan_layout import with_layout
from autotune.predict.simulate import Estimate, simulate

COMBINED = frozenset({"order", "update", "recompute", "offload"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, the plan that they make for one budget, and what it is predicted to take."""

    settings: Settings
    plan: Plan
    estimate: Estimate


class Planning(Protocol):
    """Makes plans for a study; `planned` is the real one."""

    def smallest(self) -> Candidate:
        """The lowest peak that is reached."""
        ...

    def answers(self, budget_bytes: int) -> Iterator[Candidate]:
        """What planners answer to a budget by themselves, each plan once."""
        ...

    def made(self, settings: Settings, budget_bytes: int) -> Candidate:
        """The plan of these settings; PlanError or InfeasibleError where there is none."""
        ...

    def laid_out(self, made: Candidate) -> Estimate:
        """Its estimate, with what its layout takes."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """By the planners, for one graph on one device."""

    graph: TrainGraph
    costs: Costs
    searched: Space

    def smallest(self) -> Candidate:
        return smallest(self.graph, self.costs, self.searched)

    def answers(self, budget_bytes: int) -> Iterator[Candidate]:
        return answers(self.graph, self.costs, self.searched, budget_bytes)

    def made(self, settings: Settings, budget_bytes: int) -> Candidate:
        return candidate(self.graph, self.costs, settings, budget_bytes)

    def laid_out(self, made: Candidate) -> Estimate:
        return with_layout(self.graph, made.plan, self.costs, made.estimate)


MakePlanning = Callable[[TrainGraph, Costs, Space], Planning]
"""For a graph on a device, of planners that may be chosen."""


def planned(graph: TrainGraph, costs: Costs, searched: Space) -> Planning:
    """Plans as planners make them."""
    return Planned(graph, costs, searched)


def candidate(graph: TrainGraph, costs: Costs, settings: Settings, budget_bytes: int) -> Candidate:
    """Make a plan and estimate it; PlanError where a planner broke a rule."""
    plan = make_plan(graph, settings, budget_bytes, costs)
    return Candidate(settings, plan, simulate(graph, lower(graph, plan), costs, budget_bytes))


def smallest(graph: TrainGraph, costs: Costs, searched: Space) -> Candidate:
    """The lowest peak that planners reach for a budget of nothing, choosing one kind of planner after the other."""
    names = {kind: next(iter(planners)) for kind, planners in searched.items()}
    best = candidate(graph, costs, space.preset(KINDS, searched, names), 0)
    for kind, planners in searched.items():
        for name in list(planners)[1:]:
            made = candidate(graph, costs, space.preset(KINDS, searched, names | {kind: name}), 0)
            best = min(best, made, key=lambda one: (one.estimate.peak_bytes, one.estimate.seconds))
        names[kind] = str(best.settings[kind]["planner"])
    return best


def answers(graph: TrainGraph, costs: Costs, searched: Space, budget_bytes: int) -> Iterator[Candidate]:
    """What `auto` finds on its way; then every combination of planners with their knobs as they come. Each plan once."""
    known: set[Plan] = set()
    plans = Plans(graph, costs, budget_bytes)
    for settings in _asked(plans, searched):
        plan, estimate = plans.make(settings)
        if plan not in known:
            known.add(plan)
            yield Candidate(settings, plan, estimate)


def _asked(plans: Plans, searched: Space) -> Iterator[Settings]:
    choices = {kind: tuple(planners) for kind, planners in searched.items()}
    best: Settings = {}
    for best in leaders(plans, choices, functools.partial(space.preset, KINDS, searched)):
        yield best
    yield from _combinations(searched, best)


def _combinations(searched: Space, chosen: Settings) -> Iterator[Settings]:
    """Of the four kinds that matter most every one with every other, the defaults last; the rest as chosen."""
    free = {
        kind: reversed(known) if kind in COMBINED else [str(chosen[kind]["planner"])]
        for kind, known in searched.items()
    }
    for names in itertools.product(*free.values()):
        settings = space.preset(KINDS, searched, dict(zip(searched, names, strict=True)))
        yield settings
        if "store" in settings["offload"] and "share" in settings["recompute"]:
            # computing again meets the budget alone if asked to: here a store gets half of the work
            yield settings | {"recompute": {**settings["recompute"], "share": 0.5}}
