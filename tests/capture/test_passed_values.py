"""Numbers and words that a step only passes on to its result: each step returns those of its own batch and model."""

import inspect
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.small import batch_of, labelled_loss, make, mlp

Named = namedtuple("Named", "loss name factor")


def as_dict(loss: Tensor, name: str, factor: Any) -> Any:
    return loss, {"nested": [name, {"factor": factor}], "doubled": loss * 2, "none": None}


def as_named_tuple(loss: Tensor, name: str, factor: Any) -> Any:
    return Named(loss, name, factor)


def as_ordered_dict(loss: Tensor, name: str, factor: Any) -> Any:
    return loss, OrderedDict(name=name, factor=factor)


def named_workload(structure: Any, *, recorded: bool) -> Workload:
    """Return a workload whose loss passes on a word of the batch and a number of the model."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if recorded:
            inspect.currentframe()
        return structure(labelled_loss(model, batch[:2]), batch[2], model.factor)

    workload = make(mlp, loss_fn=loss_fn)
    workload.model.factor = 1.5
    workload.batch = (*batch_of(6, 8), "first")
    return workload


def same(found: Any, expected: Any) -> bool:
    leaves, others = (torch.utils._pytree.tree_leaves(tree) for tree in (found, expected))
    return len(leaves) == len(others) and all(
        torch.equal(leaf, other) if isinstance(leaf, Tensor) else type(leaf) is type(other) and leaf == other
        for leaf, other in zip(leaves, others, strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*changed")
@pytest.mark.parametrize(
    ("kind", "structure", "recorded"),
    [
        (TrainStep, as_dict, False), (TrainStep, as_named_tuple, True), (TrainStep, as_ordered_dict, True),
        (PlannedLoss, as_dict, True), (PlannedLoss, as_named_tuple, False), (PlannedLoss, as_ordered_dict, False),
    ],
)  # fmt: skip
def test_results_are_those_of_the_step_itself(structure: Any, recorded: bool, kind: Any):
    workload = named_workload(structure, recorded=recorded)
    arguments = (workload.optimizer, workload.batch) if kind is TrainStep else ()
    step = kind(workload.model, workload.loss_fn, *arguments)
    for number, name in enumerate(("first", "second", "third")):
        workload.model.factor = 1.5 if number < 2 else 3.5
        batch = (*batch_of(6, 8, seed=number), name)
        with torch.no_grad():
            expected = workload.loss_fn(workload.model, batch)
        assert same(step(batch), expected)


def test_a_name_that_changes_with_every_batch_needs_no_further_capture_where_dynamo_refuses():
    workload = named_workload(as_dict, recorded=True)
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        for number in range(20):
            result = step((*batch_of(6, 8, seed=number), f"file {number}"))
            assert result[1]["nested"][0] == f"file {number}"
        assert len(list(step._selector.cache)) == 1


@pytest.mark.filterwarnings("ignore:.*changed")
def test_a_number_that_is_also_used_is_compared():
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return labelled_loss(model, batch) * model.factor, model.factor

    workload = make(mlp, loss_fn=loss_fn)
    workload.model.factor = 2
    with TrainStep(workload.model, loss_fn, workload.optimizer, workload.batch) as step:
        step(workload.batch)
        workload.model.factor = 3
        with torch.no_grad():
            expected = loss_fn(workload.model, workload.batch)
        assert same(step(workload.batch), expected)
        assert len(list(step._selector.cache)) == 2


@pytest.mark.filterwarnings("ignore:.*changed")
def test_a_word_of_a_list_and_one_that_is_also_read_are_those_of_the_batch():
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        inspect.currentframe()
        return labelled_loss(model, batch[:2]), batch[2][1], batch[3], batch[3].upper()

    workload = make(mlp, loss_fn=loss_fn)
    with TrainStep(workload.model, loss_fn, workload.optimizer, (*workload.batch, ["a", "b"], "c")) as step:
        for names, word in ((["a", "b"], "c"), (["d", "e"], "c"), (["f", "g"], "h")):
            assert step((*workload.batch, names, word))[1:] == (names[1], word, word.upper())
        assert len(list(step._selector.cache)) == 2
