import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import InPlace, Plan, Swap, events
from autotune.testing.graphs import Builder, chain, inplace_candidates, random_graph, random_plan, training_chain


def skip() -> TrainGraph:
    """`v0` is read by op1 and by op5; every op is a layer of its own."""
    built = Builder("skip")
    built.value("w", 4, Role.PARAM)
    built.op("op0", ["w"], [("v0", 10)])
    for i in range(1, 5):
        built.op(f"op{i}", [f"v{i - 1}"], [(f"v{i}", 1)])
    built.op("op5", ["v4", "v0"], [("v5", 1)])
    return built.graph("v5")


def order_of(graph: TrainGraph, *names: str) -> tuple[int, ...]:
    ids = {op.name: op.id for op in graph.ops}
    return tuple(ids[name] for name in names)


def refused(graph: TrainGraph, plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        check(graph, plan)


def test_the_traced_plan_passes_and_recomputes_nothing():
    plan = Plan.traced(training_chain(3))
    check(training_chain(3), plan)
    assert plan.recomputed == 0


def test_events_are_runs_and_reads_in_the_plans_order():
    graph = skip()
    order = order_of(graph, "op0", "op1", "op2", "op3", "op4", "op0", "op5")
    assert events(graph, order)[graph.ops[0].outputs[0]] == [(0, True), (1, False), (5, True), (6, False)]


@pytest.mark.parametrize("op", [3, -1])
def test_an_op_of_another_graph_is_refused(op: int):
    words = f"the plan runs op {op}; chain3 has 3 ops: it is a plan of another graph"
    refused(chain(3), Plan((0, 1, op)), words)


def test_a_random_op_runs_once():
    built = Builder()
    built.op("dropout", makes=[("mask", 1)], draws=True)
    built.op("use", ["mask"], [("y", 1)])
    built.op("again", ["mask"], [("z", 1)])
    refused(built.graph(), Plan((0, 1, 0, 2)), "dropout draws random numbers: running it twice changes the result")


def test_an_op_with_side_effects_runs_once():
    graph = training_chain(1)
    refused(graph, Plan((*Plan.traced(graph).order, 4)), "update0 has side effects: running it twice changes the res")
    built = Builder()
    built.value("total", 1, Role.BUFFER)
    built.op("add", writes=["total"])
    refused(built.graph(), Plan((0, 0)), "add has side effects: running it twice changes the result")
    built = Builder()
    built.op("print", makes=[("text", 1)], repeatable=False)
    built.op("use", ["text"], [("y", 1)])
    refused(built.graph(), Plan((0, 1, 0)), "print has side effects: running it twice changes the result")


def test_a_result_that_nobody_read_is_not_made_again():
    refused(chain(3), Plan((0, 0, 1, 2)), "op0 runs again at 1 while its result is still live: nothing read it yet")


def test_a_value_is_made_before_it_is_read():
    refused(chain(3), Plan((1, 0, 2)), "op1 at 0 reads v0, which no earlier run produces")


def test_a_forward_op_does_not_run_again_after_its_weight_was_updated():
    graph = training_chain(1)
    late = (*Plan.traced(graph).order, 0)
    refused(graph, Plan(late), "fwd0 at 5 runs after update0, which changes what it reads in place")


def test_a_reader_traced_after_a_writer_does_not_run_before_it():
    built = Builder()
    built.value("b", 1, Role.BUFFER)
    built.op("commit", writes=["b"])
    built.op("late", ["b"], [("y", 1)])
    refused(built.graph(), Plan((1, 0)), "late at 0 runs before commit, which changes what it reads in place")


def test_every_op_runs():
    refused(chain(3), Plan((0, 1)), "the plan never runs op2")


def test_random_ops_keep_their_traced_order():
    built = Builder()
    built.op("first", makes=[("a", 1)], draws=True)
    built.op("second", makes=[("b", 1)], draws=True)
    words = "second draws random numbers before first: the traced order is the other way"
    refused(built.graph(), Plan((1, 0)), words)


def test_a_window_counts_the_running_layer():
    refused(chain(3), Plan((0, 1, 2), window=0), "window is 0; it counts the running layer, so it is at least 1")


def test_offloading_needs_a_store():
    refused(skip(), Plan((0, 1, 2, 3, 4, 5), (Swap(1, 1),)), "the plan offloads values but names no store")


def swapped(*swaps: Swap, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> Plan:
    return Plan(order, swaps, 1, "ssd")


@pytest.mark.parametrize("swap", [Swap(1, 1, late=-1), Swap(1, 1, early=-1)])
def test_a_transfer_is_never_shorter_than_the_window(swap: Swap):
    refused(skip(), swapped(swap), "late and early are at least 0")


def test_a_gap_is_used_once():
    refused(skip(), swapped(Swap(1, 1), Swap(1, 1)), "v0 is offloaded twice in gap 1")


@pytest.mark.parametrize("value", [7, -1])
def test_a_swapped_value_exists(value: int):
    refused(skip(), swapped(Swap(value, 0)), f"the plan offloads value {value}; skip has 7 values")


@pytest.mark.parametrize("role", [Role.BATCH, Role.BUFFER])
def test_batch_and_buffers_stay(role: Role):
    built = Builder()
    built.value("own", 1, role)
    for i in range(6):
        built.op(f"op{i}", ["own"] if i in (0, 5) else [], [(f"v{i}", 1)])
    graph = built.graph()
    refused(graph, Plan(tuple(range(6)), (Swap(0, 0),), 1, "ssd"), f"own is the user's own {role}: it stays in memory")


def test_a_weight_may_be_away_before_its_first_use_and_between_two_but_not_after_the_last():
    check(skip(), swapped(Swap(0, -1)))
    last = len(events(skip(), (0, 1, 2, 3, 4, 5))[0]) - 1
    refused(skip(), swapped(Swap(0, last)), f"w has no gap {last} in this order")
    refused(skip(), swapped(Swap(0, -2)), "w has no gap -2 in this order")


@pytest.mark.parametrize("gap", [2, -1])
def test_a_gap_lies_between_two_events(gap: int):
    refused(skip(), swapped(Swap(1, gap)), f"v0 has no gap {gap} in this order; its last is 1")


def test_a_value_that_nobody_reads_has_no_gap():
    refused(skip(), swapped(Swap(6, 0)), "v5 has no gap 0 in this order; nothing reads it again")


def test_a_gap_is_bridged_by_the_store_or_by_recompute():
    order = order_of(skip(), "op0", "op1", "op2", "op3", "op4", "op0", "op5")
    refused(skip(), swapped(Swap(1, 1), order=order), "v0 is both offloaded and recomputed in gap 1")
    check(skip(), swapped(Swap(1, 1)))


def overwritten(*inplace: InPlace, order: tuple[int, ...] = (0, 1, 2, 3), outputs: tuple[str, ...] = ("y",)) -> None:
    """Check a plan of a graph in which `both` may make `s` in `a` or in `b`, and `again` reads `b` after it."""
    built = Builder()
    built.value("w", 4, Role.PARAM)
    built.op("make", ["w"], [("a", 4), ("b", 4), ("c", 4), ("d", 9)])
    built.op("both", ["a", "b", "d", "w"], [("s", 4)], inplace=["a", "b", "d", "w"])
    built.op("again", ["b"], [("t", 4)], inplace=["b"])
    built.op("last", ["s", "t"], [("y", 4)], inplace=["s", "t"])
    check(built.graph(*outputs), Plan(order, inplace=inplace))


def test_an_output_may_take_an_input_that_nobody_reads_later():
    overwritten(InPlace(1, 1), InPlace(2, 2), InPlace(3, 5))
    overwritten(InPlace(2, 2), InPlace(3, 6), order=(0, 2, 1, 3))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"inplace": (InPlace(4, 1),)}, "the plan runs an op in place at 4; its order has 4 runs"),
        ({"inplace": (InPlace(-1, 1),)}, "the plan runs an op in place at -1; its order has 4 runs"),
        ({"inplace": (InPlace(1, 1), InPlace(1, 2))}, "both at 1 reuses two buffers for one output"),
        ({"inplace": (InPlace(1, 1), InPlace(1, 1))}, "both at 1 reuses two buffers for one output"),
        ({"inplace": (InPlace(1, 3),)}, "both cannot write its output to the buffer of c"),
        ({"inplace": (InPlace(1, 99),)}, "both cannot write its output to the buffer of value 99"),
        ({"inplace": (InPlace(0, 0),)}, "make cannot write its output to the buffer of w"),
        ({"inplace": (InPlace(1, 0),)}, "both at 1 overwrites w, the user's own param"),
        ({"inplace": (InPlace(1, 4),)}, "both cannot write s of 4 bytes to the 9 of d"),
        ({"inplace": (InPlace(1, 2),)}, "both at 1 overwrites b, which again reads later"),
        ({"inplace": (InPlace(1, 1),), "outputs": ("y", "a")}, "both at 1 overwrites a, which outlives the step"),
        ({"inplace": (InPlace(1, 1),), "order": (0, 1, 2, 3, 1)}, "both at 1 overwrites a, which both reads later"),
    ],
)
def test_what_would_overwrite_something_needed_is_refused_by_name(plan: dict[str, Any], words: str):
    with pytest.raises(PlanError, match=re.escape(words)):
        overwritten(*plan.pop("inplace"), **plan)


