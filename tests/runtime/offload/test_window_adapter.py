"""The window that adapts: never over the budget, settled soon, and no slower than where it began."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Offload, Prefetch, Run, lower
from autotune.planners.offload.window import OffloadWindow
from autotune.predict.simulate import peak_bytes, time_instructions
from autotune.records.measurement import TransferTrace
from autotune.runtime.offload.window_adapter import (
    DECISION_STEPS,
    SETTLED_DECISIONS,
    UNSETTLED_STEPS,
    Variant,
    WindowAdapter,
    make_variants,
)
from autotune.runtime.prepared_step import PreparedStep
from autotune.testing.graphs import plans, training_chain

DECISION = UNSETTLED_STEPS + DECISION_STEPS


def on_a_device(graph: TrainGraph, plan: Plan, costs: Costs) -> TransferTrace:
    """Simulate a step's transfers."""
    saves, loads, save_stalls, load_stalls, now = [], [], [], [], 0.0
    for span in time_instructions(graph, lower(graph, plan), costs):
        now = span.end_seconds
        match span.moment.instruction:
            case Offload(_):
                saves.append(span.transfer)
            case Prefetch(_):
                loads.append(span.transfer)
            case Run(op):
                began = now - costs.seconds[op]
                if began > span.start_seconds + 1e-9:
                    load_stalls.append((span.start_seconds, began))
            case _ if now > span.start_seconds:
                save_stalls.append((span.start_seconds, now))
    return TransferTrace(now, tuple(saves), tuple(loads), tuple(save_stalls), tuple(load_stalls))


def device(graph: TrainGraph, bytes_per_second: float, uneven: bool = False) -> Costs:
    """Every op takes a second; uneven: of each layer's two backward ops one takes nearly none."""
    seconds = [0.1 if uneven and i % 3 == 0 else 1.0 for i in range(len(graph.ops))]
    store = StoreCost(bytes_per_second, bytes_per_second, bytes_per_second, bytes_per_second)
    return Costs(tuple(seconds), (0,) * len(graph.ops), {"ssd": store})


def train(
    graph: TrainGraph, costs: Costs, budget: int, window: int, steps: int = 60
) -> tuple[WindowAdapter, list[float]]:
    """Train from this window on; the seconds of each step."""
    plan = OffloadWindow(window).plan(graph, Plan.traced(graph), 0, costs)
    adapter = WindowAdapter(make_variants(graph, plan, budget, costs), budget)
    seconds = []
    for _ in range(steps):
        assert peak_bytes(graph, adapter.current.plan, costs) <= budget
        trace = on_a_device(graph, adapter.current.plan, costs)
        seconds.append(trace.seconds)
        adapter.record(trace)
    return adapter, seconds


@settings(max_examples=60, deadline=None)
@given(plans(14), st.integers(0, 100))
def test_every_variant_is_valid_and_peaks_no_higher_than_the_budget_or_the_plan_itself(
    task: tuple[TrainGraph, Plan], more: int
):
    graph, plan = task
    if not plan.offload:
        return
    costs = replace(Costs.unit(graph), stores={"ssd": StoreCost(9.0, 9.0, 9.0, 9.0)})
    peak = peak_bytes(graph, plan, costs)
    variants = make_variants(graph, plan, peak + more, costs)
    assert variants[0].plan == plan
    assert len({variant.plan for variant in variants}) == len(variants)
    for variant in variants:
        check(graph, variant.plan)
        assert variant.peak_bytes == peak_bytes(graph, variant.plan, costs) <= peak + more
        assert {(swap.value, swap.gap) for swap in variant.plan.offload} <= {
            (swap.value, swap.gap) for swap in plan.offload
        }


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("speed", [40.0, 80.0, 200.0])
@pytest.mark.parametrize("uneven", [False, True])
def test_from_a_wrong_window_it_settles_in_30_steps_near_the_best_that_the_budget_allows(
    window: int, speed: float, uneven: bool
):
    graph = training_chain(24, nbytes=100, param_bytes=1)
    costs = device(graph, speed, uneven)
    widest = OffloadWindow(8).plan(graph, Plan.traced(graph), 0, costs)
    budget = peak_bytes(graph, widest, costs)
    adapter, seconds = train(graph, costs, budget, window)
    assert adapter.is_settled
    assert len(set(seconds[30:])) == 1
    best = min(on_a_device(graph, variant.plan, costs).seconds for variant in adapter.variants)
    assert seconds[-1] <= 1.02 * best
    assert seconds[-1] <= 1.02 * seconds[0]


