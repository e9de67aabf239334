"""Planners: each decides one part of a plan, as a pure function of graph, budget and costs.

To add one: a file in its kind's folder with a frozen dataclass whose fields are its knobs, and a line in that folder's
dict. The search space, the command line, the report and the contract tests take it from there.

In: a graph, a budget in bytes, and costs.
Out: a checked `Plan`.
Read first: `base`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from autotune.errors import ConfigError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.allocator import ALLOCATORS
from autotune.planners.base import Planner
from autotune.planners.inplace import INPLACES
from autotune.planners.knobs import Settings
from autotune.planners.offload import OFFLOADS
from autotune.planners.order import ORDERS
from autotune.planners.recompute import RECOMPUTES
from autotune.planners.reorder import REORDERS
from autotune.planners.update import UPDATES

KINDS: Mapping[str, Mapping[str, type[Planner]]] = {
    "order": ORDERS,
    "update": UPDATES,
    "recompute": RECOMPUTES,
    "reorder": REORDERS,
    "inplace": INPLACES,
    "offload": OFFLOADS,
    "allocator": ALLOCATORS,
}
"""The kinds in the order in which they decide; in each the planners by name, its default first."""

__all__ = ["KINDS", "Planner", "build", "defaults", "foreseen", "make_plan"]


def defaults() -> Settings:
    """Every kind's first planner with its knobs as they come."""
    first = {kind: next(iter(planners)) for kind, planners in KINDS.items()}
    return {kind: {"planner": name, **asdict(cast("Any", KINDS[kind][name]()))} for kind, name in first.items()}


def build(settings: Settings) -> dict[str, Planner]:
    """The planners that settings name, by kind, in the order in which they decide; a kind left out gets its default."""
    for kind in settings:
        if kind not in KINDS:
            raise ConfigError(f"settings: no kind of planner is called {kind!r}; known: {', '.join(KINDS)}")
    chosen = defaults() | settings
    return {kind: _build(kind, chosen[kind]) for kind in KINDS}


def make_plan(graph: TrainGraph, settings: Settings, budget_bytes: int, costs: Costs) -> Plan:
    """The plan of these settings, checked. `budget_bytes`: what the step itself may take; it may turn out above that."""
    plan, planners = Plan.traced(graph), build(settings)
    for kind, planner in planners.items():
        plan = planner.plan(graph, plan, budget_bytes, foreseen(kind, planners["inplace"], graph, plan, costs))
    check(graph, plan)
    return plan


def foreseen(kind: str, inplace: Planner, graph: TrainGraph, plan: Plan, costs: Costs) -> Costs:
    """What a kind is to reckon with: where it computes again, an op that will overwrite an input needs that much less.

    Computing the op again may keep the input alive, and out of its hands: then it needs that much more for one moment.
    """
    if kind not in ("recompute", "reorder"):
        return costs
    scratch = list(costs.scratch_bytes)
    for taken in inplace.plan(graph, plan, 0, costs).inplace:
        op = plan.order[taken.position]
        scratch[op] = costs.scratch_bytes[op] - graph.values[taken.value].nbytes
    return replace(costs, scratch_bytes=tuple(scratch))


def _build(kind: str, settings: Mapping[str, object]) -> Planner:
    name = settings.get("planner")
    if name is None:
        raise ConfigError(f"settings: {kind} names no planner; add planner: one of {', '.join(KINDS[kind])}")
    if name not in KINDS[kind]:
        raise ConfigError(f"settings: unknown {kind} planner {name!r}; known: {', '.join(KINDS[kind])}")
    planner = KINDS[kind][cast("str", name)]
    values = {knob: value for knob, value in settings.items() if knob != "planner"}
    for knob, value in values.items():
        if knob not in planner.knobs:
            known = ", ".join(planner.knobs) or "none"
            raise ConfigError(f"settings: {kind} planner {name} has no knob {knob!r}; known: {known}")
        if not planner.knobs[knob].holds(value):
            raise ConfigError(f"settings: {kind}.{knob} is {value!r}; it must be {planner.knobs[knob]}")
    return cast("Callable[..., Planner]", planner)(**values)
