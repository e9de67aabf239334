import pytest
from hypothesis import given, settings

from autotune.errors import PlanError
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import InPlace, Plan, Swap
from autotune.ir.schedule import Free, Offload, Prefetch, Run, Schedule, layer_numbers, leaves_memory, lives, lower
from autotune.testing.graphs import Builder, chain, plans, training_chain


def skip(n: int = 8) -> TrainGraph:
    """`v0` is read by op1 and again by the last op; every op is a layer of its own."""
    built = Builder("skip")
    for i in range(n):
        reads = [f"v{i - 1}"] if i else []
        built.op(f"op{i}", reads + (["v0"] if i == n - 1 else []), [(f"v{i}", 1)])
    return built.graph(f"v{n - 1}")


def text(graph: TrainGraph, plan: Plan) -> str:
    return " ".join(
        graph.ops[item.op].name if isinstance(item, Run) else f"{type(item).__name__}:{graph.values[item.value].name}"
        for item in lower(graph, plan).instructions
    )


def test_values_are_freed_right_after_their_last_use_and_outputs_never():
    graph = chain(3)
    assert text(graph, Plan.traced(graph)) == "op0 op1 Free:v0 op2 Free:v1"


def test_a_value_that_nobody_reads_is_freed_at_once():
    built = Builder()
    built.op("split", makes=[("kept", 1), ("dropped", 1)])
    built.op("use", ["kept"], [("y", 1)])
    assert text(built.graph("y"), Plan((0, 1))) == "split Free:dropped use Free:kept"


def test_the_users_own_values_are_never_freed():
    graph = training_chain(1)
    assert text(graph, Plan.traced(graph)) == "fwd0 loss dloss Free:h0 dw0 Free:g0 update0 Free:gw0"


def test_a_recomputed_value_is_freed_before_its_second_run():
    graph = skip(4)
    order = (0, 1, 2, 0, 3)
    assert text(graph, Plan(order)) == "op0 op1 Free:v0 op2 Free:v1 op0 op3 Free:v0 Free:v2"


def test_an_output_that_is_recomputed_is_freed_in_between_and_kept_at_the_end():
    built = Builder()
    built.op("a", makes=[("x", 1)])
    built.op("b", ["x"], [("y", 1)])
    assert text(built.graph("x", "y"), Plan((0, 1, 0))) == "a b Free:x a"


def test_a_layer_is_a_maximal_run_in_the_plans_order():
    built = Builder()
    for name, layer in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "one")):
        built.op(name, makes=[(name, 1)], layer=layer)
    graph = built.graph()
    assert layer_numbers(graph, (0, 1, 2, 3)) == [0, 0, 1, 2]
    assert layer_numbers(graph, (0, 1, 3, 2)) == [0, 0, 0, 1]
    assert layer_numbers(graph, (0, 2, 0, 1)) == [0, 1, 2, 2]
    assert layer_numbers(graph, ()) == []


def test_an_input_that_is_overwritten_has_no_free_and_its_heir_has():
    built = Builder()
    built.op("a", makes=[("x", 4)])
    built.op("b", ["x"], [("y", 4)], inplace=["x"])
    built.op("c", ["y"], [("z", 1)])
    graph = built.graph("z")
    plan = Plan((0, 1, 2), inplace=(InPlace(1, 0),))
    assert lower(graph, plan).instructions == (Run(0), Run(1, 0), Run(2), Free(1))


def test_what_is_given_is_taken_unless_the_plan_overwrites_an_input():
    built = Builder()
    built.op("a", makes=[("x", 4)])
    built.op("b", ["x"], [("given", 4), ("small", 1)])
    built.op("c", ["x", "small"], [("y", 4)], inplace=["x"], alias_of="given")
    built.op("d", ["y"], [("z", 1)])
    graph = built.graph("z")
    x, given, small = (built.ids[name] for name in ("x", "given", "small"))
    lowered = lower(graph, Plan((0, 1, 2, 3))).instructions
    assert lowered[1:5] == (Run(1), Run(2, given), Free(x), Free(small))
    overwritten = lower(graph, Plan((0, 1, 2, 3), inplace=(InPlace(2, x),))).instructions
    assert overwritten[1:5] == (Run(1), Free(given), Run(2, x), Free(small))


def test_window_1_saves_beside_the_next_layer_and_loads_one_layer_ahead():
    graph = skip(8)
    plan = Plan(Plan.traced(graph).order, (Swap(0, 1),), 1, "ssd")
    assert text(graph, plan) == (
        "op0 op1 Offload:v0 op2 Free:v1 Free:v0 op3 Free:v2 op4 Free:v3 op5 Free:v4 Prefetch:v0 op6 Free:v5 "
        "op7 Free:v0 Free:v6"
    )


def test_window_2_saves_beside_two_layers_and_loads_two_ahead():
    graph = skip(8)
    plan = Plan(Plan.traced(graph).order, (Swap(0, 1),), 2, "ssd")
    assert "op1 Offload:v0 op2 Free:v1 op3 Free:v2 Free:v0 op4 Free:v3 Prefetch:v0 op5" in text(graph, plan)


def test_a_layer_of_several_ops_is_loaded_before_its_first_and_saved_until_its_last():
    built = Builder()
    built.op("make", makes=[("kept", 1)], layer="0")
    for layer in "12345":
        for part in "ab":
            built.op(f"{part}{layer}", makes=[(f"{part}{layer}", 1)], layer=layer)
    built.op("use", ["kept"], [("y", 1)], layer="6")
    graph = built.graph("y")
    instructions = text(graph, Plan(Plan.traced(graph).order, (Swap(0, 0),), 2, "ssd"))
    assert instructions.startswith("make Offload:kept a1 Free:a1 b1 Free:b1 a2 Free:a2 b2 Free:b2 Free:kept a3")
    assert "Free:b3 Prefetch:kept a4" in instructions


