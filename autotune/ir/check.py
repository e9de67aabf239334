"""Check that a plan computes the traced step. Written apart from every planner and trusts none of them."""

import itertools
from collections.abc import Sequence

from autotune.errors import PlanError
from autotune.ir.graph import Op, Role, TrainGraph
from autotune.ir.plan import OFFLOADABLE_ROLES, InPlace, Plan, Swap, events


def check(graph: TrainGraph, plan: Plan) -> None:
    """Accept a plan only if it computes exactly the traced step.

    The check shares no code with the planners or the lowering, so that a defect in them cannot hide itself here.

    Raises:
        PlanError: The plan breaks a rule; the message names the op or the value.

    >>> from autotune.testing.graphs import chain
    >>> check(chain(3), Plan((0, 1, 2)))
    >>> check(chain(3), Plan((0, 1)))
    Traceback (most recent call last):
    autotune.errors.PlanError: the plan never runs op2
    """
    if plan.kernels not in ("", "inductor"):
        raise PlanError(f"the plan's kernels are {plan.kernels!r}; known: inductor, or empty for those of eager")
    _check_order(graph, plan)
    _check_offload(graph, plan)
    _check_inplace(graph, plan)
    if plan.memory_format not in ("", "channels_last"):
        raise PlanError(f"the plan's memory_format is {plan.memory_format!r}; known: channels_last, or empty for none")
    if plan.threads < 0:
        raise PlanError(
            f"the plan's threads are {plan.threads}; a plan names at least 1, or 0 for those of the process"
        )
    if plan.allocator not in ("system", "arena"):
        raise PlanError(f"the plan's allocator is {plan.allocator!r}; known: system, arena")


def _check_order(graph: TrainGraph, plan: Plan) -> None:
    traced_writers = _traced_writers(graph)
    runs = [0] * len(graph.ops)
    unread: set[int] = set()  # ops whose results nothing read since they last ran
    ready = set(graph.inputs)
    random_runs: list[int] = []
    writers: dict[int, list[int]] = {}
    for position, op_id in enumerate(plan.order):
        if not 0 <= op_id < len(graph.ops):
            raise PlanError(
                f"the plan runs op {op_id}; {graph.name} has {len(graph.ops)} ops: it is a plan of another graph"
            )
        op = graph.ops[op_id]
        if runs[op_id]:
            _check_repetition(op, position, unread)
        for value in op.inputs:
            if value not in ready:
                raise PlanError(
                    f"{op.name} at {position} reads {graph.values[value].name}, which no earlier run produces"
                )
            producer = graph.producer[value]
            if producer is not None:
                unread.discard(producer)
        earlier = tuple(w for value in {*op.inputs, *op.writes} for w in writers.get(value, ()))
        if sorted(earlier) != sorted(traced_writers[op_id]):
            culprit = graph.ops[next(iter(set(earlier) ^ set(traced_writers[op_id])))]
            verb = "after" if culprit.id in earlier else "before"
            raise PlanError(f"{op.name} at {position} runs {verb} {culprit.name}, which changes what it reads in place")
        for value in op.writes:
            writers.setdefault(value, []).append(op_id)
        if op.random:
            random_runs.append(op_id)
        runs[op_id] += 1
        ready.update(op.outputs)
        if op.outputs:
            unread.add(op_id)
    for op in graph.ops:
        if not runs[op.id]:
            raise PlanError(f"the plan never runs {op.name}")
    _check_random_order(graph, random_runs)
    _check_assertions(graph, plan.order)


def _traced_writers(graph: TrainGraph) -> list[tuple[int, ...]]:
    """Return per op the traced writes, before it, of the values that it reads or writes."""
    traced: list[tuple[int, ...]] = []
    written: dict[int, list[int]] = {}
    for op in graph.ops:
        traced.append(tuple(w for value in {*op.inputs, *op.writes} for w in written.get(value, ())))
        for value in op.writes:
            written.setdefault(value, []).append(op.id)
    return traced


def _check_repetition(op: Op, position: int, unread: set[int]) -> None:
    if op.random:
        raise PlanError(f"{op.name} draws random numbers: running it twice changes the result")
    if op.writes or not op.repeatable:
        raise PlanError(f"{op.name} has side effects: running it twice changes the result")
    if op.id in unread:
        raise PlanError(f"{op.name} runs again at {position} while its result is still live: nothing read it yet")


def _check_random_order(graph: TrainGraph, random_runs: Sequence[int]) -> None:
    for earlier, later in itertools.pairwise(random_runs):
        if earlier > later:
            first, second = graph.ops[later], graph.ops[earlier]
            raise PlanError(
                f"{second.name} draws random numbers before {first.name}: the traced order is the other way"
            )


