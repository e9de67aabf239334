"""Where Dynamo refuses, one run of the step's Python on fake tensors captures it: equal to eager, guarded, or refused by name."""

import contextlib
import logging
import random
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.capture.python.refusals import explain
from autotune.capture.tracer import capture
from autotune.errors import CaptureError, PlanError
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.capture import test_frozen_values as frozen
from tests.support.eager import assert_equals_eager, eager_step, tensors, worst_difference
from tests.support.small import Tied, batch_of, labelled_loss, make, mlp, normalized


class Doubled(torch.autograd.Function):
    """Function whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 * ctx.saved_tensors[0].sign()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(Doubled.apply(self.entry(inputs)))


@contextlib.contextmanager
def scope() -> Iterator[float]:
    yield 0.5


class Odd(Custom):
    """Python that Dynamo cannot read: a frame, a generator that is sent to, formatted names, a lock."""

    def forward(self, inputs: Tensor) -> Tensor:
        import inspect

        assert inspect.currentframe() is not None
        logging.getLogger("odd").debug("%s", id(inputs))
        with scope() as factor:
            return self.head(torch.tanh(self.entry(inputs)) * factor * len(inspect.stack()) ** 0)


class TiedOdd(Odd):
    """The same with one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.entry.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.again(inputs))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        return self.head(self.layers(inputs, inputs, tgt_mask=mask)).mean(1)


