"""Tensor bytes of eager steps, counted on fake tensors."""

import pytest
import torch

from autotune.capture.fake.eager_bytes import LiveBytesCounter, count_eager_bytes
from autotune.capture.fake.fake_workload import fake_tensors
from autotune.workloads.workload import Workload

WIDTH, ROWS = 64, 512
ACTIVATION = ROWS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


def sum_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def layers(make_optimizer, depth: int = 4) -> Workload:
    parts = [part for _ in range(depth) for part in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh())]
    model = torch.nn.Sequential(*parts)
    return Workload(model, sum_loss, make_optimizer(model.parameters()), torch.ones(ROWS, WIDTH))


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def momentum(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make_optimizer", [adam, momentum])
def test_fake_tensors_count_the_bytes_of_real_ones(make_optimizer):
    with fake_tensors():
        fake = count_eager_bytes(layers(make_optimizer))
    assert fake == count_eager_bytes(layers(make_optimizer))


def test_the_peak_is_what_a_hand_count_gives():
    with fake_tensors():
        counted = count_eager_bytes(layers(momentum))
    # four weights with momentum; the batch, three saved results of tanh, the gradient of the last layer's result and of its
    # input; that layer's weight gradient; the loss and its gradient
    assert counted == 8 * WEIGHT + 6 * ACTIVATION + WEIGHT + 2 * 4


def test_nothing_of_a_large_model_is_allocated():
    with fake_tensors():
        model = torch.nn.Linear(2**17, 2**17, bias=False)
        workload = Workload(model, sum_loss, torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 2**17))
        assert count_eager_bytes(workload) > 2 * 2**36


def test_a_cast_of_the_model_halves_its_bytes_and_shared_weights_stay_shared():
    with fake_tensors():
        first, second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        model = torch.nn.Sequential(first, second).to(torch.bfloat16)
    assert first.weight is second.weight
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == (WEIGHT + 2 * WIDTH * 4) // 2


def test_an_inference_step_has_no_gradients():
    with fake_tensors():
        counted = count_eager_bytes(Workload(torch.nn.Linear(WIDTH, WIDTH, bias=False), batch=torch.ones(ROWS, WIDTH)))
    assert counted == WEIGHT + 2 * ACTIVATION


def test_views_and_freed_tensors_are_not_counted_twice():
    with LiveBytesCounter() as counter:
        x = torch.ones(1024)
        y = x.view(32, 32)
        del x
        live = counter.live_bytes
        del y
    assert (live, counter.live_bytes, counter.peak_bytes) == (4096, 0, 4096)


def test_of_a_batch_that_is_a_slice_of_a_data_set_the_slice_is_counted():
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    data = torch.ones(100 * ROWS, WIDTH)
    copied, sliced = (Workload(model, batch=batch) for batch in (data[:ROWS].clone(), data[ROWS : 2 * ROWS]))
    assert count_eager_bytes(sliced) == count_eager_bytes(copied) == WEIGHT + 2 * ACTIVATION
