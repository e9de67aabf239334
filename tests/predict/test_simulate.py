import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import Offload, Prefetch, Run, layer_numbers, lower
from autotune.predict.simulate import peak_bytes, resident_bytes, simulate, slab_bytes, time_instructions, timeline
from autotune.predict.step_view import StepTimeline
from autotune.testing.graphs import Builder, chain, plans, training_chain

SSD = StoreCost(50.0, 25.0, 20.0, 10.0)


def long_gap(nbytes: int = 100) -> TrainGraph:
    """`v0` is made by op0 and read by op6, the other values are empty; every op is a layer of its own."""
    built = Builder("long_gap")
    built.op("op0", makes=[("v0", nbytes)])
    for i in range(1, 6):
        built.op(f"op{i}", [f"v{i - 1}"] if i > 1 else [], [(f"v{i}", 0)])
    built.op("op6", ["v5", "v0"], [("v6", 0)])
    return built.graph("v6")


def with_store(graph: TrainGraph, store: StoreCost = SSD, contention: float = 1.0) -> Costs:
    return dataclasses.replace(Costs.unit(graph), stores={"ssd": dataclasses.replace(store, contention=contention)})


def away_v0(graph: TrainGraph) -> Plan:
    return Plan(Plan.traced(graph).order, (Swap(0, 0),), 1, "ssd")


def test_chain_of_three_peaks_at_20_bytes():
    graph = chain(3)
    assert simulate(graph, lower(graph, Plan.traced(graph))).peak_bytes == 20


