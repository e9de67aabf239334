"""The numerical gate is relative to each tensor's own rounding error, and nothing else passes it."""

import math

import pytest
import torch

from autotune.runtime.verification import gates

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INF, NAN = math.inf, math.nan


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape or (50,), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def admitted(actual: torch.Tensor, eager: torch.Tensor, witness: torch.Tensor, center: str = "float64") -> float:
    bound = gates.bound(eager, {"float64": witness}, center)
    return gates.error_share(actual, witness if bound.center else eager, bound.admitted)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-20, 1.0, 2.0**20])
@pytest.mark.parametrize("seed", range(5))
def test_the_error_does_not_depend_on_the_scale_of_a_tensor(scale: float, seed: int) -> None:
    exact = drawn(seed, dtype=torch.float64)
    eager, actual = exact.float(), exact.float() * (1 + 3e-6)
    expected = admitted(actual, eager, exact)
    assert admitted(actual * scale, eager * scale, exact * scale) == pytest.approx(expected, rel=1e-6)
    assert 0 < expected < math.inf


@pytest.mark.parametrize("seed", range(5))
def test_a_gradient_wrong_by_a_thousandth_is_refused_however_near_eager_may_lie(seed: int) -> None:
    exact = drawn(seed, dtype=torch.float64)
    # the worst eager that still counts as the same computation
    eager = (exact * (1 + gates.witness_distance(torch.finfo(torch.float32).eps))).float()
    for center in ("float64", ""):
        assert admitted(eager * 1.001, eager, exact, center) > 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_one_more_rounding_of_any_dtype_is_admitted(dtype: torch.dtype, seed: int) -> None:
    exact = drawn(seed, dtype=torch.float64)
    eager = exact.to(dtype)
    actual = eager * (1 + torch.finfo(dtype).eps)
    assert 0 < admitted(actual, eager, exact) < 1.0
    assert gates.error_share(actual, eager, gates.strict_bound(eager).admitted) < 1.0


def test_eagers_own_error_admits_four_times_as_much_and_no_more() -> None:
    exact = torch.ones(10, dtype=torch.float64)
    eager = (exact * (1 + 1e-3)).float()
    assert admitted((exact * (1 - 3.9e-3)).float(), eager, exact) < 1.0
    assert admitted((exact * (1 - 4.1e-3)).float(), eager, exact) > 1.0


def test_a_value_that_is_not_finite_is_admitted_only_where_eagers_is_the_same() -> None:
    eager = torch.tensor([1.0, INF, -INF, NAN])
    for value in (INF, NAN):
        assert admitted(torch.tensor([value, INF, -INF, NAN]), eager, eager.double()) == INF
    for place, other in ((1, 1.0), (1, -INF), (1, NAN), (2, 0.0), (3, 0.0)):
        actual = eager.clone()
        actual[place] = other
        assert admitted(actual, eager, eager.double()) == INF
    actual = eager.clone()
    actual[0] += 2**-23
    assert 0 < admitted(actual, eager, eager.double()) < 1.0


def test_where_eager_overflows_and_float64_does_not_eager_says_what_is_right() -> None:
    eager, exact = torch.tensor([1.0, INF]), torch.tensor([1.0, 1e300], dtype=torch.float64)
    assert gates.bound(eager, {"float64": exact}, "float64").center == ""
    assert admitted(eager.clone(), eager, exact) == 0.0
    assert admitted(torch.tensor([1.0, 1e30]), eager, exact) == INF


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    eager = torch.tensor([0, 1, 1]).to(dtype)
    other = torch.tensor([0, 1, 0]).to(dtype)
    assert admitted(eager.clone(), eager, other) == 0.0
    assert admitted(other, eager, other) == INF


def test_shapes_must_be_equal() -> None:
    assert gates.difference(torch.zeros(3), torch.zeros(3, 1)) == INF
    assert gates.difference(torch.zeros(3), torch.zeros(3, dtype=torch.int64)) == INF


def test_an_empty_and_a_complex_tensor_are_compared_too() -> None:
    empty = torch.empty(0)
    assert admitted(empty, empty, empty.double()) == 0.0
    whole = torch.complex(drawn(1), drawn(2))
    assert 0 < admitted(whole * (1 + 1e-7), whole, whole.to(torch.complex128)) < 1.0
    assert admitted(whole * 1.001, whole, whole.to(torch.complex128)) > 1.0


def test_a_witness_that_computes_something_else_is_found_by_name() -> None:
    loss, weight = torch.tensor(0.5), drawn(1)
    tiny = drawn(2) * 1e-9  # all rounding: its true value is 0
    same = {"weight": (weight, weight.double() * (1 + 1e-7)), "bias": (tiny, torch.zeros(50, dtype=torch.float64))}
    assert gates.name_mismatch({"loss": (loss, loss.double())}, same) == ""
    assert gates.name_mismatch({"loss": (loss, loss.double() * 1.01)}, same) == "loss"
    assert gates.name_mismatch({}, same | {"weight": (weight, weight.double() * 1.01)}) == "weight"
    assert gates.name_mismatch({}, {"bias": same["bias"]}) == "bias"  # beside no larger gradient it does not vanish


def test_after_an_update_as_much_more_is_admitted_as_the_gradients_error_explains() -> None:
    eager = drawn(1)
    moved = eager.clone()
    moved[3] += 0.01
    alone, explained = (gates.bound(eager, {}, "", carried) for carried in (None, moved))
    assert explained.admitted == pytest.approx(alone.admitted + 0.01, rel=1e-4)


def test_a_gradient_moves_towards_zero_and_through_it_where_it_is_small() -> None:
    moved = gates.move_towards_zero(torch.tensor([1.0, -1.0, 0.25, 0.0]), 0.5)
    assert moved.tolist() == [0.5, -0.5, -0.25, 0.0]


def test_of_refused_tensors_the_earliest_is_named_and_else_the_largest() -> None:
    stages = ("step 0.", "step 1.")
    shares = {"step 0.result 0": 0.0, "step 0.gradient w": 3.0, "step 1.result 0": 7.0, "state.w": 9.0}
    assert gates.worst_tensor(shares, stages) == "step 0.gradient w"
    assert gates.worst_tensor({"step 0.result 0": 0.2, "state.w": 0.9}, stages) == "state.w"
    assert gates.worst_tensor({"step 1.result 0": math.nan, "state.w": 9.0}, stages) == "step 1.result 0"
