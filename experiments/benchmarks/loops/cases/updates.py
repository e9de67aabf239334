"""Optimizers, schedules, clipping, accumulation, averages, checkpoints."""

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, run, state, train
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]


def clipping(way: Way) -> Tensors:
    """Clip before each update."""
    model, data = net(), batches()
    optimizer, norms = adamw(model), []
    clip = lambda: norms.append(clip_grad_norm_(model.parameters(), 0.1))  # noqa: E731
    yield from run(way.step(model, loss_fn, optimizer, data[0], before_update=clip), data)
    yield torch.stack(norms)
    yield from state(model, optimizer)


def clipping_planned_at_end(way: Way) -> Tensors:
    """Clip in a hook of the optimizer, which is registered after the first step."""
    model, data = net(), batches()
    optimizer = adamw(model)
    step = way.step(model, loss_fn, optimizer, data[0])

    def clip(*_: Any) -> None:
        clip_grad_norm_(model.parameters(), 0.1)

    def between(number: int) -> None:
        if number == 1:
            optimizer.register_step_pre_hook(clip)

    for number, batch in enumerate(data):
        between(number)
        yield step(batch)
    yield from state(model, optimizer)


def clip_norm_that_changes(way: Way) -> Tensors:
    """Clip at another norm in each step."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for number, batch in enumerate(batches()):
        loss_of(batch).backward()
        yield clip_grad_norm_(model.parameters(), 0.5**number)
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


def grad_scaler_with_inf(way: Way) -> Tensors:
    """Scale the loss; one step overflows."""
    model, data = net(), batches()
    data[2][0].fill_(math.inf)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    yield from run(way.step(model, loss_fn, optimizer, data[0], scaler=scaler), data)
    yield torch.tensor(scaler.get_scale())
    yield from (part.nan_to_num() for part in state(model, optimizer))


def accumulate_4_with_a_remainder(way: Way) -> Tensors:
    """Accumulate over four batches, with two epochs of six and a flush after each."""
    model, data = net(), batches(6)
    optimizer = adamw(model)
    step = way.step(model, loss_fn, optimizer, data[0], accumulate=4)
    for _ in range(2):
        yield from run(step, data)
        step.flush()
    yield from state(model, optimizer)


def accumulate_and_own_clip(way: Way) -> Tensors:
    """Accumulate, clip and scale together."""
    model, data = net(), batches(6)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    clip = lambda: clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    yield from run(way.step(model, loss_fn, optimizer, data[0], accumulate=2, before_update=clip, scaler=scaler), data)
    yield from state(model, optimizer)


def drop_in_loss_plain_loop(way: Way) -> Tensors:
    """Scale, clip and accumulate over three batches with a remainder, with a loss."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    data = batches(8)
    for number, batch in enumerate(data):
        scaler.scale(loss_of(batch) / 3).backward()
        if number % 3 == 2 or number == 7:
            scaler.unscale_(optimizer)
            yield clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    yield from state(model, optimizer)


