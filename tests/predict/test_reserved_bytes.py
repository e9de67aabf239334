"""Bytes of a plan in the caching allocator: as the simulator counts them where nothing is wasted, and never fewer."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.predict.plan_layout import add_layout
from autotune.predict.reserved_bytes import replay_allocations
from autotune.predict.simulate import simulate
from autotune.testing.graphs import chain, random_graph, random_plan
from autotune.testing.planner_contract import STORES

MIB = 2**20


def resized(graph: TrainGraph, unit: int) -> TrainGraph:
    """Return a graph whose values have so many times their bytes."""
    values = tuple(replace(value, nbytes=unit * value.nbytes) for value in graph.values)
    return replace(graph, values=values)


def gpu_costs(graph: TrainGraph, unit: int = 0) -> Costs:
    scratch = tuple(unit * (op.id % 3) for op in graph.ops)
    return replace(Costs.unit(graph), scratch_bytes=scratch, device_kind="cuda")


def drawn(seed: int, unit: int) -> tuple[TrainGraph, Plan]:
    rng = random.Random(seed)
    graph = resized(random_graph(rng), unit)
    return graph, random_plan(graph, rng, offload=False)


@given(st.integers(0, 10**6), st.sampled_from([512, 10 * 512, 100 * 1024, MIB]))
def test_in_expandable_segments_the_simulators_peak_is_allocated(seed: int, unit: int) -> None:
    graph, plan = drawn(seed, unit)
    plan, costs = replace(plan, allocator="arena"), gpu_costs(graph, unit)
    peaks = replay_allocations(graph, plan, costs)
    assert peaks.allocated_bytes == simulate(graph, lower(graph, plan), costs).peak_bytes


@given(st.integers(0, 10**6), st.sampled_from([512, 10 * 512, 100 * 1024, MIB]), st.sampled_from(["arena", "system"]))
def test_allocated_bytes_are_never_below_the_simulators_nor_above_those_reserved(
    seed: int, unit: int, allocator: str
) -> None:
    graph, plan = drawn(seed, unit)
    plan, costs = replace(plan, allocator=allocator), gpu_costs(graph, unit)
    peaks = replay_allocations(graph, plan, costs)
    assert simulate(graph, lower(graph, plan), costs).peak_bytes <= peaks.allocated_bytes <= peaks.reserved_bytes


def test_a_chain_reserves_segments_and_counts_what_blocks_waste() -> None:
    """Three values of 13.5 MiB: each has a segment of 14 MiB, whose half MiB is not split off."""
    graph = resized(chain(3, nbytes=27), MIB // 2)
    plan = Plan.traced(graph)
    peaks = replay_allocations(graph, plan, gpu_costs(graph))
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (28 * MIB, 28 * MIB)
    expandable = replay_allocations(graph, replace(plan, allocator="arena"), gpu_costs(graph))
    assert (expandable.allocated_bytes, expandable.reserved_bytes) == (27 * MIB, 40 * MIB)


def test_an_estimate_for_a_gpu_has_the_allocators_bytes_and_one_for_a_cpu_is_unchanged() -> None:
    graph = resized(chain(3, nbytes=27), MIB // 2)
    plan = Plan.traced(graph)
    expected = simulate(graph, lower(graph, plan))
    completed = add_layout(graph, plan, gpu_costs(graph), expected)
    assert (completed.peak_bytes, completed.charged_bytes) == (28 * MIB, 28 * MIB)
    assert add_layout(graph, plan, gpu_costs(graph), completed) == completed
    assert add_layout(graph, plan, Costs.unit(graph), expected) == expected


@given(st.integers(0, 10**6))
def test_offloaded_values_return_into_the_allocator(seed: int) -> None:
    rng = random.Random(seed)
    graph = resized(random_graph(rng), 512)
    plan = replace(random_plan(graph, rng), allocator="arena")
    costs = replace(gpu_costs(graph, 512), stores=dict(STORES))
    simulated = simulate(graph, lower(graph, plan), costs).peak_bytes
    assert replay_allocations(graph, plan, costs).allocated_bytes == simulated
