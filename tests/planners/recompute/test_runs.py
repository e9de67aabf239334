import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lower
from autotune.planners.recompute.editable_order import EditableOrder
from autotune.predict.simulate import timeline
from autotune.testing.graphs import random_graph, random_plan


def during(graph: TrainGraph, order: tuple[int, ...], costs: Costs) -> list[int]:
    moments = timeline(graph, lower(graph, Plan(order)), costs)
    return [moment.during_bytes for moment in moments if isinstance(moment.instruction, Run)]


@settings(max_examples=80)
@given(rng=st.randoms(use_true_random=False))
def test_what_a_change_says_is_what_the_simulator_says_after_it(rng: random.Random):
    """Evictions and their reverse, one after the other, on orders that repeat already."""
    graph = random_graph(rng, 14)
    costs = Costs(tuple(rng.choice([0.5, 1.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    runs = EditableOrder(graph, random_plan(graph, rng, offload=False).order, costs)
    assert runs.bytes.tolist() == during(graph, runs.order, costs)
    for _ in range(8):
        runs.limit = rng.randint(graph.static_bytes, max(runs.peak, graph.static_bytes))
        over, seconds = int(np.maximum(runs.bytes - runs.limit, 0).sum()), runs.seconds
        if rng.random() < 0.7:
            reader = rng.choice(runs.sequence.tolist())
            makers = [op for op in runs.sources[runs.op_of[reader]] if runs.may_run_before(op, runs.position(reader))]
            if not makers:
                continue
            edit = runs.weigh_edit(reader, (rng.choice(makers),))
        else:
            repeats = runs.repeats()
            if not repeats:
                continue
            edit = runs.weigh_edit(removed=[rng.choice(repeats)])
        if edit is None:
            continue
        runs.apply(edit)
        check(graph, Plan(runs.order))
        assert runs.bytes.tolist() == during(graph, runs.order, costs)
        assert int(np.maximum(runs.bytes - runs.limit, 0).sum()) == over + edit.area
        assert abs(runs.seconds - seconds - edit.seconds) < 1e-9
        assert runs.runs == [sorted(own, key=runs.position) for own in runs.runs]
