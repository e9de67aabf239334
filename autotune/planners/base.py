"""Define the planner protocol, and the checks that order and update planners share."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


class Planner(Protocol):
    """Planner of one kind: it decides one part of a plan and leaves the other parts unchanged.

    A planner is a frozen dataclass. Its fields are its knobs, and `knobs` states the range of each field. Every field
    has a default inside its range. The kinds run in this order, and each may change only its own part:

    | kind | decides | changes |
    |---|---|---|
    | order | positions of all ops | `order`, every op once |
    | update | positions of the parameter updates | `order`, every op once |
    | recompute | ops that run again | `order`, with repeated ops |
    | reorder | positions of all runs, repeated ones included | `order` |
    | inplace | outputs that overwrite an input | `inplace` |
    | offload | values that leave for a store | `offload`, `store`, `window` |
    | allocator | allocator of the step | `allocator` |

    Rules, held by `autotune.testing.planner_contract`:

    - The returned plan passes `autotune.ir.check.check`: each op runs at least once and after its inputs exist. No run
      changes results, such as a repeated random op or a read after a write in place. Each offloaded value is back
      before its reader, and an overwritten input has no later reader. `make_plan` raises PlanError otherwise.
    - The plan is deterministic: a function of the arguments and the knobs. Use no clock, and seed random numbers.
    - The peak does not rise, unless the planner's purpose is to undo an earlier decision.
    - A plan that fits the budget already keeps its seconds, its ops and its values in memory.
    - A graph without ops gets the empty plan.
    - The arguments stay unchanged; all of them are frozen.

    A planner that cannot reach the budget returns the lowest peak that it can. It raises only PlanError, if the plan
    holds decisions that must come later, or ConfigError, if it needs a store that is not in `costs.stores`.

    Examples:
        An order planner that runs the last `count` ops of the trace as early as their inputs allow.

        >>> from dataclasses import dataclass, replace
        >>> from autotune.planners.base import refuse_later_decisions
        >>> from autotune.planners.knobs import Int
        >>> from autotune.predict.simulate import peak_bytes
        >>> @dataclass(frozen=True, slots=True)
        ... class LateOpsFirst:
        ...     knobs = {"count": Int(1, 64, log=True)}
        ...     count: int = 8
        ...
        ...     def plan(self, graph, plan, budget_bytes, costs):
        ...         refuse_later_decisions(graph, plan)
        ...         order = list(plan.order)
        ...         for op in plan.order[-self.count:]:
        ...             order.remove(op)
        ...             ready = [order.index(other) for other in graph.predecessors[op]]
        ...             order.insert(max(ready, default=-1) + 1, op)
        ...         moved = replace(plan, order=tuple(order))
        ...         return min(plan, moved, key=lambda plan: peak_bytes(graph, plan, costs))

        Run it through the contract suite in a test module of your own:

        >>> from autotune.testing.planner_contract import PlannerContract
        >>> class TestLateOpsFirst(PlannerContract):
        ...     kind = "order"
        ...     planner = LateOpsFirst

        Add it to the kind's dict to make it available to settings, the search and the command line:

        >>> from autotune.planners.order import ORDERS
        >>> ORDERS["late_ops_first"] = LateOpsFirst
    """

    knobs: ClassVar[Mapping[str, Knob]]
    """Range of every field, by field name."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with this planner's part decided.

        Args:
            graph: Training step. Op and value ids are positions in it.
            plan: Plan with the decisions of all earlier kinds; it is valid.
            budget_bytes: Target of the step's peak in bytes, static bytes included. It may be unreachable, even 0.
            costs: Seconds and scratch bytes of every op, and the costs of the open stores.
        """
        ...


def refuse_later_decisions(graph: TrainGraph, plan: Plan) -> None:
    """Raise PlanError if the plan already repeats an op, runs one in place or offloads a value.

    Those decisions refer to positions, which an order or update planner shifts.
    """
    if plan.recomputed:
        repeated = next(op for op in graph.ops if plan.order.count(op.id) > 1)
        raise PlanError(f"the plan already recomputes {repeated.name}; place ops before recompute is decided")
    if plan.inplace:
        name = graph.ops[plan.order[plan.inplace[0].position]].name
        raise PlanError(f"the plan already runs {name} in place; place ops before in-place is decided")
    if plan.offload:
        name = graph.values[plan.offload[0].value].name
        raise PlanError(f"the plan already offloads {name}; place ops before offload is decided")
