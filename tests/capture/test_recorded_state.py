"""State of the user's Python that a recorded step reads, wherever it is kept: a change of it counts from the next step."""

import cProfile
import functools
import inspect
import multiprocessing
import random
import sys
import threading
import time
from abc import ABC
from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autotune.capture.python.side_effects import SideEffectWarning
from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.capture import twins
from tests.support.eager import eager_step
from tests.support.small import batch_of, labelled_loss, make, mlp

Change = Callable[[], None]


def weighted(read: Callable[[], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """Return a loss times what a function reads, which Dynamo refuses."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inspect.currentframe()
        return labelled_loss(model, batch[:2]) * read()

    return loss_fn


def arguments_of_a_partial() -> tuple[Workload, Change]:
    def loss_fn(settings: dict[str, float], model: nn.Module, batch: Any, *, factors: list[float]) -> Tensor:
        inspect.currentframe()
        return labelled_loss(model, batch) * settings["weight"] * factors[0]

    settings, factors = {"weight": 1.0}, [2.0]

    def change() -> None:
        settings["weight"] = factors[0] = 3.0

    return make(mlp, loss_fn=partial(loss_fn, settings, factors=factors)), change


def a_namespace() -> tuple[Workload, Change]:
    settings = SimpleNamespace(inner=SimpleNamespace(weight=1.0))
    return make(mlp, loss_fn=weighted(lambda: settings.inner.weight)), lambda: setattr(settings.inner, "weight", 3.0)


def an_absent_attribute_of_a_namespace() -> tuple[Workload, Change]:
    settings = SimpleNamespace()
    loss_fn = weighted(lambda: getattr(settings, "weight", 1.0))
    return make(mlp, loss_fn=loss_fn), lambda: setattr(settings, "weight", 3.0)


def a_learning_rate() -> tuple[Workload, Change]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (group,) = optimizer.param_groups
    return make(mlp, loss_fn=weighted(lambda: optimizer.param_groups[0]["lr"])), lambda: group.update(lr=3.0)


def a_schedule() -> tuple[Workload, Change]:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)

    def change() -> None:
        schedule.optimizer.step()
        schedule.step()

    return make(mlp, loss_fn=weighted(lambda: schedule.get_last_lr()[0])), change


def scaled(loss: Tensor) -> Tensor:
    return loss * scaled.weight  # type: ignore[attr-defined]


def an_attribute_of_a_function() -> tuple[Workload, Change]:
    scaled.weight = 1.0  # type: ignore[attr-defined]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inspect.currentframe()
        return scaled(labelled_loss(model, batch))

    return make(mlp, loss_fn=loss_fn), lambda: setattr(scaled, "weight", 3.0)


def the_second_closure_of_one_function() -> tuple[Workload, Change]:
    def multiply(settings: dict[str, float]) -> Callable[[], float]:
        return lambda: settings["weight"]

    first, second = {"weight": 1.0}, {"weight": 1.0}
    factors = multiply(first), multiply(second)
    return make(mlp, loss_fn=weighted(lambda: factors[0]() * factors[1]())), lambda: second.update(weight=3.0)


def one_of_two_names_of_a_tensor() -> tuple[Workload, Change]:
    weights = SimpleNamespace()
    weights.first = weights.second = torch.full((), 1.0)
    loss_fn = weighted(lambda: weights.first - 2 * weights.second)
    return make(mlp, loss_fn=loss_fn), lambda: setattr(weights, "second", torch.full((), 3.0))


class Settings:
    weight = 1.0


def an_object_of_the_batch() -> tuple[Workload, Change]:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inspect.currentframe()
        return labelled_loss(model, batch[:2]) * batch[2].weight

    workload, settings = make(mlp, loss_fn=loss_fn), Settings()
    workload.batch = (*workload.batch, settings)
    return workload, lambda: setattr(settings, "weight", 3.0)


def a_closure_behind_a_decorator() -> tuple[Workload, Change]:
    settings = {"weight": 1.0}

    @torch.no_grad()
    def weight() -> float:
        return settings["weight"]

    return make(mlp, loss_fn=weighted(weight)), lambda: settings.update(weight=3.0)


def a_class_in_a_closure() -> tuple[Workload, Change]:
    class CFG:
        weight = 1.0

    return make(mlp, loss_fn=weighted(lambda: CFG.weight)), lambda: setattr(CFG, "weight", 3.0)


def an_attribute_of_a_base_class() -> tuple[Workload, Change]:
    class Base:
        inner = SimpleNamespace(weight=1.0)

    class CFG(Base):
        pass

    return make(mlp, loss_fn=weighted(lambda: CFG.inner.weight)), lambda: setattr(Base.inner, "weight", 3.0)


def an_override_in_a_subclass() -> tuple[Workload, Change]:
    class Base:
        weight = 1.0

    class CFG(Base):
        pass

    return make(mlp, loss_fn=weighted(lambda: CFG.weight)), lambda: setattr(CFG, "weight", 3.0)


def a_class_within_a_class() -> tuple[Workload, Change]:
    class CFG:
        class Model:
            weight = 1.0

    return make(mlp, loss_fn=weighted(lambda: CFG.Model.weight)), lambda: setattr(CFG.Model, "weight", 3.0)


class DotDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


def a_dictionary_that_answers_for_attributes() -> tuple[Workload, Change]:
    class CFG:
        inner = DotDict(weight=1.0)

    return make(mlp, loss_fn=weighted(lambda: CFG.inner.weight)), lambda: CFG.inner.update(weight=3.0)


def an_attribute_of_a_class_that_may_be_missing() -> tuple[Workload, Change]:
    class CFG:
        pass

    return make(mlp, loss_fn=weighted(lambda: getattr(CFG, "weight", 1.0))), lambda: setattr(CFG, "weight", 3.0)


class Imported:
    weight = 1.0


def a_class_that_a_function_imports() -> tuple[Workload, Change]:
    Imported.weight = 1.0

    def weight() -> float:
        from tests.capture.test_recorded_state import Imported

        return Imported.weight

    return make(mlp, loss_fn=weighted(weight)), lambda: setattr(Imported, "weight", 3.0)


def a_module_that_a_function_imports_relatively() -> tuple[Workload, Change]:
    twins.BETA = 1.0  # type: ignore[attr-defined]

    def weight() -> float:
        from . import twins

        return twins.BETA  # type: ignore[attr-defined,no-any-return]

    return make(mlp, loss_fn=weighted(weight)), lambda: setattr(twins, "BETA", 3.0)


def the_class_of_an_object() -> tuple[Workload, Change]:
    class Scale:
        weight = 1.0

        def read(self) -> float:
            return type(self).weight

    scale = Scale()
    return make(mlp, loss_fn=weighted(scale.read)), lambda: setattr(Scale, "weight", 3.0)


BETA = 1.0


def a_module_that_a_function_imports() -> tuple[Workload, Change]:
    this = sys.modules[__name__]
    this.BETA = 1.0  # type: ignore[attr-defined]

    def weight() -> float:
        from tests.capture.test_recorded_state import BETA

        return BETA

    return make(mlp, loss_fn=weighted(weight)), lambda: setattr(this, "BETA", 3.0)


def a_keyword_only_default() -> tuple[Workload, Change]:
    settings = {"weight": 1.0}

    def loss_fn(model: nn.Module, batch: Any, *, config: dict[str, float] = settings) -> Tensor:
        inspect.currentframe()
        return labelled_loss(model, batch) * config["weight"]

    return make(mlp, loss_fn=loss_fn), lambda: settings.update(weight=3.0)


def a_user_dict() -> tuple[Workload, Change]:
    settings = UserDict(weight=1.0)
    return make(mlp, loss_fn=weighted(lambda: settings["weight"])), lambda: settings.update(weight=3.0)


def a_value_that_processes_share() -> tuple[Workload, Change]:
    weight = multiprocessing.Value("d", 1.0)
    return make(mlp, loss_fn=weighted(lambda: weight.value)), lambda: setattr(weight, "value", 3.0)


def an_array_that_processes_share() -> tuple[Workload, Change]:
    weights = multiprocessing.Array("d", [1.0])
    return make(mlp, loss_fn=weighted(lambda: weights[0])), lambda: weights.__setitem__(0, 3.0)


def bytes_that_change() -> tuple[Workload, Change]:
    weights = bytearray([1])
    return make(mlp, loss_fn=weighted(lambda: weights[0])), lambda: weights.__setitem__(0, 3)


def a_tensor_in_a_list() -> tuple[Workload, Change]:
    weights = [torch.ones(4)]
    loss_fn = weighted(lambda: weights[0].sum() / len(weights[0]))
    return make(mlp, loss_fn=loss_fn), lambda: setattr(weights[0], "data", torch.ones(8))


PLACES = (
    arguments_of_a_partial, a_namespace, an_absent_attribute_of_a_namespace, a_learning_rate, a_schedule,
    an_attribute_of_a_function, the_second_closure_of_one_function, one_of_two_names_of_a_tensor, an_object_of_the_batch,
    a_closure_behind_a_decorator, a_class_in_a_closure, an_attribute_of_a_base_class, the_class_of_an_object,
    an_override_in_a_subclass, a_class_within_a_class, a_dictionary_that_answers_for_attributes,
    an_attribute_of_a_class_that_may_be_missing, a_class_that_a_function_imports, a_module_that_a_function_imports_relatively,
    a_module_that_a_function_imports, a_keyword_only_default, a_user_dict, a_value_that_processes_share,
    an_array_that_processes_share, bytes_that_change, a_tensor_in_a_list,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* changed")
@pytest.mark.parametrize("place", PLACES)
def test_a_change_counts_from_the_next_step(place: Callable[[], tuple[Workload, Change]]):
    (workload, change), (twin, change_twin) = place(), place()
    recaptured = place in (
        a_namespace,
        one_of_two_names_of_a_tensor,
    )  # of others eager shows that the change was noticed
    arguments = workload.model, workload.loss_fn, workload.optimizer, workload.batch
    with TrainStep(*arguments, other_shapes="replan" if recaptured else "eager") as step:
        assert step._selector.first.recorded
        for number in range(3):
            if number == 1:
                change()
                change_twin()
            assert torch.equal(step(workload.batch), eager_step(twin)[0])
            assert step.is_eager == (number > 0 and not recaptured)
        assert len(list(step._selector.cache)) == 1 + recaptured


def test_an_array_with_nan_is_equal_to_itself():
    priors = np.array([0.5, np.nan])
    workload = make(mlp, loss_fn=weighted(lambda: float(np.nanmean(priors))))
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        for _ in range(3):
            step(workload.batch)


def test_an_object_that_can_be_iterated_is_no_iterator_that_the_step_advances():
    class Loader:
        def __init__(self) -> None:
            self.batches = [1, 2]
            self.source = iter(self.batches)

        def __iter__(self) -> "Loader":
            return self

        def __next__(self) -> int:
            return next(self.source)

        def __len__(self) -> int:
            return len(self.batches)

    loader = Loader()
    assert capture(make(mlp, loss_fn=weighted(lambda: len(loader)))).recorded
    with pytest.raises(CaptureError, match=r"source is an iterator, which a captured step does not advance"):
        capture(make(mlp, loss_fn=weighted(lambda: next(loader))))


def test_a_recorded_step_is_valid_for_its_default_device_and_dtype_of_autocast_alone():
    workload, dtype = make(mlp, loss_fn=weighted(lambda: 1.0)), torch.get_autocast_dtype("cpu")
    guards, tensors = capture(workload).guards, list(workload.batch)
    with torch.device("meta"):
        assert not guards.hold(tensors, [])
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        assert not guards.hold(tensors, [])
    finally:
        torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        assert not guards.hold(tensors, [])
    finally:
        torch.set_autocast_cache_enabled(True)
    assert guards.hold(tensors, [])


class Lazy(nn.Module):
    """A model that makes a layer in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(8, 8), None

    def forward(self, inputs: Tensor) -> Tensor:
        inspect.currentframe()
        if self.head is None:
            self.head = nn.Linear(8, 4)
        return self.head(self.entry(inputs))


def test_a_layer_that_is_made_in_the_step_is_refused_by_name_and_not_left_behind():
    workload = make(Lazy)
    with pytest.raises(
        CaptureError, match=r"model\.head is changed in the step.*; run one step in plain PyTorch first"
    ):
        capture(workload)
    assert workload.model.head is None
    workload.model(workload.batch[0])
    assert capture(workload).recorded


class Hidden(nn.Module):
    """A model that keeps its output for the next step."""

    hidden: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("hidden", None)

    def forward(self, inputs: Tensor) -> Tensor:
        inspect.currentframe()
        made = self.layer(inputs)
        before = torch.zeros_like(made) if self.hidden is None else self.hidden
        self.hidden = made.detach()
        return made + before


class Masks(nn.Module):
    """A model that fills a dictionary in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.hidden: dict[int, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        inspect.currentframe()
        if 4 not in self.hidden:
            self.hidden[4] = torch.ones(4)
        return self.layer(inputs) * self.hidden[4]


@pytest.mark.parametrize("model", [Hidden, Masks])
def test_a_dictionary_that_gets_its_first_tensor_in_the_step_is_none_that_the_step_makes(model: type[nn.Module]):
    workload = make(model)
    with pytest.raises(CaptureError, match=r"model\.hidden is changed in the step at .*run one step in plain PyTorch"):
        capture(workload)
    assert not workload.model.hidden


@functools.cache
def mask(size: int) -> Tensor:
    return torch.arange(size) + 1.0


class Caches:
    __slots__ = ("computed",)

    def read(self) -> Tensor:
        if not hasattr(self, "computed"):
            self.computed = torch.ones(())
        return self.computed


class Bias(ABC):  # noqa: B024 - abstract for its `__slots__` alone
    """An object whose base has `__slots__`."""

    @functools.cached_property
    def shift(self) -> Tensor:
        return torch.ones(4) * 3


class WithCaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 4), Bias()

    @functools.cached_property
    def slope(self) -> Tensor:
        return torch.ones(4) * 2

    def forward(self, inputs: Tensor) -> Tensor:
        inspect.currentframe()
        return self.layer(inputs) * mask(4) * self.slope + self.bias.shift


@pytest.mark.filterwarnings("ignore:.*(slope|shift) changes in the step")
def test_caches_that_report_no_write_keep_no_tensor_of_the_capture():
    mask.cache_clear()
    workload, twin = make(WithCaches), make(WithCaches)
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        assert step._selector.first.recorded
        assert "slope" not in vars(workload.model)
        assert not vars(workload.model.bias)
        assert torch.equal(mask(4), torch.arange(4) + 1.0)
        assert torch.equal(step(workload.batch), eager_step(twin)[0])
    caches = Caches()
    with pytest.raises(CaptureError, match="computed is changed in the step"):
        capture(make(mlp, loss_fn=weighted(caches.read)))
    assert not hasattr(caches, "computed")


def test_a_capture_under_a_profiler_of_python_leaves_no_class_patched():
    workload, profile = make(Lazy), cProfile.Profile()
    workload.model(workload.batch[0])
    profile.enable()
    try:
        assert capture(workload).recorded
    finally:
        profile.disable()
    assert "__getattribute__" not in vars(Lazy)


def test_another_thread_may_draw_and_read_during_a_capture():
    workload, stop, drawn = make(Lazy), threading.Event(), list[float]()
    workload.model(workload.batch[0])

    def prepare_batches() -> None:
        while not stop.is_set():
            drawn.append(random.random())
            workload.model.seen = len(drawn)
            time.sleep(1e-4)

    thread = threading.Thread(target=prepare_batches, daemon=True)
    thread.start()
    try:
        assert capture(workload).recorded
    finally:
        stop.set()
        thread.join()
    assert workload.model.seen == len(drawn), "what another thread writes is not restored"


def test_a_container_of_a_class_that_the_step_changes_is_refused_and_left_as_it_was():
    class CFG:
        stats: ClassVar[dict[str, int]] = {"n": 1}

    def read() -> int:
        CFG.stats["n"] += 1
        return CFG.stats["n"]

    workload = make(mlp, loss_fn=weighted(read))
    with pytest.raises(CaptureError, match=r"CFG\.stats.* changed in the step"):
        capture(workload)
    assert CFG.stats == {"n": 1}


def test_a_number_of_a_class_that_the_step_changes_is_refused_and_left_as_it_was():
    class Base:
        count = 1

    class CFG(Base):
        pass

    def read() -> int:
        Base.count += 1
        return CFG.count

    workload = make(mlp, loss_fn=weighted(read))
    with pytest.raises(CaptureError, match=r"Base\.count is changed in the step"):
        capture(workload)
    assert (Base.count, vars(CFG).get("count")) == (1, None)


STEPS_SO_FAR = 0


def a_global() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def read() -> int:
        global STEPS_SO_FAR  # noqa: PLW0603
        STEPS_SO_FAR += 1
        return STEPS_SO_FAR

    return read, lambda: STEPS_SO_FAR


def a_variable_of_a_closure() -> tuple[Callable[[], Any], Callable[[], Any]]:
    count = 0

    def read() -> int:
        nonlocal count
        count += 1
        return count

    return read, lambda: count


def an_array() -> tuple[Callable[[], Any], Callable[[], Any]]:
    counts = np.zeros(1)

    def read() -> float:
        counts[0] += 1
        return float(counts[0])

    return read, lambda: float(counts[0])


def a_dictionary_in_a_dictionary() -> tuple[Callable[[], Any], Callable[[], Any]]:
    stats = {"kl": {"step": 0}}

    def read() -> int:
        stats["kl"]["step"] += 1
        return stats["kl"]["step"]

    return read, lambda: stats["kl"]["step"]


def an_array_in_a_dictionary() -> tuple[Callable[[], Any], Callable[[], Any]]:
    counts = {"step": np.zeros(1)}

    def read() -> float:
        counts["step"][0] += 1
        return float(counts["step"][0])

    return read, lambda: float(counts["step"][0])


def a_default_value() -> tuple[Callable[[], Any], Callable[[], Any]]:
    state = [0]

    def read(counts: list[int] = state) -> int:
        counts[0] += 1
        return counts[0]

    return read, lambda: state[0]


def an_argument_of_a_partial() -> tuple[Callable[[], Any], Callable[[], Any]]:
    state = {"step": 0}

    def read(counts: dict[str, int]) -> int:
        counts["step"] += 1
        return counts["step"]

    return partial(read, counts=state), lambda: state["step"]


COUNTED = (
    a_global, a_variable_of_a_closure, an_array, a_dictionary_in_a_dictionary, an_array_in_a_dictionary, a_default_value,
    an_argument_of_a_partial,
)  # fmt: skip


@pytest.mark.parametrize("place", COUNTED)
def test_what_a_step_counts_is_refused_and_left_as_it_was(place: Callable[[], Any]):
    read, count = place()
    workload = make(mlp, loss_fn=weighted(read))
    with pytest.raises(CaptureError, match="changed in the step"):
        capture(workload)
    assert count() == 0


LAST = 0.0


@pytest.mark.parametrize("kind", ["global", "nonlocal"])
def test_what_a_step_only_assigns_is_left_as_it_was_with_a_warning(kind: str):
    last = 0.0

    def assign_global() -> float:
        global LAST  # noqa: PLW0603
        LAST = torch.ones(1)
        return 1.0

    def assign_variable() -> float:
        nonlocal last
        last = torch.ones(1)
        return 1.0

    workload = make(mlp, loss_fn=weighted(assign_global if kind == "global" else assign_variable))
    with pytest.warns(SideEffectWarning, match="LAST" if kind == "global" else "last"):
        capture(workload)
    assert (LAST, last) == (0.0, 0.0)


class Lookups(dict):
    hits = 0

    def lookup(self, key: str) -> float:
        self.hits = self.hits + 1
        return self[key]


def test_an_attribute_of_a_dictionary_that_the_step_changes_is_no_item_of_it():
    lookups = Lookups(weight=1.0)
    workload = make(mlp, loss_fn=weighted(lambda: lookups.lookup("weight")))
    with pytest.raises(CaptureError, match=r"hits is changed in the step"):
        capture(workload)
    assert dict(lookups) == {"weight": 1.0}
    assert lookups.hits == 0


def test_an_array_that_the_step_makes_may_be_changed_in_it():
    def read() -> float:
        item = SimpleNamespace(mask=np.zeros(2))
        item.mask[0] = 1
        return float(item.mask.sum())

    workload, twin = (make(mlp, loss_fn=weighted(read)) for _ in range(2))
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        assert torch.equal(step(workload.batch), eager_step(twin)[0])


def test_a_global_that_is_filled_once_is_no_change_that_the_next_step_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "STEPS_SO_FAR", None)

    def read() -> int:
        global STEPS_SO_FAR  # noqa: PLW0603
        if STEPS_SO_FAR is None:
            STEPS_SO_FAR = 2
        return STEPS_SO_FAR

    workload, twin = (make(mlp, loss_fn=weighted(read)) for _ in range(2))
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        assert torch.equal(step(workload.batch), eager_step(twin)[0])


def test_another_hook_of_all_modules_counts_although_their_number_is_the_same():
    hooks = torch.nn.modules.module
    workload, twin = (make(mlp, loss_fn=weighted(lambda: 1.0)) for _ in range(2))
    handle = hooks.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
            assert torch.equal(step(workload.batch), eager_step(twin)[0])
            handle.remove()
            handle = hooks.register_module_forward_hook(lambda module, inputs, output: output * 3)
            assert torch.equal(step(workload.batch), eager_step(twin)[0])
    finally:
        handle.remove()


def test_attributes_of_an_imported_module_that_the_function_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(twins, "BETA", 1.0, raising=False)
    monkeypatch.setattr(twins, "weight", 0, raising=False)

    def scale() -> float:
        return Settings().weight

    def read() -> float:
        from . import twins

        return twins.BETA * scale()  # type: ignore[attr-defined,no-any-return]

    workload = make(mlp, loss_fn=weighted(read))
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        for number in range(3):
            monkeypatch.setattr(twins, "weight", number)
            step(workload.batch)


def test_an_import_that_fails_or_is_blocked_is_no_fault_of_the_capture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "blocked_by_this_test", None)

    def read() -> float:
        try:
            import blocked_by_this_test  # noqa: F401
        except ImportError:
            return 2.0
        return 1.0

    capture(make(mlp, loss_fn=weighted(read)))


def test_attributes_of_a_namespace_that_the_step_does_not_read_may_change():
    settings = SimpleNamespace(weight=2.0, epoch=0)
    workload = make(mlp, loss_fn=weighted(lambda: settings.weight))
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, other_shapes="error") as step:
        for settings.epoch in range(3):
            step(workload.batch)
        assert len(list(step._selector.cache)) == 1


def test_a_namespace_that_the_step_changes_is_refused_and_stays_as_it_was():
    state = SimpleNamespace(calls=1)

    def count() -> int:
        state.calls += 1
        return state.calls

    with pytest.raises(CaptureError, match=r"state\.calls is changed in the step"):
        capture(make(mlp, loss_fn=weighted(count)))
    assert state.calls == 1


@pytest.mark.filterwarnings("ignore:.* changed", "ignore:a batch of")
def test_a_shape_that_dynamo_refuses_is_recorded_though_a_float_is_an_input_of_the_others():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.beta = mlp(), 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) < 5:
                inspect.currentframe()
            return self.body(inputs) * self.beta

    ours, other = make(Net), make(Net)
    with TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch) as step:
        for rows, beta in ((6, 1.0), (6, 0.5), (4, 0.5), (4, 0.25), (6, 0.25)):
            ours.model.beta = other.model.beta = beta
            ours.batch = other.batch = batch_of(rows, 8)
            assert torch.equal(step(ours.batch), eager_step(other)[0])
