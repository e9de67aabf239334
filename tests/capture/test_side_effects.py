"""What a step changes in Python is refused where the next step would read it, and reported once elsewhere."""

import sysconfig
import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.capture.python.side_effects import SideEffect, SideEffectWarning, is_count
from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.integrations.side_effects import refuse_side_effects
from autotune.runtime.train_step import TrainStep
from tests.support.eager import assert_equals_eager, eager_step
from tests.support.small import make


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.count, self.decayed, self.on = 0, 0.0, False
        self.log: list[Any] = []
        self.queue: list[Any] = [torch.zeros(6, 4)]
        self.table: dict[str, Any] = {}
        self.state: Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))


# The next step reads it.


class CounterInTheLoss(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        return self.head(inputs) * min(1.0, self.count / 4)


class CounterInABranch(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        made = self.head(inputs)
        return made * 2 if self.count > 1000 else made


class DecayedNumber(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.decayed = 0.9 * self.decayed + 1
        return self.head(inputs) * self.decayed


class BufferAssigned(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.mean = 0.9 * self.mean + made.mean(0).detach()
        return made - self.mean


class BufferForLater(Base):
    """Nothing in the step reads the buffer, but evaluation and checkpoints do."""

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.mean = 0.9 * self.mean + made.mean(0).detach()
        return made


class StateMadeInTheFirstStep(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        if self.state is None:
            self.state = torch.zeros_like(made)
        self.state = (0.9 * self.state + made).detach()
        return made + self.state


class AttributeMadeInTheFirstStep(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        if hasattr(self, "ready"):
            made = made * 2
        self.ready = 1
        return made


class Flag(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs) * (2 if self.on else 1)
        self.on = True
        return made


class ListOfTensors(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.log.append(made.detach())
        return made - torch.stack(self.log).mean(0)


class LengthOfAList(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.log.append(1)
        return self.head(inputs) * len(self.log)


class Queue(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        read = made + self.queue[0]
        self.queue[0] = made.detach()
        return read


class Table(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        before = self.table.get("made")
        self.table["made"] = made.detach()
        return made if before is None else made + before


class ThresholdInATable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table["steps"] = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.table["steps"] += 1
        made = self.head(inputs)
        return made * 2 if self.table["steps"] > 1000 else made


class ThresholdOfALength(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.log.append(made.detach())
        return made * 2 if len(self.log) > 64 else made


class ThresholdInASpecialTable(Base):
    """A container that Dynamo holds as an object with a container inside."""

    def __init__(self, table: dict[str, int]) -> None:
        super().__init__()
        self.table = table

    def forward(self, inputs: Tensor) -> Tensor:
        self.table["steps"] += 1
        made = self.head(inputs)
        return made * 2 if self.table["steps"] > 1000 else made


class Tables(dict):  # type: ignore[type-arg]
    """A subclass of the user's."""


class Lists(list):  # type: ignore[type-arg]
    """Another one."""


def in_ordered_dict() -> Base:
    return ThresholdInASpecialTable(OrderedDict(steps=0))


def in_defaultdict() -> Base:
    return ThresholdInASpecialTable(defaultdict(int, steps=0))


def in_counter() -> Base:
    return ThresholdInASpecialTable(Counter(steps=0))


def in_subclass() -> Base:
    return ThresholdInASpecialTable(Tables(steps=0))


class LengthOfASubclass(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log = Lists()

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.log.append(made.detach())
        return made * 2 if len(self.log) > 1 else made


class MemberOfASet(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log = set()

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        if 3 not in self.log:
            made = made * 2
            self.log.add(3)
        return made


class NumberedParts(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.table[len(self.table)] = made.detach()
        return made * 2 if len(self.table) > 64 else made


class AttributeThatIsTried(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        try:
            hidden = self.hidden
        except AttributeError:
            hidden = torch.zeros_like(made)
        self.hidden = (0.9 * hidden + made).detach()
        return made + self.hidden


READ = {
    CounterInTheLoss: "count", CounterInABranch: "count", DecayedNumber: "decayed", BufferAssigned: "mean",
    BufferForLater: "mean", StateMadeInTheFirstStep: "state", AttributeMadeInTheFirstStep: "ready", Flag: "on",
    ListOfTensors: "log", LengthOfAList: "log", Queue: "queue", Table: "table", ThresholdInATable: "table",
    ThresholdOfALength: "log", in_ordered_dict: "table", in_defaultdict: "table", in_counter: "table", in_subclass: "table",
    LengthOfASubclass: "log", MemberOfASet: "log", NumberedParts: "table", AttributeThatIsTried: "hidden",
}  # fmt: skip


@pytest.mark.parametrize("model", READ)
def test_a_side_effect_that_the_next_step_reads_is_refused_with_its_line(model: Any):
    workload = make(model)
    before = {name: repr(value) for name, value in vars(workload.model).items()}
    with pytest.raises(CaptureError) as caught:
        capture(workload)
    said = str(caught.value)
    lines = Path(__file__).read_text().splitlines()
    assert said.startswith(f"model.{READ[model]} is changed in the step at ")
    assert any(f"test_side_effects.py:{number} ({text.strip()})" in said for number, text in enumerate(lines, 1))
    assert "\n" not in said
    assert {name: repr(value) for name, value in vars(workload.model).items()} == before


def test_the_refusal_of_a_buffer_names_the_spelling_that_works():
    with pytest.raises(CaptureError, match=r"change it in place: model\.mean\.copy_\(\.\.\.\)"):
        capture(make(BufferAssigned))
    with pytest.raises(CaptureError, match=r"as in model\.count\.add_\(1\), or pass it in the batch as a tensor"):
        capture(make(CounterInTheLoss))


class ProblemType(Base):
    """As classifiers of `transformers`, which find out their kind of problem in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.kind:
            self.kind = "single_label"
        made = self.head(inputs)
        return made if self.kind == "single_label" else made.sigmoid()


def test_what_only_the_first_step_assigns_is_assigned_and_captured():
    workload, other = make(ProblemType), make(ProblemType)
    assert_equals_eager(workload, other)
    assert workload.model.kind == other.model.kind == "single_label"


class InitializedByTheFirstBatch(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.on:
            self.mean.copy_(self.head(inputs).mean(0).detach())
            self.on = True
        return self.head(inputs) - self.mean


class Alternating(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.on = not self.on
        made = self.head(inputs)
        return made if self.on else made.sigmoid()


@pytest.mark.parametrize("kind", [Alternating, InitializedByTheFirstBatch])
def test_a_setting_that_makes_the_first_step_another_one_is_refused_and_stays_as_it_was(kind):
    workload = make(kind)
    with pytest.raises(CaptureError, match=r"model\.on is changed in the step at .*self\.on ="):
        capture(workload)
    assert workload.model.on is False


class BufferInPlace(Base):
    """The spelling that the refusals name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.steps.add_(1)
        self.mean.copy_(0.9 * self.mean + made.mean(0).detach())
        return (made - self.mean) * torch.clamp(self.steps / 4, max=1.0)


def test_the_spelling_that_works_equals_eager_step_after_step():
    assert_equals_eager(make(BufferInPlace), make(BufferInPlace), steps=6)


# Nobody in the step reads it.


class Count(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        return self.head(inputs)


class Average(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.decayed = 0.9 * self.decayed + 1
        return self.head(inputs)


class LastOutput(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.last = self.head(inputs)
        return self.last * 2


class LogOfTensors(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.log.append(made.detach())
        return made


class LogOfNumbers(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.log.append(3)
        return self.head(inputs)


class LogInASpecialTable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = defaultdict(list)

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        self.table["made"].append(made.detach())
        return made


class LogInASet(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.log.add(3)
        return self.head(inputs)


UNREAD = {
    Count: "count",
    Average: "decayed",
    LastOutput: "last",
    LogOfTensors: "log",
    LogOfNumbers: "log",
    LogInASpecialTable: "table",
    LogInASet: "log",
}


@pytest.mark.parametrize("model", UNREAD)
def test_a_side_effect_that_nobody_reads_warns_once_and_changes_no_result(model: Any):
    workload, other = make(model), make(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
        for _ in range(3):
            assert torch.equal(step(workload.batch), eager_step(other)[0])
    said = [str(one.message) for one in seen]
    assert len(said) == 1
    assert said[0].startswith(f"model.{UNREAD[model]} changes in the step at ")
    assert said[0].endswith("a captured step does not repeat that change, so do it between steps if anything reads it")


def test_a_change_that_would_be_lost_is_refused_although_the_user_hides_warnings():
    def capture_unseen() -> None:
        with warnings.catch_warnings(), refuse_side_effects("or keep it"):
            warnings.simplefilter("ignore")
            capture(make(Count))

    with pytest.raises(CaptureError, match=r"count changes .*, or keep it"):
        capture_unseen()


def test_an_eager_evaluation_that_counts_on_is_no_reason_to_capture_again():
    workload = make(Count)
    with pytest.warns(UserWarning, match="does not repeat that"):
        step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error")
    for _ in range(3):
        workload.model(workload.batch[0])
        step(workload.batch)
    assert workload.model.count == 3


class FilledAndCleared(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.log.append(self.head(inputs))
        made = self.log[-1] * 2
        self.log.clear()
        return made


def test_a_list_that_every_step_leaves_as_it_was_is_no_side_effect():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equals_eager(make(FilledAndCleared), make(FilledAndCleared))


class SetAndReset(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        was = self.on
        self.on = True
        made = self.head(inputs) * (1 if was else 2)
        self.on = was
        return made


def test_a_flag_that_the_step_resets_is_no_side_effect_and_counts_where_it_changes_between_steps():
    workload, other = make(SetAndReset), make(SetAndReset)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SideEffectWarning)
        step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
        for on in (False, False, True):
            workload.model.on = other.model.on = on
            assert torch.equal(step(workload.batch), eager_step(other)[0])


def of_a_library(statement: str) -> type[Base]:
    """Return a model whose forward runs a statement in a file among the installed packages."""
    source = f"def forward(self, inputs):\n    made = self.head(inputs)\n    {statement}\n    return made\n"
    path = Path(sysconfig.get_path("purelib"), "some_library", "layers.py")
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, str(path), "exec"), namespace)
    return type("OfALibrary", (Base,), {"forward": namespace["forward"], "__module__": __name__})


@pytest.mark.parametrize("statement", ["self.count += 1", "self.decayed = 0.5 * self.decayed + 1"])
def test_a_number_that_a_library_advances_warns_as_the_users_does(statement: str):
    name = statement.split(maxsplit=1)[0].removeprefix("self.")
    with pytest.warns(SideEffectWarning, match=rf"^model\.{name} changes in the step; a captured step does not repeat"):
        capture(make(of_a_library(statement)))


@pytest.mark.parametrize("statement", ["self.state = made.detach()", "self.count = inputs.shape[0]"])
def test_what_a_library_only_assigns_is_a_cache_and_does_not_warn(statement: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SideEffectWarning)
        capture(make(of_a_library(statement)))


def test_a_number_that_replaces_none_is_a_cache_and_no_count() -> None:
    before: dict[str, Any] = {"calls": 0, "ranks": None}
    sources = SimpleNamespace(exists=before.__contains__, value=before.__getitem__)
    traced: Any = SimpleNamespace(conditions=frozenset(before), sources=sources)
    assert [is_count(SideEffect(source, 1, ""), traced) for source in before] == [True, False]


class PowerIteration(nn.Module):
    """Model with two spectral norms, whose vectors ops with `out=` write."""

    def __init__(self) -> None:
        super().__init__()
        wrap = torch.nn.utils.parametrizations.spectral_norm
        self.first, self.last = wrap(nn.Linear(8, 8), n_power_iterations=2), wrap(nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu())


def test_a_buffer_that_an_op_writes_and_the_step_assigns_again_is_changed_in_place() -> None:
    assert_equals_eager(make(PowerIteration), make(PowerIteration), steps=3)


class OtherBuffer(PowerIteration):
    def forward(self, inputs: Tensor) -> Tensor:
        weights = self.first.parametrizations.weight[0]
        weights._u = torch.mul(weights._u, 2, out=torch.empty_like(weights._u))
        return super().forward(inputs)


def test_a_buffer_that_becomes_another_tensor_is_refused_where_an_op_wrote_that_tensor() -> None:
    with pytest.raises(CaptureError, match="_u is changed in the step"):
        capture(make(OtherBuffer))


class FilledAgain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log = {3}

    def forward(self, inputs: Tensor) -> Tensor:
        self.log.add(3)
        return self.head(inputs)


def test_a_set_that_already_has_the_member_is_no_side_effect():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equals_eager(make(FilledAgain), make(FilledAgain))


class HookOnAParameter(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.on:
            self.head.weight.register_hook(lambda gradient: gradient * 0)
            self.on = True
        return self.head(inputs)


def test_a_hook_that_the_step_registers_on_a_parameter_is_refused_and_the_step_stays_as_it_was():
    workload = make(HookOnAParameter)
    with pytest.raises(
        CaptureError, match=r"registers a hook on model\.head\.weight, which a captured step never calls"
    ):
        capture(workload)
    assert workload.model.on is False


class NormOfAGradient(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        made.register_hook(lambda gradient: self.mean.copy_(gradient.mean(0)))
        return made * 2


class CountingBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, count: Tensor) -> Tensor:
        context.save_for_backward(count)
        return inputs * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.saved_tensors[0].add_(1)
        return gradient * 2, None


class CountOfBackwards(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        return CountingBackward.apply(self.head(inputs), self.mean)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(CountOfBackwards, "the backward pass changes mean in place"), (NormOfAGradient, r"self\.mean\.copy_\(gradient")],
)
def test_a_buffer_that_only_the_backward_pass_changes_is_refused_by_name(kind: Any, words: str):
    with pytest.raises(CaptureError, match=words):
        capture(make(kind))


class CountOfBothPasses(Base):
    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.add_(1)
        made: Tensor = CountingBackward.apply(self.head(inputs), self.mean)
        return made + self.mean


def test_a_buffer_that_both_passes_change_has_the_changes_of_both() -> None:
    workload, other = make(CountOfBothPasses), make(CountOfBothPasses)
    assert_equals_eager(workload, other, steps=3)
    assert workload.model.mean.tolist() == [6.0] * 4