class Interpreter:
    """Runs an order on symbols: equal results get equal numbers, so that 'the same step' is a comparison."""

    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph
        self.numbers: dict[tuple[object, ...], int] = {}

    def symbol(self, *parts: object) -> int:
        return self.numbers.setdefault(parts, len(self.numbers))

    def results(self, order: tuple[int, ...]) -> object:
        """Everything that any run computed and what stands at the end; None if the step crashes."""
        memory = {value: self.symbol("input", value) for value in self.graph.inputs}
        computed: set[tuple[int, int]] = set()
        runs: dict[int, int] = {}
        unread: set[int] = set()  # values made that no op looked at yet: making them anew would leak them
        draws = 0
        for op_id in order:
            if not 0 <= op_id < len(self.graph.ops):
                return None
            op = self.graph.ops[op_id]
            if any(value not in memory for value in op.inputs):
                return None
            if op.outputs and op_id in runs and unread.issuperset(op.outputs):
                return None
            unread.difference_update(op.inputs)
            world = draws if op.random else None, runs.get(op_id, 0) if not op.repeatable else None
            touched = tuple(memory[value] for value in op.writes)
            result = self.symbol(op_id, tuple(memory[value] for value in op.inputs), touched, world)
            draws += op.random
            runs[op_id] = runs.get(op_id, 0) + 1
            computed.add((op_id, result))
            memory |= {value: self.symbol("out", result, value) for value in (*op.outputs, *op.writes)}
            unread.update(op.outputs)
        return computed, memory


