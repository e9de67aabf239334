"""Batches of every form."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, run, state, train
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]
Pair = collections.namedtuple("Pair", ("inputs", "labels"))


@dataclasses.dataclass
class Sample:
    """A batch as a dataclass."""

    inputs: torch.Tensor
    labels: torch.Tensor


def _of(get: Callable[[Any], tuple[Any, Any]]) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = get(batch)
        return F.cross_entropy(model(inputs), labels)

    return loss


def _fields(batch: Any) -> tuple[Any, Any]:
    return batch.inputs, batch.labels


def _items(batch: Any) -> tuple[Any, Any]:
    return batch["inputs"], batch["labels"]


def _steps(way: Way, data: list[Any], loss: Callable[..., Any] = loss_fn) -> Tensors:
    model = net()
    optimizer = adamw(model)
    yield from run(way.step(model, loss, optimizer, data[0]), data)
    yield from state(model, optimizer)


def batch_namedtuple(way: Way) -> Tensors:
    """Pass a named tuple."""
    yield from _steps(way, [Pair(*batch) for batch in batches()], _of(_fields))


def batch_dataclass(way: Way) -> Tensors:
    """Pass a dataclass."""
    yield from _steps(way, [Sample(*batch) for batch in batches()], _of(_fields))


def batch_batchencoding(way: Way) -> Tensors:
    """Pass a BatchEncoding of transformers."""
    from transformers import BatchEncoding

    yield from _steps(way, [BatchEncoding({"inputs": a, "labels": b}) for a, b in batches()], _of(_items))


def batch_with_numpy_and_none(way: Way) -> Tensors:
    """Pass a dict with a numpy array and None."""

    def get(batch: Any) -> tuple[Any, Any]:
        inputs = torch.as_tensor(batch["inputs"])
        return inputs if batch["mask"] is None else inputs * batch["mask"], batch["labels"]

    yield from _steps(way, [{"inputs": a.numpy(), "labels": b, "mask": None} for a, b in batches()], _of(get))


def batch_with_a_changing_number(way: Way) -> Tensors:
    """Pass a number that the loss multiplies by and that changes in every step."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * batch[2]

    yield from _steps(way, [(*batch, 1.0 + 0.5 * number) for number, batch in enumerate(batches())], loss)


def batch_with_strings(way: Way) -> Tensors:
    """Pass a word by which the loss chooses a branch."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * (2.0 if batch[2] == "twice" else 1.0)

    yield from _steps(way, [(*batch, ("once", "twice")[number % 2]) for number, batch in enumerate(batches(6))], loss)


def file_names_in_the_batch_for_40_steps(way: Way) -> Tensors:
    """Pass names that nothing reads, another one in each of 40 steps."""
    yield from _steps(way, [(*batch, [f"{number}.png"]) for number, batch in enumerate(batches(40))])


def batch_list_from_dataloader_vs_tuple_at_start(way: Way) -> Tensors:
    """Begin with a tuple, go on with a DataLoader's lists."""
    first, *others = batches()
    yield from _steps(way, [first, *map(list, others)])


def dataloader_workers_last_smaller_batch(way: Way) -> Tensors:
    """Load with forked workers that start after a step; the last batch is smaller."""
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(4), strict=True)))
    model = net()
    optimizer = adamw(model)
    step = way.step(model, loss_fn, optimizer, batches()[0])
    for _ in range(2):
        loader = DataLoader(data, 12, num_workers=2, multiprocessing_context="fork")
        yield from run(step, list(loader))
    yield from state(model, optimizer)


def variable_length_text(way: Way) -> Tensors:
    """Train a GPT-2 with labels on texts of changing lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = adamw(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    data = [torch.randint(50, (4, length)) for length in (8, 16, 11, 8, 16, 1 + 1)]
    yield from run(way.step(model, loss, optimizer, data[0]), data)
    yield from state(model, optimizer)


def batch_of_another_dtype(way: Way) -> Tensors:
    """Pass inputs in float64 after two steps, which the loss casts."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0].float()), batch[1])

    data = [(a.double() if number > 1 else a, b) for number, (a, b) in enumerate(batches())]
    yield from _steps(way, data, loss)


