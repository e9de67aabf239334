"""What planners answer to a budget, with the simulator's word on it: nothing here is measured."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autotune import space
from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.plan import Plan
from autotune.planners import KINDS, make_plan
from autotune.schedule import lower
from autotune.simulate import Estimate, simulate
from autotune.space import Space
from autotune.trial import Settings


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings, the plan that they make for one budget, and what it is predicted to take."""

    settings: Settings
    plan: Plan
    estimate: Estimate


def candidate(graph: TrainGraph, costs: Costs, settings: Settings, budget_bytes: int) -> Candidate:
    """Make a plan and estimate it; PlanError where a planner broke a rule."""
    plan = make_plan(graph, settings, budget_bytes, costs)
    return Candidate(settings, plan, simulate(graph, lower(graph, plan), costs))


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
    """Every combination of planners with their knobs as they come, each plan once; the defaults come last."""
    known: set[Plan] = set()
    for settings in _combinations(searched):
        made = candidate(graph, costs, settings, budget_bytes)
        if made.plan not in known:
            known.add(made.plan)
            yield made


def _combinations(searched: Space) -> Iterator[Settings]:
    for names in itertools.product(*(reversed(names) for names in searched.values())):
        settings = space.preset(KINDS, searched, dict(zip(searched, names, strict=True)))
        yield settings
        if "store" in settings["offload"] and "share" in settings["recompute"]:
            # computing again meets the budget alone if asked to: here a store gets half of the work
            yield settings | {"recompute": {**settings["recompute"], "share": 0.5}}
