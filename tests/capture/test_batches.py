"""A step takes batches as loaders give them, trains as in eager, and is captured again only for what it reads."""

import inspect
import re
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.errors import PlanError
from autotune.runtime import recapture
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import batch_of, make


@dataclass
class Sample:
    x: Any
    y: Any
    name: str


class Row(NamedTuple):
    x: Any
    y: Any
    name: str


class Encoding(UserDict[str, Any]):
    """Mapping as tokenizers return it, with further attributes."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings


def parts(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_of(6, 8, seed=number)


def by_attribute(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def by_key(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def by_position(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def from_arrays(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(torch.as_tensor(batch["x"])), torch.from_numpy(batch["y"]))


CASES: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "dataclass": (by_attribute, lambda n: Sample(*parts(n), name=f"{n}.png")),
    "namedtuple": (by_attribute, lambda n: Row(*parts(n), name=f"{n}.png")),
    "mapping": (by_key, lambda n: Encoding(dict(zip("xy", parts(n), strict=True), n=[n] * n), encodings=object())),
    "ordered": (by_key, lambda n: OrderedDict(zip("xy", parts(n), strict=True), name=f"{n}.png")),
    "strings, None and ids": (by_key, lambda n: dict(zip("xy", parts(n), strict=True), ids=[f"{n}"], n=n, no=None)),
    "lists": (by_position, lambda n: (list if n else tuple)(parts(n))),
    "arrays": (from_arrays, lambda n: {key: part.numpy() for key, part in zip("xy", parts(n), strict=True)}),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_a_batch_trains_as_in_eager_and_is_captured_once(case: str):
    loss_fn, batch = CASES[case]
    ours, other = make(net, loss_fn=loss_fn), make(net, loss_fn=loss_fn)
    with TrainStep(ours.model, loss_fn, ours.optimizer, batch(0)) as step:
        for number in range(4):
            other.batch = batch(number)
            assert torch.equal(step(batch(number)), eager_step(other)[0])
        assert len(list(step._selector.cache)) == 1
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


@pytest.mark.filterwarnings("error")
def test_a_planned_loss_takes_a_mapping_and_a_list():
    workload = make(net)
    planned = PlannedLoss(workload.model, by_key)
    for number in range(3):
        batch = Encoding(dict(zip("xy", parts(number), strict=True)), encodings=number)
        assert torch.equal(planned(batch), by_key(workload.model, batch))
    planned.close()


def test_verification_and_inference_take_them():
    batch = Sample(*parts(0), name="a")
    workload = make(net, loss_fn=by_attribute)
    with TrainStep(workload.model, by_attribute, workload.optimizer, batch, verify=1) as step:
        step(batch)
        assert step.verified
    model = net()
    with TrainStep(model, None, None, UserDict(input=parts(0)[0])) as step:
        assert torch.equal(step(UserDict(input=parts(1)[0])), model(parts(1)[0]))


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return by_key(model, batch) * batch["scale"]


def repeated(model: nn.Module, batch: Any) -> torch.Tensor:
    return by_key(model, batch) * len(range(batch["times"]))


def numbered(number: int, **more: Any) -> dict[str, Any]:
    return {**dict(zip("xy", parts(number), strict=True)), **more}


def test_a_float_of_the_batch_that_the_step_reads_becomes_an_input():
    ours, other = make(net, loss_fn=scaled), make(net, loss_fn=scaled)
    with TrainStep(ours.model, scaled, ours.optimizer, numbered(0, scale=1.5)) as step:
        with pytest.warns(UserWarning, match=r"batch\['scale'\] changed: .*now it is 0.75"):
            step(numbered(0, scale=0.75))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(1, 5):
                step(numbered(number, scale=1 / number))
        assert len(list(step._selector.cache)) == 2
    for number, scale in enumerate((0.75, 1.0, 1 / 2, 1 / 3, 1 / 4)):
        other.batch = numbered(number, scale=scale)
        eager_step(other)
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


@pytest.mark.filterwarnings("ignore:batch.*changed")
def test_an_integer_that_the_step_reads_anew_each_time_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch):
    assert recapture.BATCH_CAPTURES == 8
    monkeypatch.setattr(recapture, "BATCH_CAPTURES", 2)  # each takes half a second
    workload = make(net, loss_fn=repeated)
    with TrainStep(workload.model, repeated, workload.optimizer, numbered(0, times=1)) as step:
        for number in range(3):
            step(numbered(number, times=number + 1))
        with pytest.raises(PlanError, match=r"batch\['times'\].*pass it in the batch as a tensor"):
            step(numbered(3, times=4))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda: numbered(0) | {"x": torch.zeros(4, 8), "y": parts(0)[1][:4]}, r"batch\['x'\] is 4x8, not 6x8; batch\['y'\] is 4, not 6"),
        (lambda: numbered(0) | {"x": parts(0)[0].T.contiguous().T}, r"batch\['x'\] has strides \(1, 6\), not \(8, 1\)"),
        (lambda: numbered(0) | {"x": parts(0)[0].numpy()}, r"batch\['x'\] is a numpy array, not a tensor"),
        (lambda: UserDict(numbered(0)), "batch is a UserDict, not a dict"),
    ],
)  # fmt: skip
def test_a_warning_about_another_batch_says_what_differs(batch: Any, words: str):
    loss_fn = lambda model, batch: F.cross_entropy(model(torch.as_tensor(batch["x"])), batch["y"])  # noqa: E731
    workload = make(net, loss_fn=loss_fn)
    with (
        TrainStep(workload.model, loss_fn, workload.optimizer, numbered(0)) as step,
        pytest.warns(UserWarning, match=words),
    ):
        step(batch())


def test_a_workload_of_arrays_is_an_input_and_no_constant():
    array = np.ones((6, 8), dtype=np.float32)
    model = nn.Linear(8, 2)
    workload = Workload(
        model, lambda model, x: model(torch.from_numpy(x)).sum(), torch.optim.SGD(model.parameters(), 0.0), array
    )
    with TrainStep(model, workload.loss_fn, workload.optimizer, array) as step:
        first = step(array)
        array *= 2
        assert step(array) != first


SCALES = {"task_2": 2.0, "task_3": 3.0}
NOTED: dict[str, Callable[[str], float]] = {
    "a comparison": lambda word: 2.0 if word == "2" else 3.0,
    "a text with it": lambda word: SCALES[f"task_{word}"],
    "a text before it": lambda word: SCALES["task_" + word],
    "a float": float,
    "an integer": int,
}
"""Ways to read a word, as numbers: Python calls a method of the word."""
UNNOTED: dict[str, Callable[[str], float]] = {
    "a join": lambda word: SCALES["_".join(["task", word])],
    "an integer of a base": lambda word: int(word, 16),
    "an expression": lambda word: float(re.match(r"\d", word)[0]),
    "an array": lambda word: float(np.array([word]).astype(float)[0]),
}
"""Ways by functions written in C, which call no method of the word."""


@pytest.mark.filterwarnings("ignore:batch.*changed")
def test_a_recorded_step_is_captured_again_for_another_word_that_it_reads():
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert inspect.currentframe() is not None  # Dynamo refuses it
        return by_key(model, batch) * NOTED["a comparison"](batch["word"])

    ours, other = make(net, loss_fn=loss_fn), make(net, loss_fn=loss_fn)
    with TrainStep(ours.model, loss_fn, ours.optimizer, numbered(0, word="2")) as step:
        assert step._selector.first.recorded
        for number, word in enumerate("232"):
            other.batch = numbered(number, word=word)
            assert torch.equal(step(other.batch), eager_step(other)[0])
        assert len(list(step._selector.cache)) == 2


@pytest.mark.filterwarnings("ignore:batch.*changed")
@pytest.mark.parametrize("ways", [NOTED, UNNOTED], ids=["noted", "unnoted"])
def test_a_recorded_step_is_not_valid_for_another_word_however_it_reads_it(ways: dict[str, Callable[[str], float]]):
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert inspect.currentframe() is not None
        scale = 0.0
        for way, read in ways.items():
            scale += read(batch[way])
        return by_key(model, batch) * (scale / len(ways))

    ours, other = make(net, loss_fn=loss_fn), make(net, loss_fn=loss_fn)
    words = dict.fromkeys(ways, "2")
    with TrainStep(ours.model, loss_fn, ours.optimizer, numbered(0, **words), other_shapes="eager") as step:
        assert step._selector.first.recorded
        for way in ways:
            for changed in ({}, {way: "3"}):
                other.batch = numbered(0, **{**words, **changed})
                assert torch.equal(step(other.batch), eager_step(other)[0])
                assert step.is_eager == bool(changed)


@pytest.mark.filterwarnings("error")
def test_a_recorded_step_is_captured_once_for_words_that_it_does_not_read():
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert inspect.currentframe() is not None
        assert len([batch["name"], *batch["names"]]) == 3
        kept = {key: part for key, part in batch.items() if not isinstance(part, str)}
        return by_key(model, kept) * SCALES["task_" + batch["word"]]

    ours, other = make(net, loss_fn=loss_fn), make(net, loss_fn=loss_fn)
    with TrainStep(ours.model, loss_fn, ours.optimizer, numbered(0, word="2", name="0", names=["a", "b"])) as step:
        for number in range(3):
            other.batch = numbered(number, word="2", name=f"{number}.png", names=[f"{number}", "b"])
            assert torch.equal(step(other.batch), eager_step(other)[0])
        assert len(list(step._selector.cache)) == 1
        assert step._selector.first.recorded
