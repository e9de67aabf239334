"""A captured step follows the Python values that it reads, or refuses by name; it never trains with stale ones."""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autotune.capture.tracer import capture
from autotune.errors import CaptureError, PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners import make_plan
from autotune.runtime import step_cache, step_selector
from autotune.runtime.train_step import TrainStep
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import batch_of, make

WEIGHTS = {"kl": 0.5}
NOISE = 0.25


class Annealed(nn.Module):
    """Reads a number, a flag, a string and a layer without parameters from its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.drop, self.norm = nn.Linear(8, 16), nn.Dropout(0.1), nn.BatchNorm1d(16)
        self.act, self.head = nn.GELU(), nn.Linear(16, 4)
        self.beta, self.repeats, self.scaled, self.mode = 1.5, 1, True, "plain"

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.act(self.norm(self.entry(inputs))))
        for _ in range(self.repeats):
            hidden = torch.tanh(hidden)
        made = self.head(hidden)
        if self.mode == "doubled":
            made = made * 2
        return made * (0.5 * self.beta) if self.scaled else made


@dataclass
class Cell:
    """Values that the loss function finds in its closure."""

    number: float = 0.5
    classes: Tensor = field(default_factory=lambda: torch.ones(4))


def loss_with(cell: Cell) -> Callable[[nn.Module, Any], Tensor]:
    number, classes = cell.number, cell.classes

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        penalty = WEIGHTS["kl"] * made.pow(2).mean() + NOISE * made.mean() + number * made.abs().mean()
        return F.cross_entropy(made, batch[1], weight=classes) + penalty

    def rebind(new: Cell) -> None:
        nonlocal number, classes
        number, classes = new.number, new.classes

    loss.rebind = rebind  # type: ignore[attr-defined]
    return loss


@dataclass
class Subject:
    """A model and its loss, before a value of either changes."""

    model: Any
    loss: Any


def drop_p(subject: Subject, turn: int) -> None:
    subject.model.drop.p = 0.1 + 0.2 * turn


def attribute(subject: Subject, turn: int) -> None:
    subject.model.beta = 1.5 - 0.25 * turn


def closure_number(subject: Subject, turn: int) -> None:
    subject.loss.rebind(Cell(number=0.5 + turn))


def closure_tensor(subject: Subject, turn: int) -> None:
    subject.loss.rebind(Cell(classes=torch.rand(4, generator=torch.Generator().manual_seed(turn))))


def global_number(_: Subject, turn: int) -> None:
    globals()["NOISE"] = 0.25 + turn


def dictionary_entry(_: Subject, turn: int) -> None:
    WEIGHTS["kl"] = 0.5 + turn


def layer_replaced(subject: Subject, turn: int) -> None:
    subject.model.act = (nn.GELU, nn.ReLU, nn.SiLU)[turn % 3]()


def forward_hook(subject: Subject, turn: int) -> None:
    if turn:
        subject.model.entry.register_forward_hook(lambda _module, _inputs, output: output * 2)


def momentum(subject: Subject, turn: int) -> None:
    subject.model.norm.momentum = 0.1 + 0.2 * turn


def count_of_layers(subject: Subject, turn: int) -> None:
    subject.model.repeats = 1 + turn


def flag(subject: Subject, turn: int) -> None:
    subject.model.scaled = turn % 2 == 0


def word(subject: Subject, turn: int) -> None:
    subject.model.mode = ("plain", "doubled")[turn % 2]


def forward_replaced(subject: Subject, turn: int) -> None:
    if turn:
        model = subject.model
        model.forward = lambda inputs: model.head(model.entry(inputs)) * turn


def evaluation_mode(subject: Subject, turn: int) -> None:
    subject.model.drop.train(turn % 2 == 0)


CHANGES = [
    drop_p, attribute, closure_number, closure_tensor, global_number, dictionary_entry, layer_replaced, forward_hook,
    momentum, count_of_layers, flag, word, forward_replaced, evaluation_mode,
]  # fmt: skip
INPUTS = [attribute, closure_number, global_number, dictionary_entry]
"""Changes of values that become inputs of the step."""
REFUSED = {drop_p: "model.drop.p", count_of_layers: "model.repeats"}
"""Changes that need a capture each time, with the name in the error where they come at every step."""


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    yield
    globals()["NOISE"] = 0.25
    WEIGHTS["kl"] = 0.5


def subject_of() -> tuple[Any, Subject]:
    workload = make(Annealed, loss_fn=loss_with(Cell()))
    return workload, Subject(workload.model, workload.loss_fn)


@cache
def traced() -> TrainGraph:
    """The graph of the subject; each twin has the same."""
    return capture(subject_of()[0]).graph


@cache
def recomputing() -> Plan:
    graph = traced()
    return make_plan(graph, {"recompute": {"planner": "segments", "count": 2}}, 0, Costs.unit(graph))


def train(change: Callable[[Subject, int], None], every: int, steps: int, **options: Any) -> tuple[float, int]:
    """Steps beside eager with a change before every few; their largest difference, and the captures that it took."""
    (ours, subject), (other, twin) = subject_of(), subject_of()
    captures = 0
    worst = 0.0
    with (
        warnings.catch_warnings(),
        TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch, recomputing(), **options) as step,
    ):
        warnings.simplefilter("ignore")
        for number in range(steps):
            ours.batch = other.batch = batch_of(6, 8, seed=number)
            if number % every == 0:
                change(twin, number // every)
            torch.manual_seed(number)
            expected = eager_step(other)[0]
            if number % every == 0:
                change(subject, number // every)
            torch.manual_seed(number)
            worst = max(worst, (step(ours.batch) - expected).abs().item())
        captures = len(list(step._selector.cache))
    return max(worst, worst_difference(tensors(ours), tensors(other))), captures


RARELY = [change for change in CHANGES if change not in (closure_tensor, dictionary_entry)]
"""Changes that are made now and then; the others are made at every step, which is harder."""


@pytest.mark.parametrize("change", RARELY)
def test_a_value_that_changes_now_and_then_counts_from_the_next_step(change: Any):
    worst, captures = train(change, every=12, steps=30 if change in (drop_p, attribute) else 14)  # those change twice
    assert worst == 0.0
    assert captures <= 3


@pytest.mark.parametrize("change", INPUTS)
def test_a_number_that_changes_at_every_step_is_captured_twice_at_most(change: Any):
    worst, captures = train(change, every=1, steps=8)
    assert worst == 0.0
    assert captures <= 2


def test_a_float_that_becomes_an_int_is_a_constant_again():
    values = (1.5, 0.75, 1, 0.5, 2, 3, 1)  # the first int follows a float within ten steps

    def path(subject: Subject, turn: int) -> None:
        subject.model.beta = values[turn]

    assert train(path, every=3, steps=3 * len(values))[0] == 0.0


@pytest.mark.parametrize("change", REFUSED)
def test_what_no_input_can_be_and_changes_at_every_step_is_refused_with_name_value_and_line(change: Any):
    with pytest.raises(PlanError) as caught:
        train(change, every=1, steps=8)
    said = str(caught.value)
    lines = Path(__file__).read_text().splitlines()
    assert any(f"test_frozen_values.py:{number} ({text.strip()})" in said for number, text in enumerate(lines, 1))
    assert REFUSED[change] in said
    assert "pass it in the batch as a tensor" in said
    assert "\n" not in said


@pytest.mark.parametrize("change", [drop_p, layer_replaced])
def test_other_shapes_eager_runs_a_changed_step_in_eager(change: Any):
    assert train(change, every=1, steps=4, other_shapes="eager") == (0.0, 1)


def test_other_shapes_eager_goes_back_to_the_plan_and_warns_once():
    (ours, subject), (other, twin) = subject_of(), subject_of()
    in_eager = []
    with (
        warnings.catch_warnings(record=True) as caught,
        TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch, recomputing(), other_shapes="eager") as step,
    ):
        warnings.simplefilter("always")
        for beta in (1.5, 1.25, 1.0, 1.5, 0.75):
            subject.model.beta = twin.model.beta = beta
            torch.manual_seed(3)
            expected = eager_step(other)[0]
            torch.manual_seed(3)
            assert torch.equal(step(ours.batch), expected)
            in_eager.append(step.is_eager)
    assert in_eager == [False, True, True, False, True]
    assert len([warning for warning in caught if "whenever it changes" in str(warning.message)]) == 1


DESCRIBED = {
    attribute: "model.beta changed: the captured step is valid for model.beta == 1.5; now it is 1.25 (read at ",
    drop_p: "changed: the captured step is valid for",
    dictionary_entry: "changed: the captured step is valid for",
    layer_replaced: "is valid for model.act of type torch.nn.modules.activation.GELU (read at ",
    forward_hook: "is valid for model.entry._forward_hooks being empty (read at ",
    forward_replaced: "is valid for model without an attribute 'forward' (read at ",
}
"""Words of the error after each change."""


def undo(change: Any, subject: Subject) -> None:
    """Bring back the values of the capture."""
    change(subject, 0)
    subject.model.entry._forward_hooks.clear()
    vars(subject.model).pop("forward", None)


def test_other_shapes_error_describes_each_change_in_plain_words():
    workload, subject = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        for change, words in DESCRIBED.items():
            change(subject, 1)
            with pytest.raises(PlanError) as caught:
                step(workload.batch)
            assert words in str(caught.value)
            assert "___" not in str(caught.value)
            undo(change, subject)
            step(workload.batch)


def test_a_change_of_global_state_is_described_in_plain_words():
    workload, _ = subject_of()
    before = torch.get_num_threads()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        torch.set_num_threads(before + 1)
        try:
            with pytest.raises(
                PlanError, match=r"^global state of torch changed since the step was captured: num_threads"
            ):
                step(workload.batch)
        finally:
            torch.set_num_threads(before)


def test_a_new_tensor_in_the_closure_is_read_without_another_capture():
    assert train(closure_tensor, every=1, steps=6, other_shapes="error") == (0.0, 1)


def test_a_changed_value_keeps_the_plan():
    workload, subject = subject_of()
    graph = traced()
    plan = make_plan(
        graph,
        {"recompute": {"planner": "segments", "count": 2}, "inplace": {"planner": "greedy"}},
        0,
        Costs.unit(graph),
    )
    assert plan.recomputed
    assert plan.inplace
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan) as step:
        for change in (attribute, drop_p):
            change(subject, 1)
            with pytest.warns(UserWarning, match="is captured again"):
                step(workload.batch)
            assert step.plan.order == plan.order
            assert len(step.plan.inplace) == len(plan.inplace)


def test_every_capture_of_changed_values_is_verified():
    workload, subject = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, verify=True) as step:
        for _ in range(3):
            step(workload.batch)
        assert not step._verifier.is_due(step._selector.last.number)
        drop_p(subject, 1)
        with pytest.warns(UserWarning, match="is captured again"):
            step(workload.batch)
        assert step._verifier.is_due(step._selector.last.number)


def test_values_that_come_back_are_not_captured_again(monkeypatch: pytest.MonkeyPatch):
    count = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return capture(*arguments, **named)

    monkeypatch.setattr(step_selector, "capture", counted)
    workload, subject = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(8):
                flag(subject, number)
                step(workload.batch)
        assert count == 2


def test_a_thousand_unchanged_steps_capture_once(monkeypatch: pytest.MonkeyPatch):
    workload, _ = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        monkeypatch.setattr(step_selector, "capture", lambda *_, **__: pytest.fail("captured again"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(1000):
                step(workload.batch)


def test_a_mode_that_counts_ops_is_no_reason_to_capture_again():
    workload, _ = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        with FlopCounterMode(display=False) as counter:
            step(workload.batch)
        assert counter.get_total_flops() > 0


def test_at_most_eight_captures_of_other_values_are_kept(monkeypatch: pytest.MonkeyPatch):
    assert step_cache.MAX_CAPTURES == 8
    monkeypatch.setattr(step_cache, "MAX_CAPTURES", 2)  # each capture takes half a second
    workload, subject = subject_of()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(4):
                count_of_layers(subject, number)
                for _ in range(11):
                    step(workload.batch)
        assert [len(known) for known in step._selector.cache.by_signature.values()] == [2]


def test_a_hook_on_a_parameter_that_is_added_later_is_refused_by_name():
    workload, subject = subject_of()
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    step(workload.batch)
    handle = subject.model.entry.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(CaptureError, match=r"entry\.weight has a hook on its gradient"):
        step(workload.batch)
    handle.remove()
    step(workload.batch)


def test_a_hook_on_a_parameter_runs_in_eager_where_that_was_asked_for():
    (ours, subject), (other, twin) = subject_of(), subject_of()
    step = TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch, other_shapes="eager")
    for one in (subject, twin):
        one.model.entry.weight.register_hook(lambda gradient: gradient * 0)
    torch.manual_seed(1)
    loss = step(ours.batch)
    torch.manual_seed(1)
    assert torch.equal(loss, eager_step(other)[0])
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


def test_a_tensor_with_a_graph_of_its_own_is_refused_in_closure_and_batch():
    workload = make(lambda: nn.Linear(8, 4))
    scale = torch.ones((), requires_grad=True) * 2
    workload.loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]) * scale, batch[1])
    with pytest.raises(CaptureError, match=r"scale has an autograd graph from outside.*detach the tensor"):
        capture(workload)
    workload = make(lambda: nn.Linear(8, 4))
    inputs, labels = workload.batch
    workload.batch = (inputs * scale, labels)
    with pytest.raises(CaptureError, match=r"batch\.0 has an autograd graph.*pass it detached"):
        capture(workload)
    workload.batch = (inputs.requires_grad_(), labels)
    with pytest.raises(CaptureError, match=r"batch\.0 requires a gradient.*pass it detached"):
        capture(workload)


def test_a_second_model_in_the_closure_may_be_replaced_and_its_buffers_move():
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.norm(inputs))

    def with_teacher() -> tuple[Any, list[nn.Module]]:
        torch.manual_seed(3)
        teachers = [Teacher().requires_grad_(False), Teacher().requires_grad_(False)]
        current = {"teacher": teachers[0]}

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return F.mse_loss(model(batch[0]), current["teacher"](batch[0]))

        workload = make(lambda: nn.Linear(8, 4), loss_fn=loss)
        return workload, [current, *teachers]  # type: ignore[list-item]

    (ours, one), (other, two) = with_teacher(), with_teacher()
    step = TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch)
    for number in range(4):
        if number == 2:
            for current, _, second in (one, two):
                current["teacher"] = second  # type: ignore[index]
        assert torch.equal(step(ours.batch), eager_step(other)[0])
    assert worst_difference(tensors(ours), tensors(other)) == 0.0
    for mine, theirs in zip(one[1:], two[1:], strict=True):
        assert worst_difference(dict(mine.state_dict()), dict(theirs.state_dict())) == 0.0


class Phase(Enum):
    WARM = 1
    FULL = 2


@dataclass
class Options:
    smoothing: float = 0.0
    phase: Phase = Phase.WARM


class Residual(nn.Module):
    """A block that is left out for some rows."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = nn.Linear(8, 8), rate

    def forward(self, inputs: Tensor) -> Tensor:
        kept = inputs.new_empty(len(inputs), 1).bernoulli_(1 - self.rate)
        return inputs + self.inner(inputs) * kept / (1 - self.rate)


