"""Our layout does what nntrainer's tests ask of its planners, and is no larger; a layout that overlaps is seen."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.layout import Buffers
from tests.experiments.memonger.nntrainer import basic, clashes, gradients_apart, lowest_gap, ours, stacked

PLANNERS = (basic, stacked, lowest_gap, ours)

buffers = st.lists(
    st.builds(lambda nbytes, born, long: (nbytes, born, born + long), st.integers(1, 50), st.integers(0, 20), st.integers(1, 5)),
    max_size=24,
)  # fmt: skip


def live_bytes(lives):
    nbytes, born, died = zip(*lives, strict=True) if lives else ((), (), ())
    return Buffers.from_lives(nbytes, born, died, alignment=1).max_live


def total(lives):
    return sum(nbytes for nbytes, _, _ in lives)


@pytest.mark.parametrize("plan", PLANNERS)
def test_a_hundred_buffers_of_one_moment_take_their_sum_without_a_gap(plan):
    rng = random.Random(0)
    lives = [(rng.randint(1, 1000), 1, 2) for _ in range(100)]
    offsets, top = plan(lives)
    assert top == total(lives)
    assert not clashes(lives, (offsets, top))


@pytest.mark.parametrize("plan", [stacked, lowest_gap, ours])
def test_a_hundred_buffers_one_after_the_other_take_the_largest_and_lie_at_one_place(plan):
    rng = random.Random(1)
    lives = [(rng.randint(1, 1000), moment, moment + 1) for moment in range(100)]
    assert plan(lives) == ([0] * 100, max(nbytes for nbytes, _, _ in lives))


def test_one_beside_the_other_takes_the_sum_of_buffers_that_never_meet():
    assert basic([(5, 0, 1), (7, 1, 2), (1, 2, 3)]) == ([0, 5, 12], 13)


@pytest.mark.parametrize("plan", PLANNERS)
@given(lives=buffers)
def test_whatever_lives_together_lies_apart_between_the_largest_and_the_sum(plan, lives):
    offsets, top = plan(lives)
    assert not clashes(lives, (offsets, top))
    assert max((nbytes for nbytes, _, _ in lives), default=0) <= live_bytes(lives) <= top <= total(lives)


def test_of_200_random_pools_ours_wastes_least_and_nntrainers_default_most():
    rng = random.Random(2)
    waste = dict.fromkeys((stacked, lowest_gap, ours), 0.0)
    for _ in range(200):
        born = [rng.randint(0, 20) for _ in range(30)]
        lives = [(rng.randint(1, 50), first, first + rng.randint(1, 5)) for first in born]
        for plan in waste:
            waste[plan] += plan(lives)[1] / live_bytes(lives) - 1
    assert waste[ours] < 0.1 * waste[lowest_gap]
    assert waste[lowest_gap] < 0.5 * waste[stacked]


def test_the_rule_for_weights_gradients_lets_two_that_live_together_overlap_and_it_is_seen():
    lives = [(8, 20, 23), (5, 18, 21), (5, 2, 4)]
    assert clashes(lives, gradients_apart(lives, [True] * 3)) == {(0, 1)}
    assert not clashes(lives, ours(lives))


def test_most_random_pools_of_weights_gradients_overlap_by_that_rule():
    rng = random.Random(3)
    overlapping = 0
    for _ in range(200):
        born = [rng.randint(0, 20) for _ in range(12)]
        lives = [(rng.randint(1, 50), first, first + rng.randint(1, 5)) for first in born]
        overlapping += bool(clashes(lives, gradients_apart(lives, [rng.random() < 0.7 for _ in lives])))
    assert overlapping > 100


@given(buffers, st.randoms(use_true_random=False))
def test_a_layout_with_two_buffers_put_at_one_place_is_seen(lives, rng):
    together = [
        (one, other)
        for other, (_, start, stop) in enumerate(lives)
        for one, (_, born, died) in enumerate(lives[:other])
        if born < stop and start < died
    ]
    if not together:
        return
    offsets, top = basic(lives)
    one, other = rng.choice(together)
    offsets[other] = offsets[one]
    assert (one, other) in clashes(lives, (offsets, top + 100))


def test_a_buffer_beyond_the_pool_is_seen():
    assert clashes([(4, 0, 1)], ([1], 4)) == {(0, 0)}


@pytest.mark.parametrize("plan", PLANNERS)
def test_what_is_written_into_a_pool_is_read_back_while_it_lives(plan):
    rng = random.Random(4)
    for born in ([1] * 10, list(range(0, 30, 3)), [rng.randint(0, 8) for _ in range(10)]):
        lives = [(rng.randint(1, 9), first, first + 3) for first in born]
        offsets, top = plan(lives)
        pool = [-1] * top
        for moment in range(40):
            for one, (nbytes, first, _) in enumerate(lives):
                if first == moment:
                    pool[offsets[one] : offsets[one] + nbytes] = [one] * nbytes
            for one, (nbytes, first, died) in enumerate(lives):
                if first <= moment < died:
                    assert pool[offsets[one] : offsets[one] + nbytes] == [one] * nbytes


@pytest.mark.parametrize(
    ("requests", "least"),
    [
        ([(1, 4, 5), (2, 4, 5), (3, 2, 5), (4, 4, 8), (5, 1, 10)], [1, 3, 6, 10, 15]),
        ([(1, 5, 10), (2, 1, 8), (3, 7, 12)], [1, 3, 6]),
        ([(1, 5, 10), (2, 1, 8), (3, 8, 12)], [1, 3, 4]),
        ([(1, 5, 10), (2, 1, 5)], [1, 2]),
        ([(1, 5, 10), (2, 1, 5), (3, 10, 12), (1, 12, 13)], [1, 2, 3, 3]),
    ],
)
def test_a_pools_least_bytes_grow_as_buffers_are_asked_for(requests, least):
    assert [live_bytes(requests[: count + 1]) for count in range(len(requests))] == least
    assert [ours(requests[: count + 1])[1] for count in range(len(requests))] == least
