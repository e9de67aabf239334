"""Branches on numbers of the batch, of constants and of buffers are those of eager, in a step recorded on fake tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.capture.tracer import capture
from autotune.capture.values.batch_values import BatchValues
from autotune.capture.values.constant_values import ConstantValues
from autotune.errors import CaptureError
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import assert_equals_eager, eager_step, tensors, worst_difference

LABELS = torch.tensor([0, 1, 2, 3, 1, 2])
Branch = Callable[[nn.Module, Tensor], Tensor]


def compare_item(model: nn.Module, inputs: Tensor) -> Tensor:
    assert inputs.abs().max().item() <= 10
    return model(inputs) if (inputs > 0).sum().item() > 3 else model(-inputs)


def decide_by_all(model: nn.Module, inputs: Tensor) -> Tensor:
    mask = inputs[:, 0] > 0
    return model(inputs) if mask.all() else model(inputs * mask[:, None])


def decide_by_part(model: nn.Module, inputs: Tensor) -> Tensor:
    largest, _ = inputs.max(1)
    return model(inputs).tanh() if bool((largest > 0).all()) else model(inputs)


BRANCHES: tuple[Branch, ...] = (compare_item, decide_by_all, decide_by_part)


def make(branch: Branch, inputs: Tensor | None = None) -> Workload:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    batch = torch.ones(6, 8) if inputs is None else inputs

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(branch(model, batch), LABELS)

    return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def record(workload: Workload) -> Any:
    return capture(workload, way="recorded")


def parts_of_a_mask(model: nn.Module, inputs: Tensor) -> Tensor:
    mask = torch.ones(2, 4)
    left, right = mask.chunk(2)
    left.zero_()
    right.zero_()
    return model(inputs).exp() if mask.any() else model(inputs)


def rows_of_a_mask(model: nn.Module, inputs: Tensor) -> Tensor:
    mask = torch.ones(2, 4)
    for row in mask:
        row.neg_()
    return model(inputs) * float(mask.sum())


def a_mask_viewed_as_an_unknown_value(model: nn.Module, inputs: Tensor) -> Tensor:
    mask = torch.ones(4, 8)
    mask.view_as(model.weight).zero_()
    return model(inputs).exp() if mask.any() else model(inputs)


def an_op_by_its_full_name(model: nn.Module, inputs: Tensor) -> Tensor:
    copy = inputs.clone()
    torch.ops.aten.neg_.default(copy)
    return model(inputs).exp() if copy.sum() > 0 else model(inputs)


@pytest.mark.parametrize(
    "branch", [parts_of_a_mask, rows_of_a_mask, a_mask_viewed_as_an_unknown_value, an_op_by_its_full_name]
)
def test_a_value_that_changes_in_place_is_never_read_as_it_was(branch: Branch):
    workload, twin = make(branch), make(branch)
    try:
        record(workload)
    except CaptureError:
        assert branch not in (parts_of_a_mask, rows_of_a_mask)  # a refusal of the others is no wrong result
        return
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        for _ in range(2):
            assert torch.equal(step(workload.batch), eager_step(twin)[0])


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_of_the_batch_is_a_condition_of_the_recorded_step(branch: Branch):
    workload = make(branch)
    guards = record(workload).guards
    assert guards.hold([torch.ones(6, 8) * 2], [])
    assert not guards.hold([-torch.ones(6, 8)], [])
    failure = guards.first_failure([-torch.ones(6, 8)], [])
    assert failure is not None
    assert branch.__name__ not in failure.name
    assert "batch.0" in failure.name
    assert "test_batch_values.py" in failure.line


def in_numpy(model: nn.Module, inputs: Tensor) -> Tensor:
    """Branch in a step that Dynamo cannot trace."""
    import inspect

    assert inspect.currentframe() is not None
    return decide_by_all(model, inputs)


def test_each_batch_takes_the_branch_that_it_takes_in_eager():
    one, other = make(in_numpy), make(in_numpy)
    assert one.loss_fn is not None
    assert one.optimizer is not None
    with TrainStep(one.model, one.loss_fn, one.optimizer, one.batch) as step:
        for sign in (1, -1, 1, -1):
            other.batch = torch.ones(6, 8) * sign
            assert torch.equal(step(other.batch), eager_step(other)[0])
    assert worst_difference(tensors(one), tensors(other)) == 0.0


def scale_by_item(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs * (1 / inputs.abs().max().item()))


def fill_by_item(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(torch.full((6, 8), inputs.sum().item()))


def compare_items(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs) if inputs.sum().item() > inputs.max().item() else model(-inputs)


@pytest.mark.parametrize("branch", [scale_by_item, fill_by_item, compare_items])
def test_a_number_of_the_batch_that_is_more_than_compared_is_refused_with_its_line(branch: Branch):
    with pytest.raises(
        CaptureError, match=r"Python needs the values of a tensor.*test_batch_values\.py:\d+ \(return .*torch\.where"
    ):
        record(make(branch))


def add_in_place(model: nn.Module, inputs: Tensor) -> Tensor:
    total = torch.zeros(())
    total += model(inputs).sum()
    return model(inputs) if total > 0 else model(-inputs)


def write_out(model: nn.Module, inputs: Tensor) -> Tensor:
    total = torch.zeros(())
    torch.mul(model(inputs).detach().sum(), 1.0, out=total)
    return model(inputs) if total > 0 else model(-inputs)


def draw_in_place(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs) if torch.zeros(()).uniform_() > 0.5 else model(-inputs)


def write_to_a_view(model: nn.Module, inputs: Tensor) -> Tensor:
    copy = inputs.clone()
    copy[0] += model(inputs).detach().sum()
    return model(inputs) if copy.sum() > 0 else model(-inputs)


def relu_in_place(model: nn.Module, inputs: Tensor) -> Tensor:
    ones = torch.full((4,), 1.0)
    ones[1:] = model(inputs).detach()[0, 1:]
    F.relu(ones, inplace=True)
    return model(inputs) if ones.sum() > 1 else model(-inputs)


@pytest.mark.parametrize("branch", [add_in_place, write_out, draw_in_place, write_to_a_view, relu_in_place])
def test_a_tensor_that_unknown_numbers_are_written_to_decides_no_branch(branch: Branch):
    with pytest.raises(CaptureError, match="Python needs the values of a tensor"):
        record(make(branch))


def make_squared(kind: type[nn.Module]) -> Workload:
    """Make a model whose loss is the mean square of its output."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(6, 8))