def accumulation_that_changes(way: Way) -> Tensors:
    """Accumulate over one, two, three batches, with zeroed gradients in place."""
    model = net()
    optimizer, loss_of, data = adamw(model), way.loss(model, loss_fn), iter(batches(9))
    for count in (1, 2, 3, 1, 2):
        for _ in range(count):
            (loss_of(next(data)) / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield from state(model, optimizer)


def nested_accumulation(way: Way) -> Tensors:
    """Nest contexts that accumulate, as of two libraries, and leave the inner one by an exception."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for number, batch in enumerate(batches(6)):
        try:
            with nullcontext(), torch.enable_grad():
                (loss_of(batch) / 2).backward()
                if number == 3:
                    raise KeyError
        except KeyError:
            optimizer.zero_grad()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        yield from state(model)


def gradients_zeroed_in_place(way: Way) -> Tensors:
    """Zero gradients in place, with a step that accumulates."""
    model, data = net(), batches(6)
    optimizer = adamw(model)
    step = way.step(model, loss_fn, optimizer, data[0], accumulate=2)
    for number, batch in enumerate(data):
        yield step(batch)
        if number % 2:
            optimizer.zero_grad(set_to_none=False)
    yield from state(model, optimizer)


def lr_and_weight_decay_by_hand(way: Way) -> Tensors:
    """Assign learning rate and weight decay before each step."""
    model, data = net(), batches()
    optimizer = adamw(model)
    yield from run(
        way.step(model, loss_fn, optimizer, data[0]),
        data,
        lambda number: optimizer.param_groups[0].update(lr=0.01 * (1 + number), weight_decay=0.1 * number),
    )
    yield from state(model, optimizer)


def optimizer_zero_grad_and_scheduler_order(way: Way) -> Tensors:
    """Step a scheduler after each step, and clear gradients that are none."""
    model, data = net(), batches()
    optimizer = adamw(model)
    scheduler, step = StepLR(optimizer, 2, 0.5), way.step(model, loss_fn, optimizer, data[0])
    for batch in data:
        optimizer.zero_grad()
        yield step(batch)
        scheduler.step()
        yield torch.tensor(scheduler.get_last_lr())
    yield from state(model, optimizer)


def one_cycle(way: Way) -> Tensors:
    """Cycle learning rate and momentum."""
    model, data = net(), batches(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler, step = OneCycleLR(optimizer, 0.1, total_steps=8), way.step(model, loss_fn, optimizer, data[0])
    for batch in data:
        yield step(batch)
        scheduler.step()
    yield from state(model, optimizer)


def stochastic_weight_averaging(way: Way) -> Tensors:
    """Average weights from the third step on, and compute the average's statistics at the end."""
    model, data = net(), batches(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average, scheduler = AveragedModel(model), SWALR(optimizer, 0.02)
    step = way.step(model, loss_fn, optimizer, data[0])
    for number, batch in enumerate(data):
        yield step(batch)
        if number > 2:
            average.update_parameters(model)
            scheduler.step()
    update_bn([inputs for inputs, _ in data], average)
    yield from state(average)


def ema(way: Way) -> Tensors:
    """Keep an exponential average of the weights, and evaluate it."""
    model, data = net(), batches()
    optimizer, average = adamw(model), copy.deepcopy(model)
    step = way.step(model, loss_fn, optimizer, data[0])
    for batch in data:
        yield step(batch)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            yield average.eval()(batch[0])
    yield from state(average)


def optimizer_swapped_with_a_loss(way: Way) -> Tensors:
    """Go on with another optimizer."""
    model = net()
    loss_of, data = way.loss(model, loss_fn), batches(6)
    for make in (adamw, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)):
        optimizer = make(model)
        yield from train(loss_of, optimizer, data)
        yield from state(model, optimizer)


def optimizer_groups_replaced(way: Way) -> Tensors:
    """Drop a layer from the optimizer's groups between steps."""
    model, data = net(), batches()
    optimizer = adamw(model)

    def between(number: int) -> None:
        if number == 2:
            optimizer.param_groups[0]["params"] = [*model[4].parameters(), *model[6].parameters()]

    step = way.step(model, loss_fn, optimizer, data[0])
    for number, batch in enumerate(data):
        between(number)
        yield step(batch)
        model.zero_grad()  # of the layers that the optimizer left
    yield from state(model, optimizer)


def unfreeze_by_add_param_group(way: Way) -> Tensors:
    """Unfreeze a layer and add it to the optimizer."""
    model, data = net(), batches()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def between(number: int) -> None:
        if number == 2:
            model[0].requires_grad_()
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})

    yield from run(way.step(model, loss_fn, optimizer, data[0]), data, between)
    yield from state(model, optimizer)


def frozen_then_unfrozen_with_a_loss(way: Way) -> Tensors:
    """Freeze and unfreeze layers in a loop of one's own."""
    model = net()
    optimizer = adamw(model)
    yield from train(
        way.loss(model, loss_fn), optimizer, batches(6), lambda number: model[number % 2 * 4].requires_grad_(number > 3)
    )
    yield from state(model, optimizer)


def two_optimizers_two_steps(way: Way) -> Tensors:
    """Train two halves by two optimizers, in two steps."""
    model, data = net(), batches()
    halves = model[:4], model[4:]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    steps = [way.step(model, loss_fn, optimizer, data[0]) for optimizer in optimizers]
    for batch in data:
        for step in steps:
            yield step(batch)
            model.zero_grad()  # of the other half: it exists in plain PyTorch
    yield from state(model, *optimizers)


