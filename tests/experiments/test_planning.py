"""The graphs that planners are timed on, and that a planner which fails is a row."""

import os
import random
from dataclasses import replace

import pytest

from autotune.ir.check import check
from autotune.ir.plan import Plan
from autotune.predict.simulate import peak_bytes
from experiments.benchmarks.planning import __main__ as run
from experiments.benchmarks.planning import graphs


@pytest.mark.parametrize("seed", range(4))
def test_rewiring_keeps_the_number_of_edges(seed: int):
    readers = graphs.watts_strogatz(32, 4, 0.75, random.Random(seed))
    assert sum(map(len, readers)) == 64
    assert all(reader > node for node, found in enumerate(readers) for reader in found)


def test_no_rewiring_leaves_the_ring():
    assert graphs.watts_strogatz(6, 2, 0.0, random.Random(0)) == [{1, 5}, {2}, {3}, {4}, {5}, set()]


def test_seeds_wire_other_graphs():
    assert len({graphs.randwire(seed)[0].digest for seed in range(4)}) == 4


def test_a_random_graph_has_about_the_ops_asked_for_and_trains_all_of_them():
    graph, costs = graphs.random_training(1000)
    assert abs(len(graph.ops) - 1000) <= 2
    assert len(costs.seconds) == len(graph.ops)
    read = {value for op in graph.ops for value in op.inputs} | set(graph.outputs)
    forward = {value for op in graph.ops if op.phase == "forward" for value in op.outputs}
    assert forward <= read
    check(graph, Plan.traced(graph))


ROW = run.Row("random", "random-6", 6, "order", "traced", None)


def test_a_planner_that_dies_is_a_row_with_its_exit_code():
    assert run.run_in_process(lambda: os._exit(3), ROW, 10).remark == "the process ended with 3"


def test_a_planner_without_an_answer_is_spared_larger_graphs_of_that_family_alone():
    seen = [replace(ROW, remark="no answer within 1 s")]
    assert run.too_slow(replace(ROW, ops=7), seen)
    assert not run.too_slow(replace(ROW, ops=5), seen)
    assert not run.too_slow(replace(ROW, ops=7, family="gpt2"), seen)
    assert not run.too_slow(replace(ROW, ops=7, planner="list_by_bytes"), seen)


def test_a_planner_that_is_too_slow_at_a_low_budget_is_asked_at_higher_ones_all_the_same():
    seen = [replace(ROW, share=0.5, remark="over 1 s")]
    assert run.too_slow(replace(ROW, ops=7, share=0.5), seen)
    assert run.too_slow(replace(ROW, ops=7, share=0.0), seen)
    assert not run.too_slow(replace(ROW, ops=7, share=0.75), seen)


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [
        ROW,
        run.Row("f", "g", 3, "recompute", "greedy", 0.5, 10, 0.25, 9, 1, 8, 0.125, True, 0.5, 0.25, 2, "a remark"),
    ]
    run.write(tmp_path / "results.csv", rows)
    assert run.read(tmp_path / "results.csv") == rows


@pytest.mark.parametrize(
    ("kind", "planner", "share"),
    [("order", "best", None), ("reorder", "again", 0.5), ("whole", "first", 0.5), ("whole", "auto", 0.5)],
)
def test_a_row_tells_the_plans_own_peak_and_bounds_below_it(kind: str, planner: str, share: float | None):
    graph, costs = graphs.random_training(60)
    placed = Plan.traced(graph)
    high = peak_bytes(graph, placed, costs)
    budget = None if share is None else int(graph.static_bytes + share * (high - graph.static_bytes))
    found = run.fill_row(run.Row("random", "random-60", 60, kind, planner, share, budget), graph, placed, costs)
    assert found.remark == ""
    assert found.bound_bytes <= found.peak_bytes <= high
    assert 0.0 <= found.extra_bound <= found.extra_seconds + 1e-12


def test_a_captured_net_costs_its_flops_and_needs_no_memory():
    graph, costs = graphs.capture_zoo_model("gpt2", batch=8, depth=1)
    assert len(costs.seconds) == len(graph.ops)
    slowest = graph.ops[max(range(len(graph.ops)), key=costs.seconds.__getitem__)]
    assert slowest.target == "aten.mm.default"
