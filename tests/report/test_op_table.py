from hypothesis import given, settings

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import InPlace, Plan
from autotune.predict.simulate import peak_bytes
from autotune.report.op_table import build_op_rows, format_op_table
from autotune.testing.graphs import Builder, chain, plans
from tests.planners.order.nets import bottleneck


def figures(graph: TrainGraph, order: str) -> list[tuple[str, str, int, int]]:
    ids = {op.name: op.id for op in graph.ops}
    plan = Plan(tuple(ids[name] for name in order.split()))
    rows = build_op_rows(graph, plan, Costs.unit(graph))
    return [(row.op, " ".join(sorted(n for n, _ in row.tensors)), row.memory_bytes, row.peak_bytes) for row in rows]


def test_the_first_sort_of_nntrainer_1126_takes_300():
    assert figures(bottleneck(), "input L M N P Add")[1:] == [
        ("L", "T1 T2", 200, 200),
        ("M", "T1 T2 T3", 225, 225),
        ("N", "T1 T3 T4", 225, 225),
        ("P", "T1 T4 T5", 300, 300),
        ("Add", "T4 T5 T6", 200, 300),
    ]


def test_its_second_sort_takes_225():
    assert figures(bottleneck(), "input L M P N Add")[1:] == [
        ("L", "T1 T2", 200, 200),
        ("M", "T1 T2 T3", 225, 225),
        ("P", "T1 T3 T5", 225, 225),
        ("N", "T3 T4 T5", 225, 225),
        ("Add", "T4 T5 T6", 200, 225),
    ]


def test_what_waits_stands_before_what_an_op_reads_and_makes():
    graph = bottleneck()
    row = list(build_op_rows(graph, Plan.traced(graph), Costs.unit(graph)))[3]
    assert (row.op, row.tensors, row.waiting) == ("N", (("T1", 100), ("T3", 25), ("T4", 100)), 1)


def test_static_bytes_and_scratch_are_in_the_memory():
    builder = Builder()
    builder.value("w", 7, Role.PARAM)
    builder.op("a", ["w"], [("x", 10)])
    (row,) = build_op_rows(graph := builder.graph("x"), Plan.traced(graph), Costs((1.0,), (5,)))
    assert (row.resident_bytes, row.scratch_bytes, row.memory_bytes) == (7, 5, 22)
    assert list(format_op_table([row])) == ["op  memory  peak  tensors", "a     22 B  22 B  x, scratch (5 B)"]


def test_an_op_that_runs_again_has_two_rows():
    graph = chain(4)
    rows = list(build_op_rows(graph, Plan((0, 1, 0, 1, 2, 3)), Costs.unit(graph)))
    assert [row.op for row in rows] == ["op0", "op1", "op0", "op1", "op2", "op3"]


def test_many_that_wait_are_counted_not_named():
    builder = Builder()
    names = [f"t{i}" for i in range(9)]
    for name in names:
        builder.op(f"make {name}", makes=[(name, 3)])
    builder.op("join", names, [("out", 1)])
    graph = builder.graph("out")
    lines = list(format_op_table(build_op_rows(graph, Plan.traced(graph), Costs.unit(graph))))
    assert lines[9].endswith("8 waiting (24 B), t8")
    assert lines[7].endswith("t0, t1, t2, t3, t4, t5, t6")


def test_what_runs_in_place_counts_its_buffer_once():
    builder = Builder()
    builder.op("make", makes=[("x", 5)])
    builder.op("relu", ["x"], [("y", 5)], inplace=["x"])
    graph = builder.graph("y")
    plan = Plan((0, 1), inplace=(InPlace(1, graph.ops[1].inputs[0]),))
    rows = list(build_op_rows(graph, plan, Costs.unit(graph)))
    assert [row.memory_bytes for row in rows] == [5, 5]
    assert rows[1].tensors == (("y", 5),)


@settings(max_examples=60)
@given(plans())
def test_the_last_row_knows_the_peak_of_any_plan(case: tuple[TrainGraph, Plan]):
    graph, plan = case
    if plan.offload:
        return  # a value that returns early stands between two ops
    costs = Costs.unit(graph)
    rows = list(build_op_rows(graph, plan, costs))
    assert rows[-1].peak_bytes == peak_bytes(graph, plan, costs) == max(row.memory_bytes for row in rows)


@given(plans())
def test_weights_that_are_offloaded_leave_the_resident_bytes(case: tuple[TrainGraph, Plan]):
    graph, plan = case
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), {"ssd": StoreCost(1, 1, 1, 1)})
    for row in build_op_rows(graph, plan, costs):
        assert 0 <= row.resident_bytes <= graph.static_bytes
        assert row.memory_bytes <= row.peak_bytes
