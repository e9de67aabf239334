"""Shared objects: memonger's greedy way to choose them, and the exact one."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.layout import Buffers, lay_out
from experiments.claims.memonger.sharing.net import blob_lives, count_bytes
from experiments.claims.memonger.sharing.objects import (
    Life,
    SharedObjects,
    least_object_sizes,
    share_exactly,
    share_greedily,
)
from experiments.claims.memonger.sharing.orders import depth_first, longest_chain_first
from tests.experiments.memonger.nets import Toy, blobs, renamed, run, same
from tests.layout.test_layout import FOUR

ALL = (share_greedily, share_exactly)


def drawn(*told: tuple[float, float, int]) -> tuple[Life, ...]:
    return tuple(Life(f"b{number}", *life) for number, life in enumerate(told, 1))


def random_lives(rng: random.Random, most: int) -> tuple[Life, ...]:
    begins = [rng.randint(0, 9) for _ in range(rng.randint(1, most))]
    return drawn(*((begin, begin + rng.randint(0, 4), rng.randint(1, 9)) for begin in begins))


some_lives = st.randoms(use_true_random=False).map(lambda rng: random_lives(rng, 8))


def fewest_bytes(told: tuple[Life, ...]) -> int:
    """Over all ways to put lives into objects."""

    def extend(objects: list[list[Life]], left: tuple[Life, ...]) -> int:
        if not left:
            return sum(max(life.nbytes for life in tenants) for tenants in objects)
        life, *rest = left
        found = [extend([*objects, [life]], tuple(rest))]
        for number, tenants in enumerate(objects):
            if all(life.used < other.defined or other.used < life.defined for other in tenants):
                found.append(extend([*objects[:number], [*tenants, life], *objects[number + 1 :]], tuple(rest)))
        return min(found)

    return extend([], told)


def groups(found: SharedObjects) -> set[frozenset[str]]:
    return {frozenset(life.name for life in tenants) for tenants in found.objects}


def test_greedy_joins_the_object_that_is_nearest_in_size():
    found = share_greedily(drawn((1, 3, 10), (3, 4, 1), (5, 6, 1), (5, 7, 10)))
    assert found.shared_bytes == 11
    assert groups(found) == {frozenset({"b1", "b4"}), frozenset({"b2", "b3"})}


@pytest.mark.parametrize("told", [((1, 3, 10), (3, 4, 1), (5, 6, 1), (5, 7, 10)), ((1, 2, 10), (4, 6, 1), (5, 6, 10))])
def test_memongers_two_cases_for_its_dynamic_program_take_11_bytes(told):
    assert share_exactly(drawn(*told)).shared_bytes == 11


def test_greedy_gives_the_large_object_to_the_small_value_where_a_larger_one_is_still_to_come():
    assert share_greedily(drawn((1, 2, 10), (4, 6, 1), (5, 6, 10))).shared_bytes == 20


def test_four_lives_take_11_bytes_greedily_10_exactly_and_9_in_an_arena():
    # FOUR has half-open lives: one ends when the next op begins
    told = drawn(*((born, died - 1, nbytes) for nbytes, born, died in FOUR))
    assert [solve(told).shared_bytes for solve in ALL] == [11, 10]
    assert share_exactly(told).lower_bound_bytes == 10
    nbytes, born, died = zip(*FOUR, strict=True)
    assert lay_out(Buffers.from_lives(nbytes, born, died, alignment=1)).bytes == 9


@given(some_lives)
def test_the_exact_one_finds_and_proves_the_fewest_bytes_of_all(told):
    found = share_exactly(told)
    assert found.shared_bytes == fewest_bytes(told) == found.lower_bound_bytes


def test_of_300_random_cases_greedy_misses_the_fewest_bytes_in_a_third():
    rng = random.Random(0)
    cases = [random_lives(rng, 8) for _ in range(300)]
    fewest = [share_exactly(told).shared_bytes for told in cases]
    assert (
        60 <= sum(share_greedily(told).shared_bytes > least for told, least in zip(cases, fewest, strict=True)) <= 120
    )


@given(some_lives)
def test_an_object_never_has_two_tenants_at_once(told):
    for solve in ALL:
        found = solve(told)
        assert sorted(life.name for tenants in found.objects for life in tenants) == sorted(life.name for life in told)
        for tenants in found.objects:
            assert all(one.used < other.defined for one, other in itertools.pairwise(tenants))


@given(some_lives)
def test_bounds_lie_below_what_is_found_and_below_that_all_bytes_apart(told):
    quick, best = (solve(told) for solve in ALL)
    assert quick.lower_bound_bytes == sum(least_object_sizes(told)) <= best.lower_bound_bytes
    assert best.shared_bytes <= quick.shared_bytes
    assert quick.unshared_bytes == best.unshared_bytes == sum(life.nbytes for life in told)
    assert quick.shared_bytes <= quick.unshared_bytes


@given(some_lives)
def test_objects_hold_at_least_what_an_arena_does(told):
    born, died = [2 * int(life.defined) for life in told], [2 * int(life.used) + 1 for life in told]
    assert (
        Buffers.from_lives([life.nbytes for life in told], born, died, alignment=1).max_live
        <= share_exactly(told).lower_bound_bytes
    )


def test_a_search_that_is_cut_off_still_tells_a_bound_and_a_sharing():
    rng = random.Random(3)
    told = drawn(*((b, b + rng.randint(0, 8), rng.randint(1, 99)) for b in (rng.randint(0, 30) for _ in range(40))))
    cut, long = share_exactly(told, states=3), share_exactly(told, states=3000)
    assert cut.lower_bound_bytes <= long.lower_bound_bytes <= long.shared_bytes <= cut.shared_bytes
    assert cut.lower_bound_bytes < cut.shared_bytes


@pytest.mark.parametrize("solve", ALL)
def test_a_value_whose_last_reader_makes_the_next_is_not_written_over(solve):
    assert len(solve(drawn((0, 3, 5), (3, 6, 5))).objects) == 2
    assert len(solve(drawn((0, 3, 5), (4, 6, 5))).objects) == 1


@pytest.mark.parametrize("solve", ALL)
def test_static_values_have_objects_of_their_own(solve):
    found = solve(drawn((0, 1, 5), (2, 3, 5), (4, 5, 5)), static={"b2"})
    assert groups(found) == {frozenset({"b1", "b3"}), frozenset({"b2"})}
    assert (found.unshared_bytes, found.shared_bytes, found.lower_bound_bytes) == (15, 10, 10)


@pytest.mark.parametrize("solve", ALL)
def test_what_stands_from_the_start_joins_nothing_before_it_and_what_nobody_reads_lets_nothing_follow(solve):
    assert len(solve([Life("input", used=2), Life("early", 0, 1)]).objects) == 2
    assert len(solve([Life("unread", defined=3), Life("late", 5, 6)]).objects) == 2
    assert len(solve([Life("input", used=2), Life("unread", defined=3)]).objects) == 1


def test_a_value_without_a_size_counts_1_byte():
    assert share_exactly([Life("a", 0, 1), Life("b", 0, 1), Life("c", 2, 3)]).shared_bytes == 2


@pytest.mark.parametrize("solve", ALL)
def test_no_lives_take_no_bytes(solve):
    assert solve([]).shared_bytes == solve([]).unshared_bytes == 0


def test_tenants_get_the_name_of_the_last_and_who_is_alone_keeps_its_own():
    found = share_greedily(drawn((0, 1, 5), (2, 3, 5), (0, 9, 5)))
    assert found.names == {"b1": "b2", "b2": "b2"}


@pytest.mark.parametrize("solve", ALL)
@pytest.mark.parametrize("order", [depth_first, longest_chain_first])
@pytest.mark.parametrize("sized", [False, True])
def test_a_training_net_of_three_layers_shares_objects_and_computes_the_same(solve, order, sized):
    toy = Toy("data", "label")
    toy.backward(toy.loss(toy.fc(toy.relu(toy.chain("data", "fc1", "fc2")), "fc3")))
    net = toy.net("loss")
    net = net.reordered(order(net))
    nbytes = {name: 1 + len(name) * 7 % 20 for name in blobs(net)} if sized else None
    found = solve(blob_lives(net, nbytes), static=toy.gradients[-1:])
    shared = renamed(net, found.names)
    assert found.shared_bytes < found.unshared_bytes
    assert count_bytes(nbytes or dict.fromkeys(blobs(net), 1), found.names) == found.shared_bytes
    assert blobs(shared) < blobs(net)
    assert {*net.inputs, *net.outputs, toy.gradients[-1]} <= blobs(shared)
    assert same(net, shared)
    assert run(shared) == run(net)
