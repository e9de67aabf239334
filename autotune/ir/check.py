"""Check that a plan computes the traced step: written apart from every planner, and trusting none."""

import itertools

from autotune.errors import PlanError
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import MAY_LEAVE, Plan, events


def check(graph: TrainGraph, plan: Plan) -> None:
    """Raise PlanError, naming the op or the value, if the plan would compute anything but the traced step.

    Written apart from every planner and from the lowering, so that a mistake there cannot hide itself here.
    """
    _check_order(graph, plan)
    _check_offload(graph, plan)
    _check_inplace(graph, plan)
    if plan.memory_format not in ("", "channels_last"):
        raise PlanError(f"the plan's memory_format is {plan.memory_format!r}; known: channels_last, or empty for none")
    if plan.allocator not in ("system", "arena"):
        raise PlanError(f"the plan's allocator is {plan.allocator!r}; known: system, arena")


def _check_order(graph: TrainGraph, plan: Plan) -> None:
    traced_writers: list[tuple[int, ...]] = []  # per op: writes of its inputs and targets that come before it
    written: dict[int, list[int]] = {}
    for op in graph.ops:
        traced_writers.append(tuple(w for value in {*op.inputs, *op.writes} for w in written.get(value, ())))
        for value in op.writes:
            written.setdefault(value, []).append(op.id)

    runs = [0] * len(graph.ops)
    unread: set[int] = set()  # ops of which nothing was read since they last ran
    ready = set(graph.inputs)
    random_runs: list[int] = []
    ran_writers: dict[int, list[int]] = {}
    for position, op_id in enumerate(plan.order):
        if not 0 <= op_id < len(graph.ops):
            raise PlanError(
                f"the plan runs op {op_id}; {graph.name} has {len(graph.ops)} ops: it is a plan of another graph"
            )
        op = graph.ops[op_id]
        if runs[op_id]:
            if op.random:
                raise PlanError(f"{op.name} draws random numbers: running it twice changes the result")
            if op.writes or not op.repeatable:
                raise PlanError(f"{op.name} has side effects: running it twice changes the result")
            if op_id in unread:
                raise PlanError(f"{op.name} runs again at {position} while its result still lives: nothing read it yet")
        for value in op.inputs:
            if value not in ready:
                raise PlanError(f"{op.name} at {position} reads {graph.values[value].name}, which nothing made yet")
            maker = graph.producer[value]
            if maker is not None:
                unread.discard(maker)
        seen = tuple(w for value in {*op.inputs, *op.writes} for w in ran_writers.get(value, ()))
        if sorted(seen) != sorted(traced_writers[op_id]):
            culprit = graph.ops[next(iter(set(seen) ^ set(traced_writers[op_id])))]
            verb = "after" if culprit.id in seen else "before"
            raise PlanError(f"{op.name} at {position} runs {verb} {culprit.name}, which changes what it reads in place")
        for value in op.writes:
            ran_writers.setdefault(value, []).append(op_id)
        if op.random:
            random_runs.append(op_id)
        runs[op_id] += 1
        ready.update(op.outputs)
        if op.outputs:
            unread.add(op_id)
    for op in graph.ops:
        if not runs[op.id]:
            raise PlanError(f"the plan never runs {op.name}")
    if random_runs != sorted(random_runs):
        at = next(i for i, (a, b) in enumerate(itertools.pairwise(random_runs)) if a > b)
        first, second = graph.ops[random_runs[at + 1]], graph.ops[random_runs[at]]
        raise PlanError(f"{second.name} draws random numbers before {first.name}: the traced order is the other way")


def _check_offload(graph: TrainGraph, plan: Plan) -> None:
    if plan.window < 1:
        raise PlanError(f"window is {plan.window}; it counts the running layer, so it is at least 1")
    if plan.offload and not plan.store:
        raise PlanError("the plan offloads values but names no store")
    happened = events(graph, plan.order)
    seen: set[tuple[int, int]] = set()
    for swap in plan.offload:
        if not 0 <= swap.value < len(graph.values):
            raise PlanError(f"the plan offloads value {swap.value}; {graph.name} has {len(graph.values)} values")
        value = graph.values[swap.value]
        if (swap.value, swap.gap) in seen:
            raise PlanError(f"{value.name} is offloaded twice in gap {swap.gap}")
        seen.add((swap.value, swap.gap))
        if min(swap.late, swap.early) < 0:
            raise PlanError(f"{value.name} is away for longer than the window allows: late and early are at least 0")
        own = value.id in graph.static
        if (value.role not in MAY_LEAVE) if own else (value.role not in (Role.ACTIVATION, Role.GRAD)):
            raise PlanError(f"{value.name} is the user's own {value.role}: it stays in memory")
        if not -own <= swap.gap < len(happened[value.id]) - 1:
            last = len(happened[value.id]) - 2
            those = f"its last is {last}" if last >= 0 else "nothing reads it again"
            raise PlanError(f"{value.name} has no gap {swap.gap} in this order; {those}")
        if happened[value.id][swap.gap + 1][1]:
            raise PlanError(f"{value.name} is both offloaded and recomputed in gap {swap.gap}")


def _check_inplace(graph: TrainGraph, plan: Plan) -> None:
    happened = events(graph, plan.order)
    taken: set[int] = set()
    for made in plan.inplace:
        if not 0 <= made.position < len(plan.order):
            raise PlanError(
                f"the plan makes something in place at {made.position}; its order has {len(plan.order)} runs"
            )
        op = graph.ops[plan.order[made.position]]
        if made.position in taken:
            raise PlanError(f"{op.name} at {made.position} takes two buffers for one output")
        taken.add(made.position)
        if made.value not in op.inplace or made.value not in op.inputs or len(op.outputs) != 1:
            known = made.value in range(len(graph.values))
            name = graph.values[made.value].name if known else f"value {made.value}"
            raise PlanError(f"{op.name} cannot make its output in the buffer of {name}")
        value, output = graph.values[made.value], graph.values[op.outputs[0]]
        if value.id in graph.static or value.role not in (Role.ACTIVATION, Role.GRAD):
            raise PlanError(f"{op.name} at {made.position} overwrites {value.name}, the user's own {value.role}")
        if value.nbytes != output.nbytes:
            raise PlanError(
                f"{op.name} cannot make {output.name} of {output.nbytes} bytes in the {value.nbytes} of {value.name}"
            )
        following = next((event for event in happened[value.id] if event[0] > made.position), None)
        if following is not None and not following[1]:
            reader = graph.ops[plan.order[following[0]]]
            raise PlanError(f"{op.name} at {made.position} overwrites {value.name}, which {reader.name} reads later")
        if following is None and value.id in graph.outputs:
            raise PlanError(f"{op.name} at {made.position} overwrites {value.name}, which outlives the step")
