"""Checkpoints that are saved and loaded between steps."""

import copy
import io
from collections.abc import Iterator

import torch
from torch.optim.lr_scheduler import StepLR

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, run, state
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]


def checkpoint_resume_new_objects(way: Way) -> Tensors:
    """Save, make everything anew, load, and go on."""
    file = io.BytesIO()
    for part in range(2):
        model, data = net(), batches(6)[3 * part : 3 * part + 3]
        optimizer = adamw(model)
        scheduler = StepLR(optimizer, 2, 0.5)
        if part:
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            for target, content in zip((model, optimizer, scheduler), saved, strict=False):
                target.load_state_dict(content)
            torch.set_rng_state(saved[3])
        step = way.step(model, loss_fn, optimizer, data[0])
        for batch in data:
            yield step(batch)
            scheduler.step()
        torch.save([*(each.state_dict() for each in (model, optimizer, scheduler)), torch.get_rng_state()], file)
    yield from state(model, optimizer)


def _reload(way: Way, assign: bool) -> Tensors:
    model, data = net(), batches(6)
    optimizer = adamw(model)
    saved = copy.deepcopy(model.state_dict())
    states = copy.deepcopy(optimizer.state_dict())

    def between(number: int) -> None:
        if number == 3:
            model.load_state_dict(copy.deepcopy(saved), assign=assign)
            if assign:  # the optimizer would hold the old parameters
                optimizer.param_groups[0]["params"] = list(model.parameters())
                optimizer.state.clear()
            else:
                optimizer.load_state_dict(copy.deepcopy(states))

    yield from run(way.step(model, loss_fn, optimizer, data[0]), data, between)
    yield from state(model, optimizer)


def checkpoint_loaded_into_a_living_step(way: Way) -> Tensors:
    """Load weights and optimizer state between steps."""
    yield from _reload(way, assign=False)


def checkpoint_loaded_with_assign(way: Way) -> Tensors:
    """Load weights with `assign=True`, which replaces the parameters."""
    yield from _reload(way, assign=True)


def checkpoint_loaded_between_micro_batches(way: Way) -> Tensors:
    """Load weights while gradients wait, with a loss."""
    model = net()
    optimizer, loss_of, saved = adamw(model), way.loss(model, loss_fn), copy.deepcopy(model.state_dict())
    for number, batch in enumerate(batches(6)):
        (loss_of(batch) / 2).backward()
        if number == 2:
            model.load_state_dict(saved)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    yield from state(model, optimizer)


CASES = (
    checkpoint_resume_new_objects, checkpoint_loaded_into_a_living_step, checkpoint_loaded_with_assign,
    checkpoint_loaded_between_micro_batches,
)  # fmt: skip
