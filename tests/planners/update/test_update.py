import pytest

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.update.at_end import AtEnd
from autotune.planners.update.with_gradient import WithGradient
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, training_chain


def names(graph: TrainGraph, plan: Plan) -> str:
    return " ".join(graph.ops[op].name for op in plan.order)


def early(graph: TrainGraph, costs: Costs | None = None) -> Plan:
    return WithGradient().plan(graph, Plan.traced(graph), 0, costs or Costs.unit(graph))


def test_each_update_stands_right_after_its_gradient():
    graph = training_chain(3)
    assert names(graph, early(graph)) == ("fwd0 fwd1 fwd2 loss dloss dx2 dw2 update2 dx1 dw1 update1 dw0 update0")


def test_gradients_that_need_not_wait_lower_the_peak_to_one_of_them():
    graph = training_chain(4, nbytes=1, param_bytes=100)
    static, costs = graph.static_bytes, Costs.unit(graph)
    assert peak_bytes(graph, Plan.traced(graph), costs) >= static + 400
    assert peak_bytes(graph, early(graph), costs) < static + 110


def test_an_update_waits_for_readers_of_its_parameter_that_come_after_its_gradient():
    built = Builder()
    built.value("w", 1, Role.PARAM)
    back = {"phase": Phase.BACKWARD}
    built.op("fwd", ["w"], [("h", 1)])
    built.op("dw", ["h"], [("gw", 50)], **back)
    built.op("other", ["h"], [("z", 1)], **back)
    built.op("dx", ["z", "w"], [("gx", 1)], **back)
    built.op("rest", ["gx"], [("y", 1)], **back)
    built.op("update", ["w", "gw"], writes=["w"], phase=Phase.UPDATE, repeatable=False)
    graph = built.graph("y")
    assert names(graph, early(graph)) == "fwd dw other dx update rest"


def test_tied_weights_are_updated_after_every_reader():
    built = Builder()
    built.value("w", 1, Role.PARAM)
    back = {"phase": Phase.BACKWARD}
    built.op("embed", ["w"], [("h", 1)])
    built.op("head", ["h", "w"], [("out", 1)])
    built.op("dhead", ["out", "w"], [("g1", 50), ("gh", 1)], **back)
    built.op("dembed", ["gh", "g1"], [("gw", 50)], **back)
    built.op("late", ["gh", "w"], [("gx", 1)], **back)
    built.op("tail", ["gx"], [("y", 1)], **back)
    built.op("update", ["w", "gw"], writes=["w"], phase=Phase.UPDATE, repeatable=False)
    graph = built.graph("y")
    assert names(graph, early(graph)) == "embed head dhead dembed late update tail"


def commits_statistics() -> TrainGraph:
    """A BatchNorm's statistics are committed at the end from what the forward saw."""
    built = Builder()
    built.value("w", 1, Role.PARAM)
    built.value("running", 1, Role.BUFFER)
    built.op("norm", ["w"], [("h", 9), ("stats", 1)])
    built.op("dw", ["h"], [("gw", 50)], phase=Phase.BACKWARD)
    built.op("dx", ["h"], [("gx", 1)], phase=Phase.BACKWARD)
    built.op("commit", ["stats", "running"], writes=["running"], phase=Phase.UPDATE, repeatable=False)
    built.op("update", ["w", "gw"], writes=["w"], phase=Phase.UPDATE, repeatable=False)
    return built.graph("gx")


def test_statistics_stay_at_the_end_so_that_their_forward_can_run_again():
    graph = commits_statistics()
    assert names(graph, early(graph)) == "norm dw update dx commit"


def test_an_update_whose_scratch_would_raise_the_peak_stays_where_it_was():
    graph = training_chain(3)
    hungry = Costs((1.0,) * len(graph.ops), tuple(1000 * (op.phase is Phase.UPDATE) for op in graph.ops))
    made = early(graph, hungry)
    assert made == Plan.traced(graph)


def test_one_hungry_update_waits_and_the_others_do_not():
    graph = training_chain(4, nbytes=10, param_bytes=100)
    hungry = tuple(300 * (op.name == "update3") for op in graph.ops)
    costs = Costs((1.0,) * len(graph.ops), hungry)
    one_waits, none_waits, all_wait = early(graph, costs), early(graph), Plan.traced(graph)
    assert names(graph, one_waits).endswith("dw2 update2 dx1 dw1 update1 dw0 update0 update3")
    peaks = [peak_bytes(graph, plan, costs) - graph.static_bytes for plan in (one_waits, none_waits, all_wait)]
    assert peaks == [401, 431, 411]


def test_at_the_end_undoes_it():
    graph = training_chain(3)
    made = AtEnd().plan(graph, early(graph), 0, Costs.unit(graph))
    assert names(graph, made) == "fwd0 fwd1 fwd2 loss dloss dx2 dw2 dx1 dw1 dw0 update2 update1 update0"


def test_what_follows_an_update_moves_to_the_end_with_it():
    built = Builder()
    built.value("w", 1, Role.PARAM)
    built.op("dw", ["w"], [("gw", 1)], phase=Phase.BACKWARD)
    built.op("update", ["gw"], writes=["w"], phase=Phase.UPDATE, repeatable=False)
    built.op("norm_of_w", ["w"], [("n", 1)])
    built.op("other", [], [("o", 1)])
    graph = built.graph("n", "o")
    made = AtEnd().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    check(graph, made)
    assert names(graph, made) == "dw other update norm_of_w"


def test_small_gradients_wait_where_a_size_is_asked_for():
    built = Builder()
    built.value("w", 1, Role.PARAM)
    built.value("b", 1, Role.PARAM)
    built.op("fwd", ["w", "b"], [("h", 1)])
    built.op("dw", ["h"], [("gw", 50)], phase=Phase.BACKWARD)
    built.op("db", ["h"], [("gb", 7)], phase=Phase.BACKWARD)
    built.op("dx", ["h"], [("gx", 60)], phase=Phase.BACKWARD)
    built.op("update_w", ["w", "gw"], writes=["w"], phase=Phase.UPDATE, repeatable=False)
    built.op("update_b", ["b", "gb"], writes=["b"], phase=Phase.UPDATE, repeatable=False)
    graph = built.graph("gx")
    orders = {
        size: names(graph, WithGradient(size).plan(graph, Plan.traced(graph), 0, Costs.unit(graph))) for size in (7, 8)
    }
    assert orders == {7: "fwd dw update_w db update_b dx", 8: "fwd dw update_w db dx update_b"}


@pytest.mark.parametrize("planner", [AtEnd(), WithGradient()])
def test_updates_are_placed_before_recompute(planner: AtEnd | WithGradient):
    graph = training_chain(2)
    order = list(Plan.traced(graph).order)
    order.insert(4, 0)
    with pytest.raises(PlanError, match="already recomputes fwd0; place ops before recompute"):
        planner.plan(graph, Plan(tuple(order)), 0, Costs.unit(graph))
