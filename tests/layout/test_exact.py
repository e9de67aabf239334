import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.layout import Buffers, Layout, check_layout, exact
from autotune.layout.exact import SearchEnd, find_layout, find_layout_in_python
from tests.layout.test_layout import FOUR, fewest

PLENTY = 10**9
SEARCHES = (find_layout, find_layout_in_python)

buffers = st.builds(
    lambda size, born, length: (size, born, born + length), st.integers(1, 9), st.integers(0, 8), st.integers(1, 6)
)


def of(lives, alignment=1):
    return Buffers.from_lives(*zip(*lives, strict=True), alignment=alignment)


def bytes_of(offsets, problem):
    layout = Layout(tuple(offsets.tolist()), int((offsets + problem.sizes).max()), problem.max_live)
    check_layout(problem, layout)
    return layout.bytes


@pytest.mark.parametrize("search", SEARCHES)
@given(lives=st.lists(buffers, min_size=1, max_size=6))
@settings(max_examples=60)
def test_it_finds_the_optimum_of_six_buffers_and_proves_that_a_byte_less_is_too_little(search, lives):
    problem, least = of(lives), fewest(lives)
    assert bytes_of(search(problem, least, PLENTY), problem) <= least
    assert search(problem, least - 1, PLENTY) is SearchEnd.INFEASIBLE


@pytest.mark.parametrize("search", SEARCHES)
def test_four_buffers_of_memongers_fit_9_bytes_and_not_8(search):
    assert bytes_of(search(of(FOUR), 9, PLENTY), of(FOUR)) == 9
    assert search(of(FOUR), 8, PLENTY) is SearchEnd.INFEASIBLE


@pytest.mark.parametrize("search", SEARCHES)
def test_a_gap_that_nothing_fills_is_proved(search):
    """Two thirds live at any moment, but whoever comes in the middle finds its 4 bytes in two pieces."""
    lives = ((2, 0, 4), (2, 2, 8), (4, 0, 2), (4, 4, 8), (3, 3, 5))
    least = fewest(lives)
    assert search(of(lives), least - 1, PLENTY) is SearchEnd.INFEASIBLE
    assert bytes_of(search(of(lives), least, PLENTY), of(lives)) == least


def test_compiled_and_python_say_the_same_of_forty_random_problems():
    draw = random.Random(1)
    for _ in range(40):
        lives = [(draw.randrange(1, 30), born, born + draw.randrange(1, 9)) for born in draw.choices(range(12), k=8)]
        problem = of(lives)
        for capacity in range(problem.max_live, problem.max_live + 12, 3):
            compiled, python = (search(problem, capacity, PLENTY) for search in SEARCHES)
            assert isinstance(compiled, SearchEnd) == isinstance(python, SearchEnd)


@given(st.lists(buffers, min_size=1, max_size=10), st.sampled_from((2, 8, 64)))
def test_offsets_are_aligned_and_within_the_capacity(lives, alignment):
    problem = of(lives, alignment)
    capacity = int(problem.sizes.sum())
    assert bytes_of(find_layout(problem, capacity, PLENTY), problem) <= capacity


def test_the_same_problem_gives_the_same_offsets():
    draw = random.Random(2)
    lives = [(draw.randrange(1, 50), born, born + draw.randrange(1, 30)) for born in draw.choices(range(100), k=120)]
    problem = of(lives)
    first, second = (find_layout(problem, int(1.02 * problem.max_live), PLENTY) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("search", SEARCHES)
def test_without_effort_it_says_that_it_did_not_look_long_enough(search):
    draw = random.Random(3)
    lives = [(draw.randrange(1, 50), born, born + draw.randrange(1, 30)) for born in draw.choices(range(100), k=150)]
    assert search(of(lives), of(lives).max_live, 1) is SearchEnd.OUT_OF_WORK


def test_too_many_buffers_for_python_are_left_to_the_greedy_layout():
    lives = [(1, moment, moment + 1) for moment in range(exact._MOST_IN_PYTHON + 1)]
    assert find_layout_in_python(of(lives), 1, PLENTY) is SearchEnd.OUT_OF_WORK