def mutated(order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    mutant = list(order)
    for _ in range(rng.randint(1, 3)):
        position, other = rng.randrange(len(mutant)), rng.randrange(len(mutant))
        match rng.randrange(4):
            case 0:
                mutant[position], mutant[other] = mutant[other], mutant[position]
            case 1:
                mutant.insert(position, mutant[other])
            case 2:
                mutant.insert(position, mutant.pop(other))
            case _ if len(mutant) > 1:
                mutant.pop(position)
    return tuple(mutant)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_an_order_is_refused_exactly_when_it_computes_something_else(rng: random.Random):
    graph = random_graph(rng, 8)
    order = mutated(random_plan(graph, rng, offload=False).order, rng)
    interpreter = Interpreter(graph)
    same = interpreter.results(order) == interpreter.results(Plan.traced(graph).order)
    try:
        check(graph, Plan(order))
        accepted = True
    except PlanError:
        accepted = False
    assert accepted == same


def overwrites_nothing_needed(graph: TrainGraph, plan: Plan) -> bool:
    """Runs the order on buffers that carry the name of who wrote them last."""
    buffer_of: dict[int, list[int]] = {value: [value] for value in graph.inputs}
    reused = {reuse.position: reuse.value for reuse in plan.inplace}
    if len(reused) < len(plan.inplace):
        return False
    for position, op_id in enumerate(plan.order):
        op = graph.ops[op_id]
        if any(buffer_of[value] != [value] for value in op.inputs):
            return False
        for value in op.outputs:
            buffer_of[value] = [value]
        if position in reused:
            overwritten = buffer_of[reused[position]]
            nbytes = graph.values[reused[position]].nbytes
            target = next(value for value in op.outputs if graph.values[value].nbytes == nbytes)
            overwritten[:] = [target]
            buffer_of[target] = overwritten
    return all(buffer_of[value] == [value] for value in (*graph.inputs, *graph.outputs))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_in_place_is_refused_exactly_when_someone_would_read_the_wrong_bytes(rng: random.Random):
    graph = random_graph(rng, 8)
    order = random_plan(graph, rng, offload=False).order
    plan = Plan(order, inplace=tuple(take for take in inplace_candidates(graph, order) if rng.random() < 0.5))
    try:
        check(graph, plan)
        accepted = True
    except PlanError:
        accepted = False
    assert accepted == overwrites_nothing_needed(graph, plan)


def test_threads_are_named_where_a_plan_sets_them_and_none_are_fewer_than_one():
    assert Plan((), threads=1).capture_name == "aten, 1 thread"
    assert Plan((0,)).captured_as(Plan((), kernels="inductor", threads=4)).capture_name == "inductor, 4 threads"
    with pytest.raises(PlanError, match="a plan names at least 1"):
        check(chain(1), Plan((0,), threads=-1))


def test_a_rebuild_price_is_named_where_there_are_regions_and_it_is_unusual():
    assert Plan((), rebuild_price=0.5).capture_name == "aten"
    assert Plan((), rebuild_price=0.5) == Plan(())
    assert Plan((), kernels="inductor", memory_format="channels_last").capture_name == "inductor, channels_last"
    assert Plan((), kernels="inductor", rebuild_price=0.5).capture_name == "inductor, rebuild price 0.5"
