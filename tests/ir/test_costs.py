"""Costs of ops from the time that each takes alone."""

from autotune.ir.costs import Costs
from autotune.testing.graphs import Builder


def test_what_an_op_makes_for_another_to_take_is_charged_to_that_one():
    built = Builder()
    built.op("whole", [], [("result", 8), ("statistics", 1)])
    built.op("again", ["statistics"], [("same", 8)], alias_of="result")
    built.op("reader", ["same"], [("loss", 1)])
    graph = built.graph("loss")
    assert Costs.from_measurements(graph, [5.0, 2.0, 1.0], [4, 3, 0]) == Costs((3.0, 2.0, 1.0), (4, 3, 0))
    assert Costs.from_measurements(graph, [1.0, 2.0, 1.0], [0, 0, 0]).seconds == (0.0, 2.0, 1.0)  # noise
