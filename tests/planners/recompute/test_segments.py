from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase
from autotune.ir.plan import Plan
from autotune.planners.recompute.segments import Segments
from autotune.planners.update.with_gradient import WithGradient
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import training_chain
from tests.planners import synthetic


def test_two_segments_run_the_first_half_but_its_last_op_twice():
    graph = training_chain(6)
    made = Segments(2).plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    check(graph, made)
    assert [graph.ops[op].name for op in made.order if made.order.count(op) == 2][:2] == ["fwd0", "fwd1"]
    assert made.recomputed == 2


def test_one_segment_recomputes_nothing():
    graph = training_chain(6)
    assert Segments(1).plan(graph, Plan.traced(graph), 0, Costs.unit(graph)) == Plan.traced(graph)


def test_it_never_runs_more_than_one_forward_again_and_no_random_op():
    graph, costs = synthetic.gpt(3, 64, 4, 32, batch=4, vocabulary=64)
    plan = WithGradient().plan(graph, Plan.traced(graph), 0, costs)
    for count in (2, 3, 5, 9):
        made = Segments(count).plan(graph, plan, 0, costs)
        check(graph, made)
        assert made.recomputed
        assert all(
            made.order.count(op.id) <= 2
            if op.phase is Phase.FORWARD and not op.random
            else made.order.count(op.id) == 1
            for op in graph.ops
        )
        assert peak_bytes(graph, made, costs) < peak_bytes(graph, plan, costs)
