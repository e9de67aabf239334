import itertools
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import InPlace, Plan
from autotune.ir.schedule import Run, lower
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.planners.inplace.never import NeverInPlace
from autotune.predict.simulate import timeline
from autotune.testing.graphs import Builder, inplace_candidates, random_graph, random_plan


def bytes_of(graph: TrainGraph, plan: Plan) -> list[int]:
    moments = timeline(graph, lower(graph, plan), Costs.unit(graph))
    return [moment.during_bytes for moment in moments if isinstance(moment.instruction, Run)]


def chain_of_activations() -> TrainGraph:
    """`relu` may overwrite what `mul` reads too, `mul` its input; the last op may not."""
    built = Builder()
    built.op("make", makes=[("x", 10)])
    built.op("relu", ["x"], [("y", 10)], inplace=["x"])
    built.op("mul", ["x", "y"], [("z", 10)], inplace=["x", "y"])
    built.op("last", ["z"], [("out", 10)])
    return built.graph("out")


def test_only_the_last_reader_overwrites():
    graph = chain_of_activations()
    made = GreedyInPlace().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    assert made.inplace == (InPlace(2, 0),)
    assert bytes_of(graph, Plan.traced(graph)) == [10, 20, 30, 20]
    assert bytes_of(graph, made) == [10, 20, 20, 20]


def test_each_run_of_a_repeated_op_is_decided_for_itself():
    graph = chain_of_activations()
    made = GreedyInPlace().plan(graph, Plan((0, 1, 0, 2, 3)), 0, Costs.unit(graph))
    assert made.inplace == (InPlace(1, 0), InPlace(3, 0))


def test_of_several_inputs_that_die_the_largest_is_overwritten():
    built = Builder()
    built.op("make", makes=[("small", 4), ("large", 40)])
    built.op("region", ["small", "large"], [("a", 4), ("b", 40)], inplace=["small", "large"])
    built.op("last", ["a", "b"], [("out", 10)])
    graph = built.graph("out")
    made = GreedyInPlace().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    assert bytes_of(graph, Plan.traced(graph)) == [44, 88, 54]
    assert bytes_of(graph, made) == [44, 48, 54]


def test_never_gives_every_output_its_own_buffer_again():
    graph = chain_of_activations()
    made = GreedyInPlace().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    assert NeverInPlace().plan(graph, made, 0, Costs.unit(graph)) == Plan.traced(graph)


def valid(graph: TrainGraph, plan: Plan) -> bool:
    try:
        check(graph, plan)
    except PlanError:
        return False
    return True


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_no_choice_of_runs_in_place_is_lower_at_any_op(rng: random.Random):
    graph = random_graph(rng, 9)
    plan = replace(random_plan(graph, rng, offload=False), inplace=())
    best = bytes_of(graph, GreedyInPlace().plan(graph, plan, 0, Costs.unit(graph)))
    possible = inplace_candidates(graph, plan.order)[:6]
    for count in range(len(possible) + 1):
        for chosen in itertools.combinations(possible, count):
            other = replace(plan, inplace=chosen)
            if valid(graph, other):
                assert all(mine <= theirs for mine, theirs in zip(best, bytes_of(graph, other), strict=True))
