import dataclasses
import random

import pytest
from hypothesis import given

from autotune.errors import CaptureError, PlanError
from autotune.ir.check import check
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.testing.graphs import Builder, chain, graphs, random_order, training_chain


def names(graph: TrainGraph, ops: frozenset[int]) -> set[str]:
    return {graph.ops[op].name for op in ops}


def by_name(graph: TrainGraph, name: str) -> int:
    return next(op.id for op in graph.ops if op.name == name)


def test_producer_and_consumers_of_a_chain():
    graph = chain(3)
    assert graph.producer == (0, 1, 2)
    assert graph.consumers == ((1,), (2,), ())


def test_an_input_has_no_producer_and_counts_as_static():
    graph = training_chain(2, nbytes=10, param_bytes=2)
    assert [graph.producer[value] for value in graph.inputs] == [None] * 5
    assert graph.static_bytes == 10 + 2 * (2 + 2)
    assert graph.static == frozenset(graph.inputs)


def test_an_update_waits_for_every_reader_of_its_weight():
    graph = training_chain(2)
    assert names(graph, graph.predecessors[by_name(graph, "update1")]) == {"fwd1", "dx1", "dw1"}
    assert names(graph, graph.predecessors[by_name(graph, "update0")]) == {"fwd0", "dw0"}


def test_a_reader_traced_after_a_writer_waits_for_it():
    built = Builder()
    built.value("b", 1, Role.BUFFER)
    built.op("first", ["b"], [("x", 1)])
    built.op("commit", writes=["b"])
    built.op("again", writes=["b"])
    built.op("late", ["b"], [("y", 1)])
    graph = built.graph()
    assert [names(graph, before) for before in graph.predecessors] == [set(), {"first"}, {"first", "commit"}, {"again"}]


def test_random_ops_stand_in_a_row():
    built = Builder()
    for name in ("a", "b", "c"):
        built.op(name, makes=[(f"{name}.out", 1)], draws=name != "b")
    graph = built.graph()
    assert [names(graph, before) for before in graph.predecessors] == [set(), set(), {"a"}]


def test_a_write_waits_for_the_assertions_traced_before_it():
    built = Builder()
    built.value("w", 1, Role.PARAM)
    built.op("commit", writes=["w"])
    built.op("loss", makes=[("x", 1)])
    built.op("finite", ["x"])
    built.op("positive", ["x"])
    built.op("update", writes=["w"])
    graph = built.graph("x")
    assert [names(graph, before) for before in graph.predecessors] == [
        set(), set(), {"loss"}, {"loss", "finite"}, {"commit", "positive"},
    ]  # fmt: skip
    check(graph, Plan((1, 2, 0, 3, 4)))
    for order, first in (((0, 1, 2, 4, 3), "update"), ((0, 1, 3, 2, 4), "positive")):
        with pytest.raises(PlanError, match=f"{first} runs before .*, which may raise an error"):
            check(graph, Plan(order))


@given(graphs())
def test_every_order_that_respects_predecessors_computes_the_traced_step(graph: TrainGraph):
    check(graph, Plan(random_order(graph, random.Random(0))))


def test_the_digest_ignores_names_and_layers_but_not_sizes_or_wiring():
    graph = training_chain(3)
    renamed = dataclasses.replace(graph, name="other", ops=tuple(
        dataclasses.replace(op, name=f"{op.name}.renamed", layer="") for op in graph.ops
    ))  # fmt: skip
    assert renamed.digest == graph.digest
    assert training_chain(3, nbytes=11).digest != graph.digest
    assert training_chain(4).digest != graph.digest
    signed = (dataclasses.replace(graph.ops[0], signature="float16"), *graph.ops[1:])
    assert dataclasses.replace(graph, ops=signed).digest != graph.digest
    assert dataclasses.replace(graph, outputs=()).digest != graph.digest


def test_an_op_that_reads_the_future_is_refused():
    graph = chain(2)
    with pytest.raises(CaptureError, match="chain2: op1 reads v0 before it exists"):
        TrainGraph("chain2", tuple(
            dataclasses.replace(op, id=1 - op.id) for op in reversed(graph.ops)
        ), graph.values, (), (1,))  # fmt: skip


def test_an_op_off_its_position_is_refused():
    graph = chain(2)
    with pytest.raises(CaptureError, match="op op1 has id 1 at position 0"):
        TrainGraph("chain2", graph.ops[1:], graph.values, (), (1,))


def test_a_value_made_twice_is_refused():
    graph = chain(2)
    twice = (graph.ops[0], dataclasses.replace(graph.ops[1], outputs=(0,)))
    with pytest.raises(CaptureError, match="op1 creates a value that exists already"):
        TrainGraph("chain2", twice, graph.values, (), (0,))


def test_ids_beyond_the_graph_are_refused_by_name():
    graph = chain(2)
    beyond = (graph.ops[0], dataclasses.replace(graph.ops[1], inputs=(7,)))
    with pytest.raises(CaptureError, match="op1 names value 7; the graph has 2"):
        TrainGraph("chain2", beyond, graph.values, (), (1,))
    with pytest.raises(CaptureError, match="output 5"):
        TrainGraph("chain2", graph.ops, graph.values, (), (5,))
    with pytest.raises(CaptureError, match="value v1 has id 1 at position 0"):
        TrainGraph("chain2", (), graph.values[1:], (), ())


def aliased(nbytes: int, *outputs: str, read: bool = False) -> TrainGraph:
    built = Builder("given")
    built.op("whole", [], [("result", 8), ("statistics", 1)])
    built.op("again", ["statistics", *(["result"] if read else [])], [("same", nbytes)], alias_of="result")
    return built.graph("same", *outputs)


def test_an_alias_is_read_by_its_op_alone():
    assert aliased(8).ops[1].alias_of == 0
    with pytest.raises(CaptureError, match="again is an alias of result, but has no single output of 8 bytes"):
        aliased(7)
    for graph in (lambda: aliased(8, "result"), lambda: aliased(8, read=True)):
        with pytest.raises(CaptureError, match="again is an alias of result, which is also read elsewhere"):
            graph()
    whole = aliased(8)
    for stray in (7, -1, whole.ops[1].outputs[0]):
        ops = (whole.ops[0], dataclasses.replace(whole.ops[1], alias_of=stray))
        with pytest.raises(CaptureError, match=f"again is an alias of value {stray}, which no op before it creates"):
            dataclasses.replace(whole, ops=ops)
