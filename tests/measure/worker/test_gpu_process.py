"""A resting process leaves the GPU to the others, and has every bit back when it goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.measure.harness import Harness
from autotune.measure.worker.bench import Bench
from autotune.measure.worker.eager import EagerWorkload
from autotune.measure.worker.gpu_process import Parking


def test_parked_tensors_hold_no_memory_and_come_back_with_their_views_and_bits() -> None:
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]["exp_avg"]
    row, copies = model.weight.detach()[3], [model.weight.detach().clone(), state.clone()]
    parking = Parking()
    parking.park([model.weight, row, model.bias, state])
    assert [part.untyped_storage().nbytes() for part in (model.weight, model.bias, state)] == [0, 0, 0]
    parking.unpark()
    parking.unpark()
    assert torch.equal(model.weight, copies[0])
    assert torch.equal(state, copies[1])
    assert row.data_ptr() == model.weight.data_ptr() + 3 * 30 * 4
    assert torch.equal(row, copies[0][3])


def test_what_cannot_come_back_for_want_of_memory_comes_back_at_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [torch.arange(10.0), torch.arange(10.0, 20.0)]
    parking = Parking()
    parking.park(tensors)
    resize = torch.UntypedStorage.resize_
    attempts = []

    def refuse_second(storage: torch.UntypedStorage, nbytes: int) -> Any:
        attempts.append(nbytes)
        if len(attempts) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse_second)
    with pytest.raises(torch.OutOfMemoryError):
        parking.unpark()
    parking.unpark()
    assert torch.equal(torch.cat(tensors), torch.arange(20.0))


@pytest.mark.parametrize(("kind", "nbytes"), [("cuda", 512 + 1024), ("cpu", 400 + 516)])
def test_static_tensors_count_as_the_allocator_of_the_device_does(kind: str, nbytes: int) -> None:
    """They are subtracted from the allocator's count to find the floor, and the graph counts them alike."""
    tensors = [torch.zeros(100), torch.zeros(129)]
    worker: Any = SimpleNamespace(
        _spec=SimpleNamespace(device_kind=kind),
        _state_tensors=lambda: tensors,
        batch=lambda: [tensors[1][3:]],
        _on_device=list,
    )
    assert EagerWorkload.static_bytes(worker) == nbytes


def test_a_process_keeps_its_tensors_between_requests_where_it_is_told_to() -> None:
    tensor, limits = torch.ones(8), []
    gpu = SimpleNamespace(parking=Parking(), limit=limits.append)
    worker: Any = SimpleNamespace(
        _gpu=gpu,
        _spec=SimpleNamespace(limit_bytes=2**30),
        _eager=SimpleNamespace(static_tensors=lambda: [tensor]),
        _plans=SimpleNamespace(captured_tensors=list),
    )
    sizes = []
    for parks in (False, True):
        with Bench.awake(worker, parks=parks):
            assert tensor.sum() == 8
        sizes.append(tensor.untyped_storage().nbytes())
    assert sizes == [32, 0]
    assert limits == [2**30] * 2


@pytest.mark.parametrize(("free_bytes", "keeps"), [(None, False), (300, False), (301, True)])
def test_processes_keep_memory_on_a_gpu_that_has_three_times_as_much_as_eager_needs(
    free_bytes: int | None, keeps: bool
) -> None:
    harness: Any = SimpleNamespace(_spec=SimpleNamespace(device_kind="cuda"), _free_bytes=free_bytes)
    assert Harness._can_keep_memory(harness, 100) is keeps
    assert Harness._can_keep_memory(harness, None) is False