class Started(nn.Module):
    """Layer that sets its scale in the first step, as activation norms do."""

    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("started", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        if self.started.item() == 0:
            with torch.no_grad():
                self.scale.copy_(1 / (hidden.std(0) + 1))
                self.started.fill_(1)
        return hidden * self.scale


def test_a_buffer_that_marks_the_first_step_decides_each_step_as_in_eager():
    assert_equals_eager(make_squared(Started), make_squared(Started), steps=4)


class Warm(nn.Module):
    """Model with flags where nothing registers them: an attribute, and an item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.warm, self.flags = torch.tensor(True), [torch.tensor(True)]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        hidden = hidden * 2 if bool(self.warm) else hidden
        return hidden + 1 if bool(self.flags[0]) else hidden

    def replace_flags(self, turn: int) -> None:
        """Put other tensors in their places."""
        self.warm, self.flags[0] = torch.tensor(turn not in (2, 3)), torch.tensor(True)


def test_a_branch_on_a_tensor_from_outside_reads_the_one_that_is_now_in_its_place():
    planned, eager = make_squared(Warm), make_squared(Warm)
    with TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch) as step:
        for turn in range(6):
            planned.model.replace_flags(turn)
            eager.model.replace_flags(turn)
            assert torch.equal(step(planned.batch), eager_step(eager)[0])


@pytest.mark.parametrize(("reduction", "as_tensors"), [("mean", True), ("sum", False), ("none", True)])
def test_a_ctc_loss_with_constant_lengths_equals_eager(reduction: str, as_tensors: bool):
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        lengths: tuple[Any, Any] = ([7, 5, 7], [2, 3, 1])
        if as_tensors:
            lengths = torch.tensor(lengths[0]), torch.tensor(lengths[1])
        scores = model(inputs).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, labels, *lengths, reduction=reduction, zero_infinity=reduction == "sum")
        return loss.sum() if reduction == "none" else loss

    def make_spoken() -> Workload:
        torch.manual_seed(0)
        model = nn.Linear(8, 5)
        batch = torch.randn(3, 7, 8), torch.randint(1, 5, (3, 3))
        return Workload(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=0.1), batch)

    assert_equals_eager(make_spoken(), make_spoken(), steps=3)


def test_a_checkpoint_in_a_recorded_step_runs_its_layers_again_with_the_same_dropout():
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh())

        def forward(self, inputs: Tensor) -> Tensor:
            import inspect

            assert inspect.currentframe() is not None
            hidden: Tensor = checkpoint(
                lambda x, factor: self.block(x) * factor, self.first(inputs), 0.5, use_reentrant=False
            )
            return hidden

    def make_blocks() -> Workload:
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(6, 8))

    assert record(make_blocks()).recorded
    assert_equals_eager(make_blocks(), make_blocks(), steps=3)


def test_statistics_that_a_norm_of_this_step_has_changed_decide_no_branch():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.norm(inputs)
            return hidden if bool(self.norm.running_mean.sum() > 0) else -hidden

    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.ones(6, 8))
    with pytest.raises(CaptureError, match="Python needs the values of a tensor"):
        record(workload)


def test_a_checkpoint_that_changes_a_buffer_is_refused_in_a_recorded_step():
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(self.norm, self.first(inputs), use_reentrant=False)
            return hidden

    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(6, 8))
    with pytest.raises(CaptureError, match=r"a checkpoint contains .*which changes a buffer: eager changes it again"):
        record(workload)


def test_a_step_with_a_backward_pass_of_its_own_is_refused_with_its_line():
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch).mean().backward()
        return model(batch).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    workload = Workload(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(6, 8))
    with pytest.raises(
        CaptureError, match=r"runs a backward pass that adds to \.grad at .*test_batch_values\.py:\d+ .*autograd\.grad"
    ):
        capture(workload)


def test_a_value_that_is_used_twice_is_computed_once_per_op_and_once_per_check():
    calls: list[str] = []

    def double(one: Tensor, other: Tensor) -> Tensor:
        calls.append("double")
        return one + other

    values = BatchValues([torch.ones(2)], ConstantValues())
    traced = torch.empty(2)
    values.add_inputs([traced])
    for _ in range(10):
        result = torch.empty(2)
        values.follow(double, (traced, traced), {}, result)
        traced = result
    assert values.read(torch.equal, (traced, traced), {}) == (True,)
    assert len(calls) == 10
    assert values.branches[0].holds([torch.zeros(2)])
    assert len(calls) == 20
