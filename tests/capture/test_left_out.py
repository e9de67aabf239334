"""What a trace cannot repeat is refused, or the step has eager's bits; nothing is left out in silence."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.capture.fake.eager_bytes import count_eager_bytes
from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.small import make

NEEDS_VALUES = "Python needs the values of a tensor"
"""Refusal of a read that has no value in a captured step."""


class Net(nn.Module):
    """A layer, a buffer, and a forward that a test replaces."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(8, 8), run
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(self, inputs)


def net(run: Callable[[Net, Tensor], Tensor]) -> Workload:
    return make(lambda: Net(run), loss_fn=lambda model, batch: model(batch[0]).square().mean())


def losses(run: Callable[[Net, Tensor], Tensor], steps: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses of eager and of the captured step, from one state and with the same random numbers."""
    eager, planned = net(run), net(run)
    step = TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch)
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number in range(steps):
        torch.manual_seed(number)
        eager.optimizer.zero_grad()
        loss = eager.loss_fn(eager.model, eager.batch)
        loss.backward()
        eager.optimizer.step()
        seen[0].append(loss.detach())
        torch.manual_seed(number)
        seen[1].append(step(planned.batch))
    return seen


def refuse(run: Callable[[Net, Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(net(run))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample(),
        lambda: torch.distributions.Gamma(torch.tensor(1.0), torch.tensor(1.0)).sample(),
        lambda: torch.distributions.Binomial(torch.tensor(9.0), torch.tensor(0.5)).sample(),
        lambda: torch.distributions.Dirichlet(torch.ones(3)).sample()[0],
    ],
    ids=["Beta", "Gamma", "Binomial", "Dirichlet"],
)
@pytest.mark.parametrize("reads", ["number", "branch"])
def test_a_draw_that_python_reads_is_no_constant(draw: Callable[[], Tensor], reads: str) -> None:
    def number(model: Net, inputs: Tensor) -> Tensor:
        return model.layer(inputs) * draw().item()

    def branch(model: Net, inputs: Tensor) -> Tensor:
        return model.layer(inputs) if draw() > 0.5 else model.layer(inputs).tanh()

    refuse({"number": number, "branch": branch}[reads], NEEDS_VALUES)


def test_seeding_within_the_step_is_refused_by_name() -> None:
    def seeded(model: Net, inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(model.layer(inputs))

    def forked(model: Net, inputs: Tensor) -> Tensor:
        with torch.random.fork_rng():
            noise = torch.randn(8)
        return model.layer(inputs) + noise

    def seeded_generator(model: Net, inputs: Tensor) -> Tensor:
        torch.default_generator.manual_seed(5)
        return F.dropout(model.layer(inputs))

    refuse(seeded, r"calls torch\.manual_seed at .*torch\.manual_seed\(5\)")
    refuse(seeded_generator, r"seeds torch\.default_generator")
    refuse(forked, r"calls torch\.fork_rng")


def test_data_that_is_assigned_within_the_step_is_refused() -> None:
    def normalized(model: Net, inputs: Tensor) -> Tensor:
        model.layer.weight.data = F.normalize(model.layer.weight.data, dim=1)
        return model.layer(inputs)

    def averaged(model: Net, inputs: Tensor) -> Tensor:
        model.seen.data = 0.9 * model.seen.data + 0.1 * inputs.mean(0)
        return model.layer(inputs - model.seen)

    for run in (normalized, averaged):
        refuse(run, r"assigns the \.data of a parameter or a buffer")


def relu(inputs: Tensor) -> Tensor:
    kept = inputs.clone()
    F.relu(kept, inplace=True)
    return (kept < 0).any()


def clamp(inputs: Tensor) -> Tensor:
    kept = inputs.clone()
    torch.clamp(inputs, min=0, out=kept)
    return (kept < 0).any()


def hardtanh(inputs: Tensor) -> Tensor:
    kept = inputs.clone()
    F.hardtanh(kept, -1e-3, 1e-3, True)
    return (kept > 0.5).any()


def ior(inputs: Tensor) -> Tensor:
    kept = inputs > 10
    row = kept[0]
    row |= inputs[0] > -10
    return kept.any()


def itruediv(inputs: Tensor) -> Tensor:
    kept = inputs.clone()
    row = kept[0]
    row /= 1e9
    return (kept[0].abs() > 1e-3).any()


@pytest.mark.parametrize("condition", [relu, clamp, hardtanh, ior, itruediv])
def test_a_branch_behind_a_write_is_not_decided_without_the_write(condition: Callable[[Tensor], Tensor]) -> None:
    def branching(model: Net, inputs: Tensor) -> Tensor:
        return model.layer(inputs * 2 if condition(inputs) else inputs)

    refuse(branching, NEEDS_VALUES)


@pytest.mark.parametrize(
    "part",
    [lambda noise: noise[:, 2:6], lambda noise: noise[:, :20], lambda noise: noise.t()[3:9], lambda noise: noise[1:3]],
    ids=["columns", "many columns", "transposed", "rows"],
)
def test_normal_numbers_for_a_part_of_a_tensor_are_eagers(part: Callable[[Tensor], Tensor]) -> None:
    def noisy(model: Net, inputs: Tensor) -> Tensor:
        noise = torch.zeros(len(inputs), 32)
        part(noise).normal_(0.5, 2.0)
        return model.layer(inputs) + noise.sum()

    eager, planned = losses(noisy)
    assert all(map(torch.equal, eager, planned))


def test_functions_for_what_is_saved_for_backward_are_refused() -> None:
    def halved(model: Net, inputs: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept * 0.5):
            return torch.sigmoid(model.layer(inputs))

    refuse(halved, "saved_tensors_hooks")


@pytest.mark.filterwarnings("ignore")
def test_a_counter_beside_a_value_in_one_container_leaves_the_value_guarded() -> None:
    def counted(model: Net, inputs: Tensor) -> Tensor:
        settings["calls"] += 1
        return model.layer(inputs) * settings["scale"]

    settings = {"calls": 0, "scale": 1.0}
    workload = net(counted)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    step(workload.batch)
    settings["scale"] = 3.0
    expected = workload.loss_fn(workload.model, workload.batch).detach()
    assert torch.equal(step(workload.batch), expected)


def counts(model: Net, inputs: Tensor) -> Tensor:
    model.seen += 1
    return model.layer(inputs)


def sets(model: Net, inputs: Tensor) -> Tensor:
    model.seen[0] = inputs.detach().mean()
    return model.layer(inputs)


def writes_a_view(model: Net, inputs: Tensor) -> Tensor:
    model.seen[1:3].add_(1)
    return model.layer(inputs)


@pytest.mark.parametrize("block", [counts, sets, writes_a_view])
def test_a_checkpoint_that_writes_is_refused_however_it_writes(block: Callable[[Net, Tensor], Tensor]) -> None:
    def checkpointed(model: Net, inputs: Tensor) -> Tensor:
        return checkpoint(block, model, inputs, use_reentrant=False)

    refuse(checkpointed, "a checkpoint contains .*which changes a buffer")


def test_a_checkpoint_that_writes_within_another_is_refused() -> None:
    def inner(model: Net, inputs: Tensor) -> Tensor:
        return checkpoint(writes_a_view, model, inputs, use_reentrant=False)

    def outer(model: Net, inputs: Tensor) -> Tensor:
        return checkpoint(inner, model, inputs, use_reentrant=False)

    refuse(outer, "a checkpoint contains .*which changes a buffer")


def test_a_checkpoint_that_draws_anew_is_refused() -> None:
    def dropped(model: Net, inputs: Tensor) -> Tensor:
        return checkpoint(
            lambda inner: F.dropout(model.layer(inner)), inputs, use_reentrant=False, preserve_rng_state=False
        )

    refuse(dropped, "preserve_rng_state")


def test_an_iterator_is_refused_by_name() -> None:
    scales = itertools.cycle([1.0, 2.0])

    def cycled(model: Net, inputs: Tensor) -> Tensor:
        return model.layer(inputs) * next(scales)

    refuse(cycled, "scales is an iterator")


@dataclass
class Images:
    """A batch that is an object."""

    images: Tensor


def test_eagers_bytes_hold_a_batch_in_an_object() -> None:
    def counted(batch: Any, read: Callable[[Any], Tensor]) -> int:
        model = nn.Linear(1000, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return count_eager_bytes(Workload(model, lambda model, batch: model(read(batch)).sum(), optimizer, batch))

    images = torch.randn(100, 1000)
    plain = counted(images, lambda batch: batch)
    assert counted(Images(images), lambda batch: batch.images) == plain >= images.nbytes
