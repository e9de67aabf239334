"""List the single edits of a plan: one recomputation, one swap, one pair of neighbours, or one update."""

import itertools
from collections.abc import Iterator

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import OFFLOADABLE_ROLES, Plan, events
from autotune.ir.schedule import gap_layers, layer_numbers, leaves_memory
from autotune.planners.moves.plan_edits import PlanEdit, complete_edit, edit_plan, list_recomputations

LONGEST_CHAIN = 30
"""Maximum number of ops that one added recomputation runs again."""


def drop_recomputation(graph: TrainGraph, plan: Plan, position: int) -> PlanEdit | None:
    """Return the edit that drops the recomputation at a position, with the runs that served it alone.

    Its readers read the run before it, whose results stay live. None where the plan would break a rule.
    """
    name = graph.ops[plan.order[position]].name
    return complete_edit(graph, plan, PlanEdit(f"drop the recomputation of {name} at {position}", dropped=(position,)))


def add_recomputation(graph: TrainGraph, plan: Plan, op: int, position: int) -> PlanEdit | None:
    """Return the edit that recomputes an op right before the run at a position, with the inputs that are not live there.

    None where it would break a rule, or needs more than `LONGEST_CHAIN` runs.
    """
    live = _live_before(graph, plan, position)
    chain: list[int] = []
    visited: set[int] = set()

    def extend(current: int) -> bool:
        run = graph.ops[current]
        visited.add(current)
        if len(visited) > LONGEST_CHAIN or run.random or not run.repeatable:
            return False
        for value in run.inputs:
            producer = graph.producer[value]
            if producer is None or value in live or producer in visited:
                continue
            if not extend(producer):
                return False
        chain.append(current)
        return True

    if not extend(op):
        return None
    more = f" and {len(chain) - 1} ops before it" if len(chain) > 1 else ""
    text = f"recompute {graph.ops[op].name}{more} for {graph.ops[plan.order[position]].name} at {position}"
    return complete_edit(graph, plan, PlanEdit(text, added=tuple((link, position) for link in chain)))


def drop_swap(graph: TrainGraph, plan: Plan, index: int) -> PlanEdit:
    """Return the edit that keeps the value of the plan's swap at `index` in memory."""
    swap = plan.offload[index]
    return PlanEdit(f"keep {graph.values[swap.value].name} in memory", kept=((swap.value, swap.gap),))


def add_swap(graph: TrainGraph, plan: Plan, value: int, position: int, store: str) -> PlanEdit | None:
    """Return the edit that offloads a value before the read at a position; None where it would not leave memory."""
    reader = graph.ops[plan.order[position]].name
    text = f"offload {graph.values[value].name} until {reader} at {position}"
    edit = PlanEdit(text, offloaded=((value, position),), store=store)
    return edit if edit_plan(graph, plan, [edit]) is not None else None


def list_update_edits(graph: TrainGraph, plan: Plan, *, early: bool) -> Iterator[PlanEdit]:
    """Yield an edit for each update that is not there yet, without a check that the plan allows it."""
    latest: dict[int, int] = {}
    waiting: dict[int, int] = {}  # the first run that has to follow an op
    if not early:
        for position, op_id in enumerate(plan.order):
            for before in graph.predecessors[op_id]:
                waiting.setdefault(before, position)
    for position, op_id in enumerate(plan.order):
        op = graph.ops[op_id]
        if op.phase is Phase.UPDATE and early:
            target = max((latest[other] + 1 for other in graph.predecessors[op_id] if other in latest), default=0)
            if target < position:
                yield PlanEdit(f"run {op.name} early, at {target}", moved=((position, target),))
        elif op.phase is Phase.UPDATE:
            target = waiting.get(op_id, len(plan.order))
            if target > position + 1:
                yield PlanEdit(f"run {op.name} at the end", moved=((position, target),))
        latest[op_id] = position


def list_drops(graph: TrainGraph, plan: Plan) -> Iterator[PlanEdit]:
    """Yield an edit for each recomputation that can be dropped."""
    for position in list_recomputations(plan):
        edit = drop_recomputation(graph, plan, position)
        if edit is not None:
            yield edit


def list_additions(graph: TrainGraph, plan: Plan, limit: int) -> Iterator[PlanEdit]:
    """Yield edits that recompute an op before a later reader: the most bytes times idle runs first, `limit` at most."""
    gaps = []
    for value, value_events in enumerate(events(graph, plan.order)):
        producer = graph.producer[value]
        if producer is None or not graph.ops[producer].repeatable or graph.ops[producer].random:
            continue
        for (last, _), (reader, is_run) in itertools.pairwise(value_events):
            if not is_run and reader - last > 1:
                gaps.append((graph.values[value].nbytes * (reader - last), producer, reader))
    for _, producer, reader in sorted(gaps, key=lambda gap: (-gap[0], *gap[1:]))[:limit]:
        edit = add_recomputation(graph, plan, producer, reader)
        if edit is not None:
            yield edit


def list_swaps(graph: TrainGraph, plan: Plan, costs: Costs, limit: int) -> Iterator[PlanEdit]:
    """Yield edits that offload a value to the plan's store, else to the fastest; the most bytes times idle runs first."""
    store = plan.store or max(
        (name for name, cost in costs.stores.items() if not cost.holds_memory),
        key=lambda name: costs.stores[name].read_bytes_per_second,
        default="",
    )
    if not store:
        return
    layers = layer_numbers(graph, plan.order)
    present = {(swap.value, swap.gap) for swap in plan.offload}
    gaps = []
    for value, value_events in enumerate(events(graph, plan.order)):
        static = value in graph.static
        role, nbytes = graph.values[value].role, graph.values[value].nbytes
        smallest = costs.stores[store].least_own_bytes if static else 1
        if role not in (OFFLOADABLE_ROLES if static else (Role.ACTIVATION, Role.GRAD)) or nbytes < max(smallest, 1):
            continue
        for gap in range(-static, len(value_events) - 1):
            if (value, gap) in present or value_events[gap + 1][1]:
                continue
            if leaves_memory(*gap_layers(layers, value_events, gap), plan.window):
                start, end = value_events[gap][0] if gap >= 0 else 0, value_events[gap + 1][0]
                gaps.append((nbytes * (end - start), value, end))
    for _, value, reader in sorted(gaps, key=lambda gap: (-gap[0], *gap[1:]))[:limit]:
        edit = add_swap(graph, plan, value, reader, store)
        if edit is not None:
            yield edit


def _live_before(graph: TrainGraph, plan: Plan, position: int) -> set[int]:
    """Return the values whose next event at or after a position is a read, or that outlive the step."""
    live = set(graph.inputs)
    for value, value_events in enumerate(events(graph, plan.order)):
        if not value_events or value_events[0][0] >= position:
            continue
        following = next((is_run for place, is_run in value_events if place >= position), None)
        if following is False or (following is None and value in graph.outputs):
            live.add(value)
    return live
