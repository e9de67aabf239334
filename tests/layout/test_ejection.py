import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.layout import Buffers, check_layout, ejection, lay_out
from autotune.layout.ejection import find_layout
from tests.layout.test_exact import buffers, bytes_of, of
from tests.layout.test_layout import FOUR, fewest

PLENTY = 10**9


def cut(draw: random.Random, pieces: int) -> list[tuple[int, int, int]]:
    """Lives that fill a block of 2**20 bytes without a gap at any of 2,000 moments: it was cut into them."""
    parts = [(0, 2**20, 0, 2000)]
    while len(parts) < pieces:
        low, high, born, died = parts.pop(draw.randrange(len(parts)))
        if draw.random() < 0.5 and died - born > 1:
            cut_at = draw.randrange(born + 1, died)
            parts += [(low, high, born, cut_at), (low, high, cut_at, died)]
        elif high - low > 1:
            cut_at = draw.randrange(low + 1, high)
            parts += [(low, cut_at, born, died), (cut_at, high, born, died)]
        else:
            parts.append((low, high, born, died))
    return [(high - low, born, died) for low, high, born, died in parts]


@given(lives=st.lists(buffers, min_size=1, max_size=6))
@settings(max_examples=60)
def test_it_finds_the_optimum_of_six_buffers(lives):
    problem, least = of(lives), fewest(lives)
    assert bytes_of(find_layout(problem, least, PLENTY), problem) == least


@given(lives=st.lists(buffers, min_size=1, max_size=12), capacity=st.integers(0, 60))
@settings(max_examples=60)
def test_what_it_finds_is_a_layout_within_the_capacity(lives, capacity):
    problem = of(lives)
    offsets = find_layout(problem, capacity, 10**6)
    assert offsets is None or bytes_of(offsets, problem) <= capacity


def test_less_than_lives_at_once_is_not_looked_for():
    assert find_layout(of(FOUR), of(FOUR).max_live - 1, PLENTY) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_block_cut_into_150_pieces_is_put_together_with_5_percent_of_room(seed):
    problem = of(cut(random.Random(seed), 150))
    assert problem.max_live == 2**20
    capacity = int(1.05 * 2**20)
    assert bytes_of(find_layout(problem, capacity, PLENTY), problem) <= capacity


def test_of_a_block_cut_into_500_pieces_less_than_half_of_what_the_other_searches_waste_is_left(monkeypatch):
    problem = of(cut(random.Random(2), 500))
    ours = lay_out(problem)
    check_layout(problem, ours)
    monkeypatch.setattr(ejection, "find_layout", lambda *arguments: None)
    assert ours.gap < lay_out(problem).gap / 2


@given(st.lists(buffers, min_size=1, max_size=10), st.sampled_from((2, 8, 64)))
def test_offsets_are_aligned(lives, alignment):
    problem = of(lives, alignment)
    assert bytes_of(find_layout(problem, int(problem.sizes.sum()), PLENTY), problem) <= problem.sizes.sum()


def test_the_same_problem_gives_the_same_offsets():
    problem = of(cut(random.Random(5), 150))
    first, second = (find_layout(problem, int(1.05 * 2**20), PLENTY) for _ in range(2))
    assert first is not None
    assert np.array_equal(first, second)


def test_work_ends_it():
    assert find_layout(of(cut(random.Random(5), 150)), 2**20, 1000) is None


def test_more_pairs_than_memory_is_meant_for_are_not_searched(monkeypatch):
    problem = of(FOUR)
    assert find_layout(problem, 100, PLENTY) is not None
    monkeypatch.setattr(ejection, "_MOST_PAIRS", 1)
    assert find_layout(problem, 100, PLENTY) is None


def test_without_a_compiler_it_finds_nothing(monkeypatch):
    monkeypatch.setattr(ejection, "load_compiled", lambda: None)
    assert find_layout(of(FOUR), 100, PLENTY) is None


def test_nothing_needs_no_search():
    assert find_layout(Buffers.from_lives([], [], []), 100, PLENTY) is None