def test_waiting_for_loads_with_bandwidth_to_spare_widens_the_window():
    # a layer's load takes a second; of four layers' backwards one takes eight, the others a fifth of one
    graph = training_chain(24, nbytes=100, param_bytes=1)
    slow = tuple(f"block{i}" for i in range(0, 24, 4))
    seconds = tuple(2.0 if op.phase is Phase.FORWARD else 4.0 if op.layer in slow else 0.1 for op in graph.ops)
    costs = replace(device(graph, 100.0), seconds=seconds)
    adapter, took = train(graph, costs, 10**6, 1)
    assert adapter.current.window > 1
    assert adapter.current.share == 1.0
    assert adapter.changes[0].startswith("window 1 -> 2, share 1.00 -> 1.00: stalled")
    assert took[-1] < took[0]


def test_with_nothing_waiting_and_memory_short_the_window_narrows():
    graph = training_chain(24, nbytes=100, param_bytes=1)
    costs = device(graph, 1e6)
    plan = OffloadWindow(4).plan(graph, Plan.traced(graph), 0, costs)
    adapter, _ = train(graph, costs, peak_bytes(graph, plan, costs), 4)
    assert adapter.current.window < 4
    roomy, _ = train(graph, costs, 10**6, 4)
    assert roomy.current.window == 4


def test_where_bandwidth_is_short_less_leaves():
    graph = training_chain(24, nbytes=100, param_bytes=1)
    adapter, seconds = train(graph, device(graph, 10.0), 10**6, 2)
    assert adapter.current.share < 1
    assert seconds[-1] < seconds[0]


def steps(adapter: WindowAdapter, seconds: float, *, load_stall: float = 0.0, count: int = DECISION) -> None:
    for _ in range(count):
        adapter.record(TransferTrace(seconds, ((0.0, 0.1),), ((0.0, 0.1), (0.9, 1.0)), (), ((0.0, load_stall),)))


def made_up(*windows: int) -> list[Variant]:
    return [Variant(Plan((0,), window=window), 1.0, 100) for window in windows]


def test_what_made_steps_slower_is_taken_back_and_not_tried_again():
    adapter = WindowAdapter(made_up(1, 2), 1000)
    steps(adapter, 1.0, load_stall=0.1)
    assert adapter.current.window == 2
    steps(adapter, 1.1, load_stall=0.1)
    assert adapter.current.window == 1
    steps(adapter, 1.0, load_stall=0.1, count=100)
    assert adapter.current.window == 1
    assert len(adapter.changes) == 2


def test_once_settled_only_a_drift_of_the_steps_time_opens_the_choice_again():
    adapter = WindowAdapter(made_up(1, 2), 1000)
    steps(adapter, 1.0, count=DECISION + SETTLED_DECISIONS * DECISION_STEPS)
    assert adapter.is_settled
    steps(adapter, 1.05, load_stall=0.1, count=30)
    assert adapter.current.window == 1
    steps(adapter, 1.2, load_stall=0.1, count=30)
    assert adapter.current.window == 2


def test_steps_right_after_a_change_are_not_looked_at():
    adapter = WindowAdapter(made_up(1, 2), 1000)
    steps(adapter, 1.0, load_stall=0.5, count=UNSETTLED_STEPS)
    steps(adapter, 1.0, count=DECISION_STEPS)
    assert adapter.current.window == 1


def test_a_change_of_the_window_releases_the_graphs_and_counts_as_no_move_of_parameters():
    class Graphed:
        captures, graphs = 1, 1

        def release(self) -> None:
            self.graphs = 0

    graphed, adapter = Graphed(), WindowAdapter(made_up(1, 2), 1000)
    first, second = (variant.plan for variant in adapter.variants)
    trace = TransferTrace(1.0, load_stalls=((0.0, 0.1),))
    executor: Any = SimpleNamespace(graphed=graphed, pending_trace=lambda: trace)
    program: Any = SimpleNamespace(device=torch.device("cpu"))
    unused: Any = None
    executors = {first: (executor, None), second: (executor, None)}
    step = PreparedStep(0, program, first, first, executors, None, None, adapter, unused)
    for _ in range(DECISION):
        assert (step.plan, graphed.graphs) == (first, 1)
        step.adapt()
    assert (step.plan, graphed.graphs, graphed.captures) == (second, 0, 0)