def test_writes_are_begun_before_anything_waits():
    built = Builder()
    built.op("make", makes=[("short", 1), ("kept", 1)])
    built.op("both", ["kept", "short"], [("v1", 1)])
    for i in range(2, 7):
        built.op(f"op{i}", [f"v{i - 1}"], [(f"v{i}", 1)])
    built.op("use", ["kept", "v6"], [("y", 1)])
    graph = built.graph("y")
    assert "both Offload:kept Free:short" in text(graph, Plan(Plan.traced(graph).order, (Swap(1, 1),), 1, "ssd"))


def test_what_is_read_first_is_loaded_first():
    built = Builder()
    built.op("make", makes=[("later", 1), ("sooner", 1)], layer="make")
    for i in range(1, 6):
        built.op(f"op{i}", makes=[(f"v{i}", 0)])
    built.op("use_sooner", ["sooner"], [("x", 0)], layer="use")
    built.op("use_later", ["later"], [("y", 0)], layer="use")
    graph = built.graph("x", "y")
    instructions = text(graph, Plan(Plan.traced(graph).order, (Swap(0, 0), Swap(1, 0)), 1, "ssd"))
    assert "Prefetch:sooner Prefetch:later op5" in instructions


def test_a_value_can_leave_twice():
    built = Builder()
    built.op("make", makes=[("kept", 1)], layer="0")
    for i in range(1, 11):
        built.op(f"op{i}", ["kept"] if i == 5 else [], [(f"v{i}", 0)])
    built.op("use", ["kept"], [("y", 1)], layer="11")
    graph = built.graph("y")
    instructions = text(graph, Plan(Plan.traced(graph).order, (Swap(0, 0), Swap(0, 1)), 1, "ssd"))
    assert instructions.count("Offload:kept") == instructions.count("Prefetch:kept") == 2
    assert instructions.count("Free:kept") == 3


def test_a_gap_inside_the_window_is_refused_by_name():
    graph = skip(8)
    with pytest.raises(PlanError, match="v0 returns inside the window of 4 layers: offloading it saves nothing"):
        lower(graph, Plan(Plan.traced(graph).order, (Swap(0, 1),), 4, "ssd"))


def test_away_needs_a_layer_between_leaving_and_returning():
    # saved beside layer 1, gone while 2 runs, loaded beside 3, read by 4
    assert leaves_memory(0, 4, 1)
    assert not leaves_memory(0, 3, 1)
    # beside 1 and 2, gone while 3 runs, loaded beside 4 and 5, read by 6
    assert leaves_memory(0, 6, 2)
    assert not leaves_memory(0, 5, 2)


def test_a_store_is_named_only_when_something_leaves():
    graph = skip(8)
    assert lower(graph, Plan(Plan.traced(graph).order, store="ssd")).store == ""
    assert lower(graph, Plan(Plan.traced(graph).order, (Swap(0, 1),), 1, "ssd")).store == "ssd"


@settings(max_examples=60)
@given(plans())
def test_a_schedule_never_uses_what_is_not_there_and_gives_everything_back(drawn: tuple[TrainGraph, Plan]):
    graph, plan = drawn
    live, stored, order = set(graph.inputs), set(), []
    for instruction in lower(graph, plan).instructions:
        match instruction:
            case Run(op, takes):
                order.append(op)
                assert live.issuperset((*graph.ops[op].inputs, *graph.ops[op].writes))
                assert live.isdisjoint(graph.ops[op].outputs)
                live.discard(-1 if takes is None else takes)
                live.update(graph.ops[op].outputs)
            case Free(value):
                live.remove(value)
                assert value not in graph.static or value in stored
            case Offload(value):
                assert value in live
                stored.add(value)
            case Prefetch(value):
                assert value in stored
                assert value not in live
                live.add(value)
    assert tuple(order) == plan.order
    assert live == graph.static | set(graph.outputs)


def test_values_begin_to_live_where_they_are_made_or_prefetched_and_end_where_they_are_freed_or_reused():
    built = Builder()
    built.op("a", makes=[("x", 4), ("y", 4)])
    built.op("b", ["x"], [("z", 4)], inplace=["x"])
    schedule = Schedule((Run(0), Run(1, 0), Offload(1), Free(1), Prefetch(1)), "ssd")
    changes = [(begins, ends) for _, begins, ends in lives(built.graph(), schedule)]
    assert changes == [((0, 1), ()), ((2,), (0,)), ((), ()), ((), (1,)), ((1,), ())]


@settings(max_examples=60)
@given(plans())
def test_without_offload_nothing_outlives_the_op_that_uses_it_last(drawn: tuple[TrainGraph, Plan]):
    graph, plan = drawn
    order = plan.order
    live: set[int] = set()
    position = -1
    for instruction in lower(graph, Plan(order)).instructions:
        match instruction:
            case Run(op, lowered):
                for value in live - {lowered}:  # what is still here is read before it is made again
                    later = (graph.ops[o] for o in order[position + 1 :])
                    use = next((value in o.inputs for o in later if value in (*o.inputs, *o.outputs)), None)
                    assert use or (use is None and value in graph.outputs)
                position += 1
                live.discard(-1 if lowered is None else lowered)
                live.update(graph.ops[op].outputs)
            case Free(value):
                live.remove(value)
