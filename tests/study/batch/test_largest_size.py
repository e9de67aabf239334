"""Search for the largest size: exact where bytes rise, and never past a size that fits and was tried."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autotune.records.measurement import Outcome
from autotune.study.batch.candidates import find_largest_measured
from autotune.study.batch.largest_size import find_largest_size
from autotune.study.batch.records import SideResult

CAP = 60
RISES = st.lists(st.integers(0, 50), min_size=CAP, max_size=CAP)
BYTES = st.lists(st.integers(1, 400), min_size=CAP, max_size=CAP)


def largest_by_brute_force(sizes: list[int], budget: int) -> int:
    return max((size for size, nbytes in enumerate(sizes, start=1) if nbytes <= budget), default=0)


@given(RISES, st.integers(0, 1500), st.integers(1, CAP))
def test_the_result_is_the_largest_size_of_all_where_bytes_rise(rises: list[int], budget: int, start: int):
    sizes = list(itertools.accumulate(rises))
    result = find_largest_size(lambda size: sizes[size - 1], budget, start=start, cap=CAP)
    assert result == largest_by_brute_force(sizes, budget)


@given(BYTES, st.integers(1, 400), st.integers(1, CAP))
def test_where_bytes_fall_in_places_no_size_up_to_twice_the_result_fits(sizes: list[int], budget: int, start: int):
    result = find_largest_size(lambda size: sizes[size - 1], budget, start=start, cap=CAP, probes=CAP)
    assert result == 0 or sizes[result - 1] <= budget
    assert all(sizes[size - 1] > budget for size in range(result + 1, min(2 * result, CAP) + 1))


@given(BYTES, st.integers(1, 400), st.integers(1, CAP), st.integers(0, 8))
def test_the_result_fits_and_the_next_size_does_not_with_any_number_of_probes(
    sizes: list[int], budget: int, start: int, probes: int
):
    asked: list[int] = []

    def bytes_at(size: int) -> int:
        asked.append(size)
        return sizes[size - 1]

    result = find_largest_size(bytes_at, budget, start=start, cap=CAP, probes=probes)
    assert result == 0 or sizes[result - 1] <= budget
    assert result == CAP or sizes[result] > budget
    assert len(asked) == len(set(asked)), "a size is asked for once"
    assert all(sizes[size - 1] > budget for size in asked if size > result), "a tried size that fits is not passed over"


def test_a_line_needs_few_evaluations_even_far_from_the_start():
    asked: list[int] = []

    def bytes_at(size: int) -> int:
        asked.append(size)
        return 1000 + 37 * size

    assert find_largest_size(bytes_at, 1000 + 37 * 123_456, start=8, cap=2**20) == 123_456
    assert len(asked) <= 24


def test_a_dip_below_the_budget_beyond_the_first_crossing_is_taken():
    """Kernels for multiples of eight may need less than the sizes before them."""

    def bytes_at(size: int) -> int:
        return 100 * size if size % 8 else 70 * size

    assert find_largest_size(bytes_at, 5700, start=10, cap=1000) == 57
    assert find_largest_size(bytes_at, 5700, start=10, cap=1000, probes=64) == 80


@given(st.integers(1, 200), st.floats(1.0, 1.4), st.integers(100, 20_000), st.integers(1, 250), st.booleans())
def test_measuring_ends_between_a_size_that_fits_and_one_that_does_not(
    slope: int, overhead: float, budget: int, first: int, killed: bool
):
    """Measured bytes exceed the predicted ones by an unknown factor, and a killed process tells nothing of its bytes."""
    predicted = lambda size: 50 + slope * size  # noqa: E731
    charge = lambda size: int(predicted(size) * overhead)  # noqa: E731
    low = next((size for size in (30, 3) if charge(size) <= budget), 0)
    high = next(size for size in itertools.count(low + 1) if predicted(size) > budget)
    measured: dict[int, bool] = {}

    def measure(size: int) -> SideResult:
        assert size not in measured
        measured[size] = charge(size) <= budget
        outcome = Outcome.OK if measured[size] else Outcome.OUT_OF_MEMORY if killed else Outcome.OVER_BUDGET
        known = None if outcome is Outcome.OUT_OF_MEMORY else charge(size)
        return SideResult(outcome, known)

    result, refused = find_largest_measured(measure, predicted, budget, low=low, high=high, first=first)
    largest = max((size for size in range(1, high) if charge(size) <= budget), default=0)
    assert result <= largest
    assert largest < refused or predicted(refused) > budget
    assert largest - result <= max(1, int(0.02 * result))
    assert result == low or measured[result]
    assert len(measured) <= 40


def test_a_size_at_which_no_plan_is_valid_is_halved_towards_the_last_that_fits():
    predicted = lambda size: float(size) if size < 50 else float("inf")  # noqa: E731

    def measure(size: int) -> SideResult:
        return SideResult(Outcome.OK if size <= 20 else Outcome.OVER_BUDGET, 5 * size)

    low, high = find_largest_measured(measure, predicted, 100, low=1, high=90, first=80)
    assert (low, high) == (20, 21)


def test_measuring_stops_when_no_time_is_left():
    assert find_largest_measured(lambda size: None, float, 100, low=7, high=90, first=50) == (7, 90)


def test_sizes_that_the_workload_refuses_are_not_measured_and_hide_no_larger_size():
    measured: list[int] = []

    def measure(size: int) -> SideResult:
        measured.append(size)
        return SideResult(Outcome.OK if size <= 42 else Outcome.OVER_BUDGET, 10 * size)

    low, high = find_largest_measured(
        measure, lambda size: 10.0 * size, 420, low=6, high=61, first=60, accept=lambda size: size - size % 6
    )
    assert (low, high) == (42, 48)
    assert measured == [60, 42, 48]