class Configured(nn.Module):
    """Reads a dataclass, an enum, nested containers, a function and an attribute of its class."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Residual(0.1 * at) for at in range(3)), nn.Linear(8, 4)
        self.options, self.config = Options(), {"weights": [1.0, 0.5]}
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        made = self.head(self.act(inputs)) * self.config["weights"][1] * type(self).scale
        return made * 2 if self.options.phase is Phase.FULL else made


class Focal:
    """A loss with state of its own."""

    def __init__(self) -> None:
        self.gamma, self.classes = 2.0, [1.0, 2.0, 1.0, 1.0]

    def __call__(self, model: nn.Module, batch: Any, power: Any = None) -> Tensor:
        weight, smoothing = torch.tensor(self.classes), model.options.smoothing
        each = F.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="none", label_smoothing=smoothing)
        return ((1 - torch.exp(-each)) ** self.gamma * each).mean() * (power[0] if power else 1.0)


def rates(model: Any, _: Any, turn: int) -> None:
    for at, block in enumerate(model.blocks):
        block.rate = 0.1 * turn * at


def phase(model: Any, _: Any, turn: int) -> None:
    model.options.phase = Phase.FULL if turn % 2 else Phase.WARM


def options_replaced(model: Any, _: Any, turn: int) -> None:
    model.options = Options(smoothing=0.1 * turn)


def nested_list(model: Any, _: Any, turn: int) -> None:
    model.config["weights"][1] = 0.5 + turn


def function_replaced(model: Any, _: Any, turn: int) -> None:
    model.act = partial(F.leaky_relu, negative_slope=0.1 * turn)


def class_attribute(model: Any, _: Any, turn: int) -> None:
    type(model).scale = 1.0 + turn


def forward_of_the_class(model: Any, _: Any, turn: int) -> None:
    type(model.blocks[0]).forward = lambda self, inputs: inputs + self.inner(inputs) * turn


def class_replaced(model: Any, _: Any, turn: int) -> None:
    model.blocks[1].__class__ = type("Other", (Residual,), {"forward": lambda self, inputs: inputs * turn})


def gamma(_: Any, loss: Any, turn: int) -> None:
    loss.func.gamma = 2.0 + turn


def list_of_weights(_: Any, loss: Any, turn: int) -> None:
    loss.func.classes[0] = 1.0 + turn


def keyword_of_partial(_: Any, loss: Any, turn: int) -> None:
    loss.keywords["power"][0] = 1.0 + turn


ONCE = (phase, function_replaced, forward_of_the_class, class_replaced)
"""Changes that need a capture each; numbers become inputs of the step, so those change twice."""


@pytest.mark.parametrize(
    "change",
    [rates, phase, options_replaced, nested_list, function_replaced, class_attribute, forward_of_the_class, class_replaced,
     gamma, list_of_weights, keyword_of_partial],
)  # fmt: skip
def test_a_value_behind_other_objects_counts_from_the_next_step(change: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Configured, "scale", 1.0)  # set back afterwards
    monkeypatch.setattr(Residual, "forward", Residual.forward)
    forward, ends = Residual.forward, []
    for planned in (False, True):
        Configured.scale, Residual.forward = 1.0, forward  # type: ignore[method-assign]
        workload = make(Configured, loss_fn=partial(Focal(), power=[1.0]))
        step = (
            TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
            if planned
            else lambda _, own=workload: eager_step(own)[0]
        )
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(4 if change in ONCE else 26):
                if number in (2, 14):
                    change(workload.model, workload.loss_fn, 1 + number // 12)
                torch.manual_seed(number)
                losses.append(step(workload.batch).item())
        ends.append((losses, tensors(workload)))
    assert ends[0][0] == ends[1][0]
    assert worst_difference(ends[0][1], ends[1][1]) == 0.0
    assert ends[0][0][1] != ends[0][0][2]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (np.float64(0.5), r"^model\.scale is a numpy\.float64, .* as model\.scale\.item\(\) before the step$"),
        (np.ones(4, np.float32), r"^model\.scale is a numpy\.ndarray, .* as torch\.as_tensor\(model\.scale\)"),
    ],
)
def test_a_number_or_an_array_of_numpy_is_refused_by_name(made: Any, words: str):
    workload = make(
        Configured, loss_fn=lambda model, batch: (model.head(batch[0]) * torch.as_tensor(model.scale)).mean()
    )
    workload.model.scale = made
    with pytest.raises(CaptureError, match=words):
        capture(workload)


class Weighted(nn.Module):
    """A loss with tensors of its own, which users replace between epochs."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4))
        self.teacher = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        return F.cross_entropy(made, batch[1], weight=self.weight) + F.mse_loss(made, self.teacher(batch[0]))


