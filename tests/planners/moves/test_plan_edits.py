"""Each edit gives a valid plan that differs from its parent in what the edit names, and in nothing else."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.planners.moves.plan_edits import PlanEdit, count_changes, edit_plan, list_recomputations
from autotune.planners.moves.single_edits import (
    add_recomputation,
    add_swap,
    drop_swap,
    list_additions,
    list_drops,
    list_swaps,
    list_update_edits,
)
from autotune.testing.graphs import chain, plans, random_graph, random_order, random_plan, training_chain

STORES = {"ssd": StoreCost(5.0, 5.0, 4.0, 4.0)}
RANDOM = st.randoms(use_true_random=False)


def is_valid(graph: TrainGraph, plan: Plan) -> bool:
    try:
        check(graph, plan)
        lower(graph, plan)
    except PlanError:
        return False
    return True


def without(order: tuple[int, ...], positions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(op for position, op in enumerate(order) if position not in positions)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_a_dropped_recomputation_is_gone_with_the_runs_that_served_it_alone(drawn):
    graph, plan = drawn
    for edit in list_drops(graph, plan):
        edited = edit_plan(graph, plan, [edit])
        assert is_valid(graph, edited)
        assert edited.order == without(plan.order, edit.dropped)
        assert set(edited.order) == set(plan.order)
        assert {swap.value for swap in edited.offload} <= {swap.value for swap in plan.offload}


@settings(max_examples=80, deadline=None)
@given(RANDOM)
def test_every_recomputation_that_may_be_dropped_is_listed(rng: random.Random):
    graph = random_graph(rng)
    plan = Plan(random_plan(graph, rng, offload=False).order)
    listed = {edited.order for edit in list_drops(graph, plan) if (edited := edit_plan(graph, plan, [edit]))}
    for position in list_recomputations(plan):
        rest = without(plan.order, (position,))
        if is_valid(graph, Plan(rest)):
            assert any(Counter(order) <= Counter(rest) for order in listed)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_an_added_recomputation_stands_right_before_its_reader_and_nothing_else_is_new(drawn):
    graph, plan = drawn
    for edit in list_additions(graph, plan, 10):
        edited = edit_plan(graph, plan, [edit])
        assert is_valid(graph, edited)
        ops, position = tuple(op for op, _ in edit.added), edit.added[0][1]
        head, tail = (
            without(plan.order[:position], edit.dropped),
            tuple(op for place, op in enumerate(plan.order) if place >= position and place not in edit.dropped),
        )
        assert edited.order == (*head, *ops, *tail)


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_a_swap_is_added_or_dropped_alone(rng: random.Random):
    graph = training_chain(rng.randint(3, 6))
    plan = random_plan(graph, rng, repeat=2)
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), STORES)
    present = {(swap.value, swap.gap) for swap in plan.offload}
    for edit in list_swaps(graph, plan, costs, 10):
        edited = edit_plan(graph, plan, [edit])
        assert is_valid(graph, edited)
        assert (edited.order, edited.inplace, edited.store) == (plan.order, plan.inplace, "ssd")
        new = {(swap.value, swap.gap) for swap in edited.offload}
        assert present < new
        assert {value for value, _ in new - present} == {edit.offloaded[0][0]}
        assert len(new - present) == 1
    for index in range(len(plan.offload)):
        edited = edit_plan(graph, plan, [drop_swap(graph, plan, index)])
        assert is_valid(graph, edited)
        assert (edited.order, edited.inplace) == (plan.order, plan.inplace)
        assert edited.offload == plan.offload[:index] + plan.offload[index + 1 :]


def swap_neighbours(graph: TrainGraph, plan: Plan, position: int) -> PlanEdit | None:
    edit = PlanEdit("swap two neighbours", moved=((position + 1, position),))
    edited = edit_plan(graph, plan, [edit])
    return edit if edited is not None and len(edited.order) == len(plan.order) else None


def move_update(graph: TrainGraph, plan: Plan, position: int, *, early: bool) -> PlanEdit | None:
    edits = list_update_edits(graph, plan, early=early)
    return next((edit for edit in edits if edit.moved[0][0] == position), None)


@settings(max_examples=80, deadline=None)
@given(RANDOM)
def test_neighbours_are_swapped_exactly_where_the_check_accepts_it(rng: random.Random):
    graph = random_graph(rng)
    plan = Plan(random_order(graph, rng))
    for position in range(len(plan.order) - 1):
        swapped = list(plan.order)
        swapped[position : position + 2] = reversed(swapped[position : position + 2])
        edit = swap_neighbours(graph, plan, position)
        assert (edit is not None) == is_valid(graph, Plan(tuple(swapped)))
        if edit is not None:
            assert edit_plan(graph, plan, [edit]).order == tuple(swapped)


@settings(max_examples=50, deadline=None)
@given(RANDOM)
def test_an_early_update_follows_what_it_waits_for_and_a_late_one_ends_the_step(rng: random.Random):
    graph = training_chain(rng.randint(1, 5))
    plan = Plan(random_order(graph, rng))
    for position, op in enumerate(plan.order):
        if graph.ops[op].phase is not Phase.UPDATE:
            assert move_update(graph, plan, position, early=True) is None
            continue
        rest = without(plan.order, (position,))
        for early in (True, False):
            edit = move_update(graph, plan, position, early=early)
            order = plan.order if edit is None else edit_plan(graph, plan, [edit]).order
            assert without(order, (order.index(op),)) == rest
            assert is_valid(graph, Plan(order))
            place = order.index(op)
            if early:
                assert place == 0 or order[place - 1] in graph.predecessors[op]
            else:
                assert place == len(order) - 1


@settings(max_examples=80, deadline=None)
@given(RANDOM)
def test_a_plan_with_all_that_may_run_in_place_keeps_that_and_others_gain_nothing_in_place(rng: random.Random):
    graph = random_graph(rng)
    plan = random_plan(graph, rng, offload=False)
    greedy = GreedyInPlace().plan(graph, Plan(plan.order), 0, Costs.unit(graph))
    for edit in list_drops(graph, plan):
        after = edit_plan(graph, greedy, [edit])
        assert after == GreedyInPlace().plan(graph, Plan(after.order), 0, Costs.unit(graph)) or not greedy.inplace
        some = edit_plan(graph, plan, [edit])
        if plan.inplace != greedy.inplace:
            assert Counter(reuse.value for reuse in some.inplace) <= Counter(reuse.value for reuse in plan.inplace)


@settings(max_examples=80, deadline=None)
@given(RANDOM)
def test_edits_of_one_plan_join_in_any_number_or_are_refused_together(rng: random.Random):
    graph = random_graph(rng)
    plan = random_plan(graph, rng)
    edits = [*list_drops(graph, plan), *list_additions(graph, plan, 4)]
    chosen = rng.sample(edits, min(len(edits), 3))
    joined = edit_plan(graph, plan, chosen)
    assert joined is None or is_valid(graph, joined)
    drops = [edit for edit in chosen if not edit.added]
    if len(drops) == len(chosen) and joined is not None:
        gone = tuple({position for edit in drops for position in edit.dropped})
        assert Counter(joined.order) <= Counter(without(plan.order, gone))


def test_a_swap_moves_to_the_next_read_where_its_reader_is_dropped():
    # x0 is offloaded until fwd1's second run, which the edit drops: dw1 reads it next
    graph = training_chain(6)
    order = tuple(range(len(graph.ops)))
    value = next(value.id for value in graph.values if value.name == "h0")
    reader = next(op.id for op in graph.ops if op.name == "dw1")
    recomputed = (*order[:reader], 1, *order[reader:])
    plan = Plan(recomputed, (Swap(value, 1),), store="ssd")
    if not is_valid(graph, plan):
        plan = Plan((*order[: reader - 1], 1, *order[reader - 1 :]), (Swap(value, 1),), store="ssd")
    check(graph, plan)
    edited = edit_plan(graph, plan, [PlanEdit("drop", dropped=(list_recomputations(plan)[0],))])
    assert edited.order == order
    assert edited.offload == (Swap(value, 1),)
    assert is_valid(graph, edited)


def test_an_edit_that_would_run_an_op_before_its_input_is_refused():
    assert edit_plan(chain(3), Plan((0, 1, 2)), [PlanEdit("wrong", moved=((2, 0),))]) is None
    assert add_recomputation(chain(3), Plan((0, 1, 2)), 2, 0) is None
    assert add_swap(chain(3), Plan((0, 1, 2)), 0, 1, "ssd") is None


def test_changes_are_counted_by_kind():
    before = Plan((0, 1, 0, 2), (Swap(0, 0),), store="ssd")
    assert count_changes(before, Plan((0, 1, 2))) == "1 recomputation dropped, 1 swap dropped"
    assert count_changes(before, Plan((0, 1, 0, 1, 1, 2), (Swap(0, 0), Swap(1, 0)), store="ssd")) == (
        "2 recomputations added, 1 swap added"
    )
    assert count_changes(before, Plan((0, 1, 0, 2), (Swap(1, 0),), store="ssd")) == "other swaps"
    assert count_changes(Plan((0, 1)), Plan((1, 0))) == "another order"