def test_a_chain_names_its_peak_op_its_mean_and_its_seconds():
    graph = chain(3)
    estimate = simulate(graph, lower(graph, Plan.traced(graph)))
    assert (estimate.peak_op, estimate.mean_bytes, estimate.seconds) == ("op1", (10 + 20 + 20) // 3, 3.0)
    assert (estimate.recompute_seconds, estimate.transfer_bytes, estimate.stall_seconds) == (0.0, 0, 0.0)


def test_training_chain_of_two_peaks_at_51_bytes():
    # 18 static; at dw1 stand h0, the loss, g1, g0 and gw1; at dx1 gw1 is missing
    graph = training_chain(2, nbytes=10, param_bytes=2)
    estimate = simulate(graph, lower(graph, Plan.traced(graph)))
    assert (estimate.peak_bytes, estimate.peak_op) == (18 + 10 + 1 + 10 + 10 + 2, "dw1")


def test_scratch_stands_during_its_op_only():
    graph = chain(3)
    costs = Costs((1.0,) * 3, (100, 0, 0))
    assert [m.during_bytes for m in timeline(graph, lower(graph, Plan.traced(graph)), costs)] == [110, 20, 20, 20, 20]


def test_recompute_is_charged_to_its_own_seconds():
    graph = chain(2)
    estimate = simulate(graph, lower(graph, Plan((0, 1, 0))), Costs((2.0, 1.0), (0, 0)))
    assert (estimate.seconds, estimate.recompute_seconds) == (5.0, 2.0)


def test_an_offloaded_value_is_charged_from_prefetch_to_free():
    graph = long_gap()
    costs = with_store(graph)
    moments = timeline(graph, lower(graph, away_v0(graph)), costs)
    runs = [m.during_bytes for m in moments if isinstance(m.instruction, Run)]
    assert runs == [100, 100, 0, 0, 0, 100, 100]


def test_a_free_waits_for_its_write_and_a_reader_for_its_load():
    # op0 ends at 1; the write takes 2 s, op1 ends at 2: wait 1. op2..op4 end at 6; the read takes 4 s, op5 ends at 7: 3
    graph = long_gap()
    estimate = simulate(graph, lower(graph, away_v0(graph)), with_store(graph))
    assert estimate.stall_seconds == pytest.approx(1 + 3)
    assert estimate.seconds == pytest.approx(7 + 4)
    assert estimate.transfer_bytes == 200


def test_ops_beside_a_transfer_are_slowed_until_it_ends():
    # op1 runs from 1 to 3 beside the 2 s write; op2..op4 end at 6; op5 from 6 to 8 beside the 4 s read: wait 2
    graph = long_gap()
    estimate = simulate(graph, lower(graph, away_v0(graph)), with_store(graph, contention=2.0))
    assert estimate.stall_seconds == pytest.approx(2)
    assert estimate.seconds == pytest.approx(11)


def test_an_op_that_outlasts_the_transfer_is_slowed_for_its_part_only():
    # op1 needs 3 s; during the write's 2 s it does 1 s of work, the other 2 s go at full speed
    graph = long_gap()
    costs = dataclasses.replace(with_store(graph, contention=2.0), seconds=(1.0, 3.0, *(1.0,) * 5))
    ends = {s.moment.instruction: s.end_seconds for s in time_instructions(graph, lower(graph, away_v0(graph)), costs)}
    assert ends[Run(1)] == pytest.approx(1 + 2 + 2)


def test_a_transfer_is_slowed_by_ops_and_goes_on_at_its_own_rate_where_they_wait():
    # op1 runs 1..2: of the write's 100 B at 50 B/s it lets 25 B through; the other 75 B take 1.5 s of waiting
    graph = long_gap()
    costs = with_store(graph, dataclasses.replace(SSD, slowed=2.0))
    transfers = [s.transfer for s in time_instructions(graph, lower(graph, away_v0(graph)), costs) if s.transfer]
    assert transfers[0] == (1.0, pytest.approx(3.5))


def test_every_transfer_takes_the_latency_too():
    graph = long_gap()
    costs = with_store(graph, dataclasses.replace(SSD, latency_seconds=0.5))
    first, second = (s.transfer for s in time_instructions(graph, lower(graph, away_v0(graph)), costs) if s.transfer)
    assert (first[1] - first[0], second[1] - second[0]) == (pytest.approx(2.5), pytest.approx(4.5))


def crossing() -> tuple[TrainGraph, Plan]:
    """`b` is written while `a` comes back: both at layer 6 of single-op layers."""
    built = Builder("crossing")
    built.op("a", makes=[("a", 100)])
    for i in range(1, 6):
        built.op(f"op{i}", makes=[(f"v{i}", 0)])
    built.op("b", makes=[("b", 100)])
    built.op("use_a", ["a"], [("x", 0)])
    for i in range(8, 12):
        built.op(f"op{i}", makes=[(f"v{i}", 0)])
    built.op("use_b", ["b"], [("y", 0)])
    graph = built.graph("x", "y")
    swaps = (Swap(built.ids["a"], 0), Swap(built.ids["b"], 0))
    return graph, Plan(Plan.traced(graph).order, swaps, 1, "ssd")


def test_a_write_beside_a_read_goes_at_the_rate_measured_beside():
    # write of a 1..3 (2 s, 1 s of it waited for); `b` begins at 7, with the read of a: 25 B until 8. There b's write begins,
    # at 20 B/s: 8..13, and beside it the read goes on at 10 B/s: 75 B until 13, the last 25 B until 14. use_a waits until
    # then, ends at 15, and b has long been written; its read is waited for 3 s
    graph, plan = crossing()
    timed = list(time_instructions(graph, lower(graph, plan), with_store(graph)))
    transfers = [(type(s.moment.instruction), s.transfer) for s in timed if s.transfer]
    assert transfers[:3] == [(Offload, (1.0, 3.0)), (Prefetch, (7.0, 14.0)), (Offload, (8.0, 13.0))]
    use_a = next(s for s in timed if s.moment.instruction == Run(7))
    assert (use_a.start_seconds, use_a.ready_seconds, use_a.end_seconds) == (8.0, 14.0, 15.0)
    assert simulate(graph, lower(graph, plan), with_store(graph)).stall_seconds == pytest.approx(1 + 6 + 3)


def test_a_read_beside_a_write_goes_at_the_rate_measured_beside():
    # op0 ends at 1, its write at 3 (1 s of it waited for), op2..op4 at 6, `b` at 7; its write and the read of `a` begin
    # beside each other: at 20 B/s until 12, at 10 B/s until then and 25 B/s for the other 50 B
    built = Builder("reading")
    built.op("a", makes=[("a", 100)])
    for i in range(1, 5):
        built.op(f"op{i}", makes=[(f"v{i}", 0)])
    built.op("b", makes=[("b", 100)])
    built.op("op6", makes=[("v6", 0)])
    built.op("use_a", ["a"], [("x", 0)])
    for i in range(8, 12):
        built.op(f"op{i}", makes=[(f"v{i}", 0)])
    built.op("use_b", ["b"], [("y", 0)])
    graph = built.graph("x", "y")
    plan = Plan(Plan.traced(graph).order, (Swap(built.ids["a"], 0), Swap(built.ids["b"], 0)), 1, "ssd")
    transfers = [s.transfer for s in time_instructions(graph, lower(graph, plan), with_store(graph)) if s.transfer]
    assert transfers[:3] == [(1.0, 3.0), (7.0, 12.0), (7.0, 14.0)]


@settings(max_examples=60)
@given(plans(), st.floats(1.0, 3.0))
def test_spans_follow_each_other_and_each_direction_carries_one_transfer_at_a_time(
    drawn: tuple[TrainGraph, Plan], contention: float
):
    graph, plan = drawn
    costs = with_store(graph, contention=contention)
    timed = list(time_instructions(graph, lower(graph, plan), costs))
    assert all(a.end_seconds == b.start_seconds for a, b in itertools.pairwise(timed))
    for kind in (Offload, Prefetch):
        times = [s.transfer for s in timed if isinstance(s.moment.instruction, kind)]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))
    estimate = simulate(graph, lower(graph, plan), costs)
    assert timed[-1].end_seconds == estimate.seconds
    assert estimate.seconds >= estimate.lower_bound_seconds + estimate.stall_seconds - 1e-9


