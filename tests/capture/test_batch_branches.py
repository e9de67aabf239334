"""A branch on the batch's numbers runs as in eager: what it decided is checked before each step."""

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from autotune.capture.fake.fake_workload import capture_on_fake_tensors
from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference


class Masked(nn.Module):
    """Model that skips its mask where it masks nothing, as libraries do for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, mask = batch
        hidden = self.first(inputs).tanh()
        if not torch.all(mask == 1):
            hidden = hidden * mask
        return self.last(hidden)


def make(kind: type[nn.Module] = Masked) -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, masked_batch(1))


def masked_batch(seed: int, *, padded: bool = False) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    mask = torch.ones(6, 1, dtype=torch.long)
    mask[3:] = 0 if padded else 1
    return torch.randn(6, 8, generator=drawn), mask


def test_batches_that_take_either_branch_have_eagers_bits_two_captures_and_a_warning_of_the_branch() -> None:
    planned, eager = make(), make()
    with (
        warnings.catch_warnings(record=True) as seen,
        TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch) as step,
    ):
        warnings.simplefilter("always")
        ops = {len(step.graph.ops)}
        for seed, padded in enumerate([False, True, True, False, True]):
            eager.batch = masked_batch(seed, padded=padded)
            assert torch.equal(step(masked_batch(seed, padded=padded)), eager_step(eager)[0])
            ops.add(len(step._selector.last.program.graph.ops))
        assert len(list(step._selector.cache)) == 2
    assert worst_difference(tensors(planned), tensors(eager)) == 0.0
    assert len(ops) == 2
    words = r"a condition on batch.1 changed: .* True; now it is False \(read at .*torch.all"
    assert any(re.search(words, str(one.message)) for one in seen)


class OnTwoMasks(Masked):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, mask = batch
        hidden = self.first(inputs)
        if mask[:3].all():
            hidden = hidden.tanh()
        return self.last(hidden if mask[3:].all() else hidden.sigmoid())


def test_each_combination_of_two_branches_is_captured_once_however_soon_it_comes() -> None:
    planned, eager = make(OnTwoMasks), make(OnTwoMasks)
    with (
        warnings.catch_warnings(),
        TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch) as step,
    ):
        warnings.simplefilter("ignore")
        for seed, (first, second) in enumerate([(1, 1), (0, 1), (1, 0), (0, 0), (1, 1), (1, 0)]):
            inputs, mask = masked_batch(seed)
            mask[:3], mask[3:] = first, second
            eager.batch = inputs, mask
            assert torch.equal(step((inputs, mask)), eager_step(eager)[0])
        assert len(list(step._selector.cache)) == 4
    assert worst_difference(tensors(planned), tensors(eager)) == 0.0


class OnWeights(Masked):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        return self.last(hidden.tanh() if hidden.sum() > 0 else hidden)


class OnDraws(Masked):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        return self.last(hidden.tanh() if (torch.rand_like(batch[0]) + batch[0]).sum() > 0 else hidden)


class OnWritten(Masked):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = batch[0].clone()
        inputs.add_(self.first.bias)
        return self.last(inputs.tanh() if inputs.sum() > 0 else inputs)


@pytest.mark.parametrize("kind", [OnWeights, OnDraws, OnWritten])
def test_a_branch_on_anything_but_the_batch_is_not_decided_by_the_first_batch(kind: type[nn.Module]) -> None:
    with pytest.raises(
        CaptureError, match=r"Python needs the values of a tensor.*test_batch_branches\.py:\d+ .*use torch\.where"
    ):
        capture(make(kind))


class Checked(Masked):
    """Model with a check of its own numbers, as torch's losses and distributions have."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        if torch.any(hidden > 1e3):
            raise ValueError(f"too large: {len(hidden)} rows")
        with torch.no_grad():
            if not (hidden > -1e3).all():
                raise ValueError("too small")
        return self.last(hidden)


def test_a_check_that_raises_has_eagers_bits_and_still_raises_with_its_line_before_any_update() -> None:
    planned, eager = make(Checked), make(Checked)
    with TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch) as step:
        for seed in range(2):
            eager.batch = masked_batch(seed)
            assert torch.equal(step(masked_batch(seed)), eager_step(eager)[0])
        assert len(step.graph.assertions) == 2
        before = {name: tensor.clone() for name, tensor in tensors(planned).items()}
        for sign in (1, -1):
            inputs, mask = masked_batch(3)
            with pytest.raises(RuntimeError, match=r"the step raised an error at .*branches\.py:\d+ \(if torch\.any"):
                step((sign * 1e6 * inputs, mask))
            assert worst_difference(tensors(planned), before) == 0.0


class Caught(Masked):
    """Model that goes on after the error of its own check."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        try:
            if torch.any(hidden > 1e3):
                raise ValueError("too large")
        except ValueError:
            hidden = hidden.tanh()
        return self.last(hidden)


def test_a_check_whose_error_is_caught_is_no_assertion() -> None:
    with pytest.raises(CaptureError, match=r"Python needs the values of a tensor.*\(if torch\.any"):
        capture(make(Caught))


class OnConstants(Masked):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        causal = torch.ones(4, 4).tril()
        hidden = self.first(batch[0])
        return self.last(hidden.tanh() if bool((causal.sum(1) == torch.arange(1.0, 5)).all()) else hidden)


def test_a_truth_value_of_constants_is_a_constant() -> None:
    planned, eager = make(OnConstants), make(OnConstants)
    with TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch) as step:
        for seed in range(2):
            eager.batch = masked_batch(seed)
            assert torch.equal(step(masked_batch(seed)), eager_step(eager)[0])
        assert len(list(step._selector.cache)) == 1


def test_a_mask_of_ones_in_a_library_runs_the_kernel_of_eager() -> None:
    from experiments.benchmarks.coverage.subjects import SUBJECTS

    subject = SUBJECTS["llama"]
    program = capture(subject.workload())
    calls = [
        call
        for call in program.calls
        if "scaled_dot_product" in str(call.target) and "backward" not in str(call.target)
    ]
    assert calls
    assert all(True in call.args for call in calls), "attention is causal by its flag, not by a mask"


def test_a_capture_on_fake_tensors_does_not_need_the_numbers_of_a_mask() -> None:
    from experiments.benchmarks.coverage.subjects import SUBJECTS

    assert capture_on_fake_tensors(SUBJECTS["llama"].workload, "llama").graph.ops
