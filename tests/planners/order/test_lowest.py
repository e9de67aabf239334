import pytest

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.order import ORDERS
from autotune.predict.ordering import ordering_problem
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder


def normalized(statistic_bytes: int) -> TrainGraph:
    """Two layers whose statistics are kept at the end, and a weight's update that had better come early."""
    built = Builder()
    built.value("running", 1, Role.BUFFER)
    built.value("w", 1, Role.PARAM)
    built.op("norm", ["running"], [("y", 6000), ("mean", statistic_bytes)])
    built.op("dy", ["y"], [("g", 1000)], phase=Phase.BACKWARD)
    built.op("dw", ["g", "w"], [("gw", 3000)], phase=Phase.BACKWARD)
    built.op("dx", ["g"], [("gx", 3000)], phase=Phase.BACKWARD)
    built.op("dz", ["gx"], [("gz", 5000)], phase=Phase.BACKWARD)
    built.op("loss", ["gz"], [("out", 1)])
    built.op("commit", ["running", "mean"], writes=["running"], phase=Phase.UPDATE, repeatable=False)
    built.op("update", ["w", "gw"], writes=["w"], phase=Phase.UPDATE, repeatable=False)
    return built.graph("out")


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "traced"])
def test_statistics_are_kept_at_the_end_where_they_take_next_to_nothing(name: str):
    graph = normalized(5)
    plan = ORDERS[name]().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    order = [graph.ops[op].name for op in plan.order]
    assert peak_bytes(graph, plan, Costs.unit(graph)) == 2 + 5 + 8000
    assert order[-1] == "commit"
    assert order.index("update") < order.index("dz")


@pytest.mark.parametrize("name", ["list_by_bytes", "beam", "exact", "best"])
def test_large_statistics_go_as_soon_as_they_can(name: str):
    graph = normalized(2000)
    plan = ORDERS[name]().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    order = [graph.ops[op].name for op in plan.order]
    assert order.index("commit") < order.index("dz")


def test_an_order_that_nobody_betters_is_left_alone():
    graph = normalized(5)
    costs = Costs.unit(graph)
    best = ORDERS["exact"]().plan(graph, Plan.traced(graph), 0, costs)
    early = Plan((0, 6, *(op for op in best.order if op not in (0, 6))))
    assert ordering_problem(graph, costs).peak(early.order) <= ordering_problem(graph, costs).peak(best.order)
    assert ORDERS["exact"]().plan(graph, early, 0, costs) == early
