"""The seconds of an op are those of the GPU: its launches, however slow, are no part of them."""

import pytest
import torch

from autotune.runtime.gpu.event_timing import describe_kernels, kernel_seconds
from autotune.runtime.gpu.index_values import spread_indices
from tests.support.fake_cuda import FakeCuda

aten = torch.ops.aten


@pytest.mark.parametrize("kernel", [3e-6, 40e-6, 5e-3])
def test_launches_that_take_longer_than_the_kernel_are_not_measured(
    kernel: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)

    def launch() -> None:
        cuda.advance_to(cuda.now + 20e-6)
        cuda.current_stream().run(kernel)

    assert kernel_seconds(launch, torch.device("cpu"), cuda) == pytest.approx(kernel, rel=0.02)


def test_a_kernel_of_seconds_runs_twice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, calls = FakeCuda(), []
    cuda.install(monkeypatch)
    kernel_seconds(lambda: calls.append(cuda.current_stream().run(1.0)), torch.device("cpu"), cuda)
    assert len(calls) == 2


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("target", "args", "rows"),
    [
        (aten.embedding.default, (torch.ones(50, 2), zeros(400)), 50),
        (aten.embedding_dense_backward.default, (torch.ones(400, 2), zeros(400), 50, -1, False), 50),
        (aten.nll_loss_forward.default, (torch.ones(400, 50), zeros(400), None, 1, -100), 50),
        (aten.scatter_add.default, (torch.ones(2, 50), 1, zeros(2, 200), torch.ones(2, 200)), 50),
        (aten.gather.default, (torch.ones(50, 2), -2, zeros(200, 2)), 50),
        (aten.index_select.default, (torch.ones(2, 50), 1, zeros(400)), 50),
        (aten.index.Tensor, (torch.ones(2, 50), [None, zeros(400)]), 50),
        (aten.index_put.default, (torch.ones(50), [zeros(400)], torch.ones(400), True), 50),
    ],
)
def test_synthetic_indices_spread_over_all_rows_and_the_op_takes_them(target, args, rows) -> None:  # type: ignore[no-untyped-def]
    spread_indices(target, args)
    flat = [part for argument in args for part in (argument if isinstance(argument, list) else [argument])]
    (index,) = (part for part in flat if isinstance(part, torch.Tensor) and part.dtype == torch.int64)
    assert len(index.unique()) > rows * 0.9
    target(*args)


def test_integers_that_choose_no_row_and_expanded_indices_stay_zero() -> None:
    numbers, index = zeros(40), zeros(1).expand(40)
    spread_indices(aten.add.Tensor, (numbers, 1))
    spread_indices(aten.embedding.default, (torch.ones(50, 2), index))
    assert not numbers.any()
    assert not index.any()


def test_costs_are_kept_apart_by_what_chooses_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe_kernels()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    assert describe_kernels() != before


def test_costs_of_another_driver_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe_kernels()
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12090, raising=False)
    assert describe_kernels() != before
