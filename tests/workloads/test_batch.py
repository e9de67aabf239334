"""A batch comes apart into tensors and constants, and is rebuilt with its own types."""

import dis
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from autotune.workloads.batch import flatten_batch, ignores_list_type, make_build, map_batch, structure_difference


@dataclass
class Plain:
    x: Any
    name: str = "a.png"


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "a.png"


@dataclass(slots=True)
class Slotted:
    x: Any
    name: str = "a.png"


class Converting:
    """Object whose `__init__` must not run twice."""

    def __init__(self, x: Any) -> None:
        self.x, self.name = x + 1, "a.png"


class Words(dict[str, Any]):
    pass


Pair = namedtuple("Pair", "x name")
X = torch.arange(6.0).view(2, 3)
BATCHES = [
    X, (X, "a.png"), [X, "a.png"], {"x": X, "name": "a.png"}, OrderedDict(x=X, name="a.png"), defaultdict(list, x=X),
    Pair(X, "a.png"), Plain(X), Frozen(X), Slotted(X), Converting(X), Words(x=X, name="a.png"),
    UserDict(x=X, name="a.png"), types.SimpleNamespace(x=X, name="a.png"), {"x": X.numpy(), 3: None},
    {"in": ({"x": [X]}, Plain(X)), "n": {"a": [1, 2]}},
]  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_is_rebuilt_with_its_types_and_its_values(batch: Any):
    flat = flatten_batch(batch)
    rebuilt = make_build(flat.structure)(flat.tensors, flat.constants)
    assert type(rebuilt) is type(batch)
    again = flatten_batch(rebuilt)
    assert again.structure == flat.structure
    assert again.constants == flat.constants
    assert all(map(torch.equal, again.tensors, flat.tensors))


def test_a_defaultdict_keeps_its_factory():
    flat = flatten_batch(defaultdict(list, x=X))
    assert make_build(flat.structure)(flat.tensors, flat.constants)["missing"] == []


def collate(missing: Any = None) -> Any:
    return defaultdict((lambda: None) if missing is None else (lambda: missing), x=X)


def test_batches_of_one_collate_function_have_one_structure_though_each_has_a_new_lambda():
    structure = flatten_batch(collate()).structure
    assert structure == flatten_batch(collate()).structure
    assert structure_difference(structure, flatten_batch(collate(1)).structure) == (
        "batch makes its missing items by another function"
    )


def test_an_array_is_a_tensor_over_the_same_memory():
    array = np.zeros(3)
    flat = flatten_batch({"x": array, "words": np.array(["a", "b"])})
    flat.tensors[0].fill_(2)
    assert array.tolist() == [2, 2, 2]
    assert len(flat.constants) == 1


def test_a_container_without_tensors_is_one_constant():
    flat = flatten_batch((X, {"ids": ["a", "b"], "lengths": (1, 2)}))
    assert flat.constants == [{"ids": ["a", "b"], "lengths": (1, 2)}]


def test_an_object_that_contains_itself_ends():
    batch = types.SimpleNamespace(x=X)
    batch.me = batch
    assert len(flatten_batch(batch).tensors) == 1


def test_a_mapped_batch_keeps_what_is_no_tensor():
    assert map_batch(torch.neg, Plain(X)).name == "a.png"
    assert isinstance(map_batch(torch.neg, {"x": X.numpy()})["x"], np.ndarray)


def unpacks(model: Any, batch: Any) -> Any:
    inputs, labels = batch
    return model(inputs) - labels


def indexes(model: Any, batch: Any) -> Any:
    return model(batch[0]) - batch[1]


def passes_on(model: Any, batch: Any) -> Any:
    return model(batch)


def inspects(model: Any, batch: Any) -> Any:
    return model(batch[0]) if isinstance(batch, tuple) else 0


def slices(model: Any, batch: Any) -> Any:
    return model(*batch[:1])


def in_a_closure(model: Any, batch: Any) -> Any:
    inner = lambda: batch  # noqa: E731
    return inner()


class Trainer:
    def loss(self, model: Any, batch: Any) -> Any:
        inputs, labels = batch
        return model(inputs) - labels


def test_a_list_counts_as_a_tuple_only_where_the_loss_cannot_distinguish_them():
    assert all(map(ignores_list_type, (None, unpacks, indexes, Trainer().loss)))
    assert not any(map(ignores_list_type, (passes_on, inspects, slices, in_a_closure, partial(unpacks, None), print)))


def test_a_batch_that_is_loaded_together_with_another_variable_counts_as_passed_on(monkeypatch: pytest.MonkeyPatch):
    """Python 3.13 has one instruction for two loads."""

    def loss(model: Any, batch: Any) -> Any:
        return passes_on(model, batch)

    merged = [types.SimpleNamespace(opname="LOAD_FAST_LOAD_FAST", argval=("model", "batch"))]
    monkeypatch.setattr(dis, "get_instructions", lambda code: merged)
    assert not ignores_list_type(loss)


def test_a_batch_that_python_3_14_borrows_and_indexes_is_only_unpacked(monkeypatch: pytest.MonkeyPatch):
    def loss(model: Any, batch: Any) -> Any:
        return model(batch[0])

    steps = [("LOAD_FAST_BORROW", "batch", "batch"), ("LOAD_SMALL_INT", 0, "0"), ("BINARY_OP", 26, "[]")]
    renamed = [types.SimpleNamespace(opname=name, argval=value, argrepr=text) for name, value, text in steps]
    monkeypatch.setattr(dis, "get_instructions", lambda code: renamed)
    assert ignores_list_type(loss)


@pytest.mark.parametrize(
    ("batch", "first", "words"),
    [
        ([X], (X,), "batch is a list, not a tuple"),
        ({"x": X}, {"x": X, "y": X}, "batch has no 'y'"),
        ({"x": X, "y": X}, {"x": X}, "batch has 'y', too"),
        ((X, None), (X, X), "batch[1] is no tensor, not a tensor"),
        (Pair(X, X.numpy()), Pair(X, X), "batch.name is a numpy array, not a tensor"),
        ((X, [X, X]), (X, [X]), "batch[1] has 2 parts, not 1"),
    ],
)
def test_a_difference_names_the_part_and_the_types(batch: Any, first: Any, words: str):
    difference = structure_difference(flatten_batch(batch).structure, flatten_batch(first).structure)
    assert difference == words