def with_normal(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    mean = model(batch[0])
    normal = torch.distributions.Normal(mean, torch.ones_like(mean))
    return -normal.log_prob(F.one_hot(batch[1], 4).float()).mean() + normal.rsample().mean()


def with_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    mixed = (batch[0] * 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return labelled_loss(model, batch) + (gradient.norm(dim=1) - 1).pow(2).mean()


def with_inner_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(labelled_loss(model, batch), list(weights.values()), create_graph=True)
    moved = {name: weight - 0.1 * gradient for (name, weight), gradient in zip(weights.items(), gradients, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, moved, (batch[0],)), batch[1])


def with_reentrant_checkpoint(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden = torch.utils.checkpoint.checkpoint(torch.tanh, model[0](batch[0]), use_reentrant=False)
    return F.cross_entropy(model[3](hidden), batch[1])


CASES: dict[str, Callable[[], Workload]] = {
    "custom function": lambda: make(Custom),
    "transformer with its mask": lambda: make(Attention, (6, 5, 8)),
    "distribution": lambda: make(mlp, loss_fn=with_normal),
    "gradient penalty": lambda: make(mlp, loss_fn=with_penalty),
    "inner step": lambda: make(mlp, loss_fn=with_inner_step),
    "tied and odd": lambda: make(TiedOdd),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_eager_whichever_way_it_is_captured(case: str):
    assert_equals_eager(CASES[case](), CASES[case]())


BOTH: dict[str, Callable[[], Workload]] = {
    "dropout": lambda: make(lambda: mlp(0.3)),
    "batch norm": lambda: make(normalized, (4, 3, 8, 8)),
    "checkpoint": lambda: make(mlp, loss_fn=with_reentrant_checkpoint),
    "tied": lambda: make(Tied),
}
"""Steps that Dynamo can trace, too; that they equal eager is tested elsewhere."""


@pytest.mark.parametrize("case", BOTH)
def test_both_ways_give_one_graph(case: str):
    dynamo, recorded = (capture(BOTH[case](), way=way) for way in ("dynamo", "recorded"))
    assert (dynamo.recorded, recorded.recorded) == (False, True)
    assert dynamo.graph.digest == recorded.graph.digest


def test_dynamo_comes_first():
    assert not capture(make(mlp)).recorded


class AnnealedOdd(frozen.Annealed):
    """`Annealed` that Dynamo cannot read."""

    def forward(self, inputs: Tensor) -> Tensor:
        import inspect

        assert inspect.currentframe() is not None
        return super().forward(inputs)


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    before = frozen.NOISE, dict(frozen.WEIGHTS)
    yield
    frozen.NOISE = before[0]
    frozen.WEIGHTS.update(before[1])


def subject_of() -> tuple[Workload, frozen.Subject]:
    workload = make(AnnealedOdd, loss_fn=frozen.loss_with(frozen.Cell()))
    return workload, frozen.Subject(workload.model, workload.loss_fn)


RECAPTURED = (
    frozen.drop_p, frozen.closure_tensor, frozen.forward_hook,
    pytest.param(frozen.forward_replaced, marks=pytest.mark.slow),
)  # fmt: skip
"""Changes of some kinds: once a guard has failed, the capture takes one way whatever changed."""


@pytest.mark.parametrize("change", RECAPTURED)
def test_a_changed_value_counts_from_the_next_step(change: Any):
    (ours, subject), (other, twin) = subject_of(), subject_of()
    with (
        warnings.catch_warnings(),
        TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch) as step,
    ):
        warnings.simplefilter("ignore")
        assert step._selector.first.recorded
        for number in range(3):
            ours.batch = other.batch = batch_of(6, 8, seed=number)
            if number == 2:
                change(twin, 1)
            torch.manual_seed(number)
            expected = eager_step(other)[0]
            if number == 2:
                change(subject, 1)
            torch.manual_seed(number)
            assert torch.equal(step(ours.batch), expected)
        assert len(list(step._selector.cache)) <= 2
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


NAMED = {
    frozen.drop_p: r"model\.drop\.p changed: .*model\.drop\.p == 0\.1; now it is 0\.3",
    frozen.attribute: r"model\.beta changed: .*now it is 1\.25 \(read at .*test_frozen_values\.py:\d+ \(return made",
    frozen.closure_number: r"number changed: .*number == 0\.5; now it is 1\.5",
    frozen.global_number: r"NOISE changed",
    frozen.dictionary_entry: r"WEIGHTS changed",
    frozen.forward_hook: r"model\.entry\._forward_hooks changed",
    frozen.layer_replaced: r"changed: the captured step is valid for",  # the last: another object stays there
}
"""Words of the error after each change."""


def test_a_failed_guard_names_the_value_as_the_user_spells_it():
    workload, subject = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        for change, words in NAMED.items():
            step(workload.batch)
            change(subject, 1)
            with pytest.raises(PlanError, match=words):
                step(workload.batch)
            frozen.undo(change, subject)


def branch(model: nn.Module, batch: Any) -> Tensor:
    made = model(batch[0])
    if made.sum() > 0:
        made = made * 2
    return F.cross_entropy(made, batch[1])


def mask(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])[batch[1] > 1].sum()


def python_random(model: nn.Module, batch: Any) -> Tensor:
    return labelled_loss(model, batch) * random.random()


def numpy_random_of_a_size(model: nn.Module, batch: Any) -> Tensor:
    return labelled_loss(model, batch) * torch.from_numpy(np.random.normal(0.0, 1.0, size=(1,))).float().sum()


def numpy_random(model: nn.Module, batch: Any) -> Tensor:
    return labelled_loss(model, batch) * float(np.random.beta(1.0, 1.0))


def packed(model: nn.Module, batch: Any) -> Tensor:
    del model
    sequence = nn.utils.rnn.pack_padded_sequence(batch[0][:, None], batch[1] + 1, enforce_sorted=False)
    return sequence.data.sum()


def layerdrop(model: Any, batch: Any) -> Tensor:
    made = batch[0]
    for layer in model:
        skip_the_layer = torch.rand([]) < 0.1
        if not skip_the_layer:
            made = layer(made)
    return F.cross_entropy(made, batch[1])


def counting(model: Any, batch: Any) -> Tensor:
    import inspect

    inspect.currentframe()
    model.calls = getattr(model, "calls", 0) + 1
    return labelled_loss(model, batch) / model.calls


REFUSED = {
    branch: r"Python needs the values of a tensor.*\(if made\.sum\(\) > 0:\); use torch\.where",
    mask: r"shape that depends on the data at .*\(return model\(batch\[0\]\)\[batch\[1\] > 1\]\.sum\(\)\); replace x\[mask\]",
    python_random: r"random numbers from Python's random at .*labelled_loss.*draw with torch\.rand",
    numpy_random: r"random numbers from numpy\.random.*draw with torch\.rand",
    numpy_random_of_a_size: r"random numbers from numpy\.random.*draw with torch\.rand",
    packed: r"packed sequences.*\(sequence = nn\.utils.*pass the padded batch",
    layerdrop: r"values of a tensor.*\(if not skip_the_layer:\); set the model's layerdrop to 0",
}


def assert_plain(message: str) -> None:
    """One line without words of torch's tracer."""
    assert "\n" not in message
    assert not re.search(r"[Dd]ynamo|TORCH_LOGS|aten", message)


@pytest.mark.parametrize("loss_fn", REFUSED)
def test_a_refusal_names_the_users_line_and_the_next_step(loss_fn: Any):
    with pytest.raises(CaptureError, match=REFUSED[loss_fn]) as caught:
        capture(make(mlp, loss_fn=loss_fn))
    assert_plain(str(caught.value))


def test_a_refusal_names_the_users_line_where_this_package_is_installed_among_libraries():
    installed = f"{sysconfig.get_path('purelib')}/autotune/capture/fake/kernel_strides.py"
    frames = [
        traceback.FrameSummary("/nowhere/net.py", 9, "forward", line="if h.mean() > 0.3:"),
        traceback.FrameSummary(installed, 129, "corrected", line="result = dispatch(mode, func, types, args, kwargs)"),
    ]
    message = explain("net", RuntimeError("Data-dependent branching"), frames)
    assert " at /nowhere/net.py:9 (if h.mean() > 0.3:); use torch.where" in message


def test_the_name_of_a_users_function_explains_nothing_and_an_explained_error_is_quoted():
    frames = [traceback.FrameSummary("/nowhere/net.py", 9, "sparsemax", line="return a @ b")]
    message = explain("net", RuntimeError("shapes differ"), frames)
    assert "the step raised RuntimeError('shapes differ') at /nowhere/net.py:9 (return a @ b); does it run" in message
    message = explain("net", RuntimeError("no sparse add"), frames)
    assert message.endswith("use the dense form, such as Embedding(sparse=False) (RuntimeError('no sparse add'))")


def test_a_refusal_names_the_users_line_and_leaves_the_model_as_it_was():
    workload = make(mlp, loss_fn=counting)
    before = dict(vars(workload.model))
    state = random.getstate()
    with pytest.raises(CaptureError, match=r"calls is changed in the step at .*make it a buffer") as caught:
        capture(workload)
    assert_plain(str(caught.value))
    assert vars(workload.model) == before
    assert random.getstate() == state
    assert nn.Module.__getattribute__ is object.__getattribute__


def test_a_counter_that_nothing_reads_is_warned_of():
    def loss_fn(model: Any, batch: Any) -> Tensor:
        import inspect

        inspect.currentframe()
        model.calls += 1
        return labelled_loss(model, batch)

    workload = make(mlp, loss_fn=loss_fn)
    workload.model.calls = 0
    with pytest.warns(UserWarning, match=r"model\.calls changes in the step at .*model\.calls \+= 1"):
        capture(workload)
    assert workload.model.calls == 0


def test_a_teacher_in_a_closure_is_read_again_for_each_step():
    import inspect

    def loss_of(teacher: nn.Module) -> Any:
        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            inspect.currentframe()
            with torch.no_grad():
                target = teacher(batch[0])
            return F.mse_loss(model(batch[0]), target)

        return loss_fn

    torch.manual_seed(3)
    teachers = mlp(), mlp()
    teachers[1].load_state_dict(teachers[0].state_dict())
    ours, other = (make(mlp, loss_fn=loss_of(teacher)) for teacher in teachers)
    with TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch) as step:
        for _ in range(3):
            assert torch.equal(step(ours.batch), eager_step(other)[0])
            for teacher in teachers:
                with torch.no_grad():
                    teacher[0].weight.mul_(0.5)
                teacher[3].bias = nn.Parameter(teacher[3].bias * 2)
        assert len(list(step._selector.cache)) == 1


class Tapped(Custom):
    """Reads a container of its attributes, which may become another one."""

    taps: Any

    def forward(self, inputs: Tensor) -> Tensor:
        import inspect

        assert inspect.currentframe() is not None
        taps = getattr(self, "taps", None) or ()
        return self.head(torch.tanh(self.entry(inputs))) * (1 + len(taps))


@pytest.mark.filterwarnings("ignore:model.taps changed")
@pytest.mark.parametrize(("first", "others"), [([3, 5], (None, "absent")), ((3, 5), (0,)), ({"a": 3, "b": 5}, ([3],))])
def test_a_step_is_not_valid_for_a_container_that_becomes_another_value(first: Any, others: tuple[Any, ...]):
    ours, other = make(Tapped), make(Tapped)
    ours.model.taps = other.model.taps = first
    with TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch, other_shapes="eager") as step:
        assert step._selector.first.recorded
        for taps in others:
            for value in (first, taps):
                for model in (ours.model, other.model):
                    model.taps = value
                    if value == "absent":
                        del model.taps
                assert torch.equal(step(ours.batch), eager_step(other)[0])
                assert step.is_eager == (value is not first)
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


def test_weights_that_change_their_form_are_captured_again():
    """Dynamo guards the form of weights, a recorded step does not: dropout draws its mask in the layout of its input."""

    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Conv2d(8, 4, 3))

        def forward(self, images: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.body(images)

    def loss_fn(model: nn.Module, images: Tensor) -> Tensor:
        return model(images).square().mean()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Refused())
    images = torch.randn(2, 3, 8, 8)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = TrainStep(models[0], loss_fn, optimizers[0], images)
    assert step._selector.first.recorded
    for number in range(4):
        if number == 2:
            for model in models:
                model.to(memory_format=torch.channels_last)
        torch.manual_seed(number)
        optimizers[1].zero_grad()
        loss = loss_fn(models[1], images)
        loss.backward()
        optimizers[1].step()
        torch.manual_seed(number)
        assert torch.equal(step(images), loss.detach())