def new_weight(loss: Weighted) -> None:
    loss.weight = torch.rand(4)


def new_teacher(loss: Weighted) -> None:
    loss.teacher = nn.Linear(8, 4).requires_grad_(False)


@pytest.mark.parametrize("change", [new_weight, new_teacher])
def test_a_new_tensor_of_a_loss_module_counts_from_the_next_step(change: Callable[[Weighted], None]):
    torch.manual_seed(0)
    loss = Weighted()
    ours, other = (make(lambda: nn.Linear(8, 4), loss_fn=copy.deepcopy(loss)) for _ in range(2))
    with TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch) as step:
        for number in range(3):
            assert torch.equal(step(ours.batch), eager_step(other)[0])
            for workload in (ours, other):
                torch.manual_seed(number)
                change(workload.loss_fn)
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


def test_a_global_hook_that_is_registered_later_runs_from_the_next_step():
    (ours, _), (other, _) = subject_of(), subject_of()
    with (
        warnings.catch_warnings(),
        TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch, recomputing()) as step,
    ):
        warnings.simplefilter("ignore")
        hook = None
        try:
            for number in range(4):
                if number == 2:
                    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
                torch.manual_seed(number)
                expected = eager_step(other)[0]
                torch.manual_seed(number)
                assert torch.equal(step(ours.batch), expected)
        finally:
            if hook is not None:
                hook.remove()