def test_a_ramdisk_in_the_devices_own_memory_saves_nothing():
    graph = long_gap()
    costs = with_store(graph, dataclasses.replace(SSD, holds_memory=True))
    schedule = lower(graph, away_v0(graph))
    assert slab_bytes(graph, schedule) == 4096
    assert simulate(graph, schedule, costs).peak_bytes == 4096 + 100
    assert peak_bytes(graph, Plan.traced(graph), costs) == 100


@settings(max_examples=60)
@given(plans())
def test_holding_memory_never_pays(drawn: tuple[TrainGraph, Plan]):
    graph, plan = drawn
    costs = with_store(graph, dataclasses.replace(SSD, holds_memory=True))
    assert peak_bytes(graph, plan, costs) >= peak_bytes(graph, dataclasses.replace(plan, offload=(), store=""), costs)


def test_an_open_stores_bounce_buffers_count_through_the_whole_step():
    graph = long_gap()
    costs = with_store(graph, dataclasses.replace(SSD, pool_bytes=1000))
    assert resident_bytes(graph, lower(graph, away_v0(graph)), costs) == 1000
    assert resident_bytes(graph, lower(graph, Plan.traced(graph)), costs) == 0
    assert peak_bytes(graph, away_v0(graph), costs) == 1100


def test_a_store_that_was_not_given_is_named_with_the_cure():
    graph = long_gap()
    with pytest.raises(ConfigError, match=r"needs the store 'ssd'; available: none\. Add --store ssd=DIR"):
        simulate(graph, lower(graph, away_v0(graph)), Costs.unit(graph))


def counted(graph: TrainGraph, plan: Plan, scratch: tuple[int, ...]) -> list[int]:
    """Bytes while each position of the order runs, value by value from the rules of a plan, without a schedule."""
    layers = layer_numbers(graph, plan.order)
    swaps = {(swap.value, swap.gap): swap for swap in plan.offload}
    total = [graph.static_bytes + scratch[op] for op in plan.order]
    for value, happened in zip(graph.values, events(graph, plan.order), strict=True):
        if value.id in graph.static:
            for gap, (position, _) in enumerate([(-1, False), *happened[:-1]], start=-1):
                if (swap := swaps.get((value.id, gap))) is not None:
                    saved = (layers[position] if gap >= 0 else -1) + plan.window + swap.late
                    loaded = layers[happened[gap + 1][0]] - plan.window - swap.early
                    for p in range(position + 1, happened[gap + 1][0]):
                        total[p] -= value.nbytes if saved < layers[p] < loaded else 0
            continue
        positions: set[int] = set()
        for gap, (position, _) in enumerate(happened):
            positions.add(position)
            if gap + 1 == len(happened):
                if value.id in graph.outputs:
                    positions.update(range(position, len(plan.order)))
                continue
            following, again = happened[gap + 1]
            if again:
                continue
            between = range(position, following)
            if (swap := swaps.get((value.id, gap))) is not None:
                saved, loaded = layers[position] + plan.window + swap.late, layers[following] - plan.window - swap.early
                between = [p for p in between if layers[p] <= saved or layers[p] >= loaded]
            positions.update(between)
        for position in positions:
            total[position] += value.nbytes
    for reuse in plan.inplace:
        total[reuse.position] -= graph.values[reuse.value].nbytes
    return total


@settings(max_examples=60)
@given(plans(), st.lists(st.integers(0, 30), min_size=12, max_size=12))
def test_bytes_of_every_op_equal_a_count_that_knows_no_schedule(drawn: tuple[TrainGraph, Plan], scratch: list[int]):
    graph, plan = drawn
    costs = dataclasses.replace(with_store(graph), scratch_bytes=tuple(scratch[: len(graph.ops)]))
    schedule = lower(graph, plan)
    moments = timeline(graph, schedule, costs)
    assert [m.during_bytes for m in moments if isinstance(m.instruction, Run)] == counted(
        graph, plan, costs.scratch_bytes
    )
    estimate = simulate(graph, schedule, costs)
    # before the first op all of the user's own stands, whatever leaves later
    highest = max(resident_bytes(graph, schedule, costs), *counted(graph, plan, costs.scratch_bytes))
    assert estimate.peak_bytes == highest == peak_bytes(graph, plan, costs)
    assert estimate.lower_bound_bytes <= estimate.peak_bytes
    stores_own = resident_bytes(graph, schedule, costs) - graph.static_bytes
    assert sum(StepTimeline(graph, costs, plan).bytes_at_peak().values()) + stores_own == estimate.peak_bytes
    assert estimate.mean_bytes <= estimate.peak_bytes