def two_optimizers_one_loss(way: Way) -> Tensors:
    """Train two halves by two optimizers from one backward."""
    model = net()
    optimizers = adamw(model[:4]), torch.optim.SGD(model[4:].parameters(), lr=0.1)
    loss_of = way.loss(model, loss_fn)
    for batch in batches():
        loss_of(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    yield from state(model, *optimizers)


class _GlobalNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


def across_parameter_optimizer(way: Way) -> Tensors:
    """Divide by the norm over all gradients within the optimizer."""
    model, data = net(), batches()
    optimizer = _GlobalNorm(model.parameters(), lr=0.1)
    yield from run(way.step(model, loss_fn, optimizer, data[0]), data)
    yield from state(model, optimizer)


def across_parameter_optimizer_with_before_update(way: Way) -> Tensors:
    """Divide by the norm over all gradients, with a `before_update` that does nothing."""
    model, data = net(), batches()
    optimizer = _GlobalNorm(model.parameters(), lr=0.1)
    yield from run(way.step(model, loss_fn, optimizer, data[0], before_update=lambda: None), data)
    yield from state(model, optimizer)


def sam_two_forwards_a_step(way: Way) -> Tensors:
    """Climb to the sharpest point near the weights first, and step from its gradients."""
    model = net()
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.1), way.loss(model, loss_fn)
    for batch in batches():
        loss_of(batch).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moves = [0.05 * p.grad / norm for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        model.zero_grad()
        loss_of(batch).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


def lbfgs_with_a_loss(way: Way) -> Tensors:
    """Let LBFGS call a closure many times a step."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer, loss_of = torch.optim.LBFGS(model.parameters(), max_iter=4), way.loss(model, loss_fn)
    for batch in batches(3):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            return loss

        yield optimizer.step(closure).detach()
    yield from state(model)


def lbfgs_in_a_step(way: Way) -> Tensors:
    """Pass LBFGS to a step."""
    model, data = net(), batches(2)
    optimizer = torch.optim.LBFGS(model.parameters())
    if not way.is_planned:
        return  # a step of plain PyTorch would need the closure
    yield from run(way.step(model, loss_fn, optimizer, data[0]), data)


def head_resized_optimizer_forgotten(way: Way) -> Tensors:
    """Replace the head, and forget to give it to the optimizer."""
    model, data = net(), batches()
    optimizer = adamw(model)

    def between(number: int) -> None:
        if number == 2:
            model[6] = nn.Linear(32, 8)

    step = way.step(model, loss_fn, optimizer, data[0])
    for number, batch in enumerate(data):
        between(number)
        yield step(batch)
        model.zero_grad()
    yield from state(model, optimizer)


def grad_read_after_step(way: Way) -> Tensors:
    """Read gradients in the `before_update` of a step."""
    model, data = net(), batches()
    optimizer, norms = adamw(model), []
    watch = lambda: norms.append(torch.stack([p.grad.norm() for p in model.parameters()]))  # noqa: E731
    yield from run(way.step(model, loss_fn, optimizer, data[0], before_update=watch), data)
    yield torch.stack(norms)


CASES = (
    clipping, clipping_planned_at_end, clip_norm_that_changes, grad_scaler_with_inf, accumulate_4_with_a_remainder,
    accumulate_and_own_clip, drop_in_loss_plain_loop, accumulation_that_changes, nested_accumulation,
    gradients_zeroed_in_place, lr_and_weight_decay_by_hand, optimizer_zero_grad_and_scheduler_order, one_cycle,
    stochastic_weight_averaging, ema, optimizer_swapped_with_a_loss, optimizer_groups_replaced, unfreeze_by_add_param_group,
    frozen_then_unfrozen_with_a_loss, two_optimizers_two_steps, two_optimizers_one_loss, across_parameter_optimizer,
    across_parameter_optimizer_with_before_update, sam_two_forwards_a_step, lbfgs_with_a_loss, lbfgs_in_a_step,
    head_resized_optimizer_forgotten, grad_read_after_step,
)  # fmt: skip