def _check_assertions(graph: TrainGraph, order: Sequence[int]) -> None:
    """Refuse a write, or another assertion, before an assertion that is traced earlier: there eager raises first."""
    waiting = list(reversed(graph.assertions))
    for op in map(graph.ops.__getitem__, order):
        if not waiting:
            return
        if op.id == waiting[-1]:
            waiting.pop()
        elif op.id > waiting[-1] and (op.writes or op.only_raises):
            first = graph.ops[waiting[-1]]
            raise PlanError(
                f"{op.name} runs before {first.name}, which may raise an error: the traced order is the other way"
            )


def _check_offload(graph: TrainGraph, plan: Plan) -> None:
    if plan.window < 1:
        raise PlanError(f"window is {plan.window}; it counts the running layer, so it is at least 1")
    if plan.offload and not plan.store:
        raise PlanError("the plan offloads values but names no store")
    events_of = events(graph, plan.order)
    checked: set[tuple[int, int]] = set()
    for swap in plan.offload:
        if not 0 <= swap.value < len(graph.values):
            raise PlanError(f"the plan offloads value {swap.value}; {graph.name} has {len(graph.values)} values")
        if (swap.value, swap.gap) in checked:
            raise PlanError(f"{graph.values[swap.value].name} is offloaded twice in gap {swap.gap}")
        checked.add((swap.value, swap.gap))
        _check_swap(graph, swap, events_of[swap.value])


def _check_swap(graph: TrainGraph, swap: Swap, value_events: Sequence[tuple[int, bool]]) -> None:
    value = graph.values[swap.value]
    if min(swap.late, swap.early) < 0:
        raise PlanError(f"{value.name} is offloaded for longer than the window allows: late and early are at least 0")
    static = value.id in graph.static
    if value.role not in (OFFLOADABLE_ROLES if static else (Role.ACTIVATION, Role.GRAD)):
        raise PlanError(f"{value.name} is the user's own {value.role}: it stays in memory")
    if not -static <= swap.gap < len(value_events) - 1:
        last = len(value_events) - 2
        gaps = f"its last is {last}" if last >= 0 else "nothing reads it again"
        raise PlanError(f"{value.name} has no gap {swap.gap} in this order; {gaps}")
    if value_events[swap.gap + 1][1]:
        raise PlanError(f"{value.name} is both offloaded and recomputed in gap {swap.gap}")


def _check_inplace(graph: TrainGraph, plan: Plan) -> None:
    events_of = events(graph, plan.order)
    checked: set[int] = set()
    for reuse in plan.inplace:
        if not 0 <= reuse.position < len(plan.order):
            raise PlanError(f"the plan runs an op in place at {reuse.position}; its order has {len(plan.order)} runs")
        if reuse.position in checked:
            op = graph.ops[plan.order[reuse.position]]
            raise PlanError(f"{op.name} at {reuse.position} reuses two buffers for one output")
        checked.add(reuse.position)
        _check_reuse(graph, plan, reuse)
        _check_overwritten(graph, plan, reuse, events_of[reuse.value])


def _check_reuse(graph: TrainGraph, plan: Plan, reuse: InPlace) -> None:
    """Refuse an output in a buffer that the op cannot write, or that has another size."""
    op = graph.ops[plan.order[reuse.position]]
    if reuse.value not in op.inplace or reuse.value not in op.inputs or not op.outputs:
        exists = reuse.value in range(len(graph.values))
        name = graph.values[reuse.value].name if exists else f"value {reuse.value}"
        raise PlanError(f"{op.name} cannot write its output to the buffer of {name}")
    value, output = graph.values[reuse.value], graph.values[op.outputs[0]]
    if value.id in graph.static or value.role not in (Role.ACTIVATION, Role.GRAD):
        raise PlanError(f"{op.name} at {reuse.position} overwrites {value.name}, the user's own {value.role}")
    if value.nbytes not in {graph.values[created].nbytes for created in op.outputs}:
        raise PlanError(
            f"{op.name} cannot write {output.name} of {output.nbytes} bytes to the {value.nbytes} of {value.name}"
        )


def _check_overwritten(graph: TrainGraph, plan: Plan, reuse: InPlace, value_events: Sequence[tuple[int, bool]]) -> None:
    """Refuse to overwrite a value that is read later in the step, or after it."""
    op, value = graph.ops[plan.order[reuse.position]], graph.values[reuse.value]
    following = next((event for event in value_events if event[0] > reuse.position), None)
    if following is not None and not following[1]:
        reader = graph.ops[plan.order[following[0]]]
        raise PlanError(f"{op.name} at {reuse.position} overwrites {value.name}, which {reader.name} reads later")
    if following is None and value.id in graph.outputs:
        raise PlanError(f"{op.name} at {reuse.position} overwrites {value.name}, which outlives the step")