def batch_with_other_strides(way: Way) -> Tensors:
    """Pass transposed inputs after two steps."""
    data = [(a.t().contiguous().t() if number > 1 else a, b) for number, (a, b) in enumerate(batches())]
    yield from _steps(way, data)


def batch_of_one_row(way: Way) -> Tensors:
    """Pass a last batch of one row, to layer norm."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = adamw(model)
    data = [*batches(3), *batches(2, rows=1)]
    yield from run(way.step(model, loss_fn, optimizer, data[0]), data)
    yield from state(model, optimizer)


def batch_of_one_row_in_batch_norm(way: Way) -> Tensors:
    """Pass a last batch of one row to batch norm, which eager refuses."""
    yield from _steps(way, [*batches(2), *batches(1, rows=1)])


def empty_last_batch(way: Way) -> Tensors:
    """Pass an empty last batch: the mean loss is NaN, and so is the model."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [*batches(2), *batches(1, rows=0)]
    yield from run(way.step(model, loss_fn, optimizer, data[0]), data)
    yield from state(model, optimizer)


def batch_that_requires_a_gradient(way: Way) -> Tensors:
    """Want the gradient of the inputs, as for saliency."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    for inputs, labels in batches(3):
        inputs.requires_grad_()
        loss_of((inputs, labels)).backward()
        yield inputs.grad


def batch_that_requires_a_gradient_from_the_third_step_on(way: Way) -> Tensors:
    """Want the gradient of the inputs in later steps only."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    for number, (inputs, labels) in enumerate(batches(4)):
        inputs.requires_grad_(number > 1)
        loss_of((inputs, labels)).backward()
        yield inputs.grad if inputs.grad is not None else torch.zeros(1)


def encoder_outside_of_the_planned_loss(way: Way) -> Tensors:
    """Pass features that another network computes, which trains too."""
    encoder, model = nn.Linear(16, 16), net()
    optimizer = torch.optim.SGD([*encoder.parameters(), *model.parameters()], lr=0.1)
    loss_of = way.loss(model, loss_fn)
    data = [(encoder, *batch) for batch in batches(3)]
    for _, inputs, labels in data:
        loss_of((encoder(inputs), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from state(encoder)
    yield from state(model, optimizer)


def same_tensor_twice_in_the_batch(way: Way) -> Tensors:
    """Pass one tensor in two places, then two tensors."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) + model(batch[2]).square().mean()

    data = [(a, b, a) if number < 2 else (a, b, a + 1) for number, (a, b) in enumerate(batches(4))]
    yield from _steps(way, data, loss)


def batch_kept_and_changed_by_the_loop(way: Way) -> Tensors:
    """Write each batch into one buffer of the loop, before `backward()` of the last one."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    inputs = torch.empty(8, 16)
    for values, labels in batches(4):
        inputs.copy_(values)
        yield from train(loss_of, optimizer, [(inputs, labels)])
    yield from state(model, optimizer)


def number_of_an_array_in_the_batch(way: Way) -> Tensors:
    """Pass a numpy number that changes."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * float(batch[2])

    data = [(*batch, np.float32(1 + number)) for number, batch in enumerate(batches(4))]
    yield from _steps(way, data, loss)


CASES = (
    batch_namedtuple, batch_dataclass, batch_batchencoding, batch_with_numpy_and_none, batch_with_a_changing_number,
    batch_with_strings, file_names_in_the_batch_for_40_steps, batch_list_from_dataloader_vs_tuple_at_start,
    dataloader_workers_last_smaller_batch, variable_length_text, batch_of_another_dtype, batch_with_other_strides,
    batch_of_one_row, batch_of_one_row_in_batch_norm, empty_last_batch, batch_that_requires_a_gradient,
    batch_that_requires_a_gradient_from_the_third_step_on, encoder_outside_of_the_planned_loss, same_tensor_twice_in_the_batch,
    batch_kept_and_changed_by_the_loop, number_of_an_array_in_the_batch,
)  # fmt: skip
