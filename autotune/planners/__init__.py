"""Planners: each decides one part of a plan, as a pure function of graph, budget and costs.

To add one, write a frozen dataclass in a file of its kind's folder. Its fields are its knobs. Add it to that folder's
dict. The search space, the command line, the report and the contract tests read that dict.

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
"""Planners by kind and name. Kinds stand in the order in which they run; each kind's first planner is its default."""

__all__ = ["KINDS", "Planner", "anticipate_inplace", "build_planners", "default_settings", "make_plan"]


def default_settings() -> Settings:
    """Return every kind's default planner with its default knobs."""
    first = {kind: next(iter(planners)) for kind, planners in KINDS.items()}
    return {kind: {"planner": name, **asdict(cast("Any", KINDS[kind][name]()))} for kind, name in first.items()}


def build_planners(settings: Settings) -> dict[str, Planner]:
    """Return the planners of these settings by kind, in the order in which they run; a missing kind gets its default.

    Raises:
        ConfigError: A kind, planner or knob is unknown, or a knob's value is out of range.
    """
    for kind in settings:
        if kind not in KINDS:
            raise ConfigError(f"settings: no kind of planner is called {kind!r}; known: {', '.join(KINDS)}")
    complete = default_settings() | settings
    return {kind: _build_planner(kind, complete[kind]) for kind in KINDS}


def make_plan(graph: TrainGraph, settings: Settings, budget_bytes: int, costs: Costs) -> Plan:
    """Run the planners of these settings in turn and return the checked plan.

    Args:
        graph: Training step to plan.
        settings: Planner name and knobs per kind; a missing kind gets its default.
        budget_bytes: Bytes that the step may use, static bytes included. The plan's peak may exceed it.
        costs: Seconds and scratch bytes per op, and the open stores.

    Raises:
        ConfigError: The settings are invalid, or a planner needs a store that is not open.
        PlanError: A planner returned an invalid plan.

    Examples:
        >>> from autotune.ir.costs import Costs
        >>> from autotune.testing.graphs import training_chain
        >>> graph = training_chain(8)
        >>> make_plan(graph, {"recompute": {"planner": "greedy"}}, 0, Costs.unit(graph)).recomputed > 0
        True
    """
    plan, planners = Plan.traced(graph), build_planners(settings)
    for kind, planner in planners.items():
        ahead = anticipate_inplace(kind, planners["inplace"], graph, plan, costs)
        plan = planner.plan(graph, plan, budget_bytes, ahead)
    check(graph, plan)
    return plan


def anticipate_inplace(kind: str, inplace: Planner, graph: TrainGraph, plan: Plan, costs: Costs) -> Costs:
    """Return the costs for a planner of this kind: recompute and reorder see ops that will run in place as cheaper.

    An op that overwrites an input needs that input's bytes less, so its scratch may be negative. If a recomputation
    keeps the input alive, the op cannot overwrite it and needs the full bytes for one moment.
    """
    if kind not in ("recompute", "reorder"):
        return costs
    scratch = list(costs.scratch_bytes)
    for overwrite in inplace.plan(graph, plan, 0, costs).inplace:
        op = plan.order[overwrite.position]
        scratch[op] = costs.scratch_bytes[op] - graph.values[overwrite.value].nbytes
    return replace(costs, scratch_bytes=tuple(scratch))


def _build_planner(kind: str, settings: Mapping[str, object]) -> Planner:
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
        if not planner.knobs[knob].contains(value):
            raise ConfigError(f"settings: {kind}.{knob} is {value!r}; it must be {planner.knobs[knob]}")
    return cast("Callable[..., Planner]", planner)(**values)
