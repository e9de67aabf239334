"""Python values, modules and hooks that change between steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, run, state, train
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]
WEIGHT = 1.0
"""Weight of a loss that a case changes."""


def _steps(
    way: Way, model: nn.Module, loss: Callable[..., Any], between: Callable[[int], Any], count: int = 5
) -> Tensors:
    data, optimizer = batches(count), adamw(model)
    yield from run(way.step(model, loss, optimizer, data[0]), data, between)
    yield from state(model, optimizer)


def dropout_p_changed_between_steps(way: Way) -> Tensors:
    """Change a dropout's p once."""
    model = net()
    yield from _steps(way, model, loss_fn, lambda number: setattr(model[3], "p", 0.1 if number < 2 else 0.4))


def dropout_p_annealed_in_every_step(way: Way) -> Tensors:
    """Change a dropout's p in every step."""
    model = net()
    yield from _steps(way, model, loss_fn, lambda number: setattr(model[3], "p", 0.5 / (1 + number)))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.beta = net(), 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs) * self.beta


def python_attribute_of_the_model_changed(way: Way) -> Tensors:
    """Change a number that is an attribute of the model."""
    model = _Scaled()
    yield from _steps(way, model, loss_fn, lambda number: setattr(model, "beta", 1.0 - 0.1 * number))


def closure_variable_of_the_loss_changed(way: Way) -> Tensors:
    """Change a number in the loss function's closure."""
    weights = {"kl": 1.0}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return weights["kl"] * loss_fn(model, batch)

    yield from _steps(way, net(), loss, lambda number: weights.update(kl=1.0 + number // 3))


def global_variable_of_the_loss_changed(way: Way) -> Tensors:
    """Change a global number that the loss function reads."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return WEIGHT * loss_fn(model, batch)

    yield from _steps(way, net(), loss, lambda number: globals().update(WEIGHT=1.0 if number < 2 else 0.25))
    globals().update(WEIGHT=1.0)


def tensor_in_the_closure_bound_anew(way: Way) -> Tensors:
    """Bind a class weight of the closure to a new tensor."""
    weights = {"class": torch.ones(8)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights["class"])

    between = lambda number: weights.update({"class": torch.arange(8) + 1.0 + number})  # noqa: E731
    yield from _steps(way, net(), loss, between)


def tensor_in_the_closure_changed_in_place(way: Way) -> Tensors:
    """Change a class weight of the closure in place."""
    weight = torch.ones(8)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    yield from _steps(way, net(), loss, weight.add_)


def module_without_parameters_replaced(way: Way) -> Tensors:
    """Replace an activation by another one."""
    model = net()
    yield from _steps(way, model, loss_fn, lambda number: model.__setitem__(5, nn.GELU() if number < 2 else nn.Tanh()))


def module_replaced(way: Way) -> Tensors:
    """Replace a layer, with another optimizer group."""
    model = net()
    data, optimizer = batches(), torch.optim.SGD(model.parameters(), lr=0.1)

    def between(number: int) -> None:
        if number == 2:
            model[6] = nn.Linear(32, 8)
            optimizer.add_param_group({"params": list(model[6].parameters())})

    yield from run(way.step(model, loss_fn, optimizer, data[0]), data, between)
    yield from state(model, optimizer)


def forward_hook_added_later(way: Way) -> Tensors:
    """Add a forward hook that changes the output."""
    model = net()

    def between(number: int) -> None:
        if number == 2:
            model[4].register_forward_hook(lambda *parts: parts[2] * 0.5)

    yield from _steps(way, model, loss_fn, between)


def forward_hook_that_counts(way: Way) -> Tensors:
    """Count the calls of a forward hook."""
    model, calls = net(), []
    model[4].register_forward_hook(lambda *_: calls.append(1))
    yield from _steps(way, model, loss_fn, lambda _: None)
    yield torch.tensor(len(calls))


def parameter_hook_added_later(way: Way) -> Tensors:
    """Add a hook on a parameter's gradient."""
    model = net()

    def between(number: int) -> None:
        if number == 2:
            model[0].weight.register_hook(lambda gradient: gradient * 0.5)

    yield from _steps(way, model, loss_fn, between)


def parameter_hooks_with_a_loss(way: Way) -> Tensors:
    """Add both kinds of hooks on parameters, in a loop of one's own."""
    model, sums = net(), []
    data, optimizer = batches(), adamw(model)

    def between(number: int) -> None:
        if number == 2:
            model[0].weight.register_hook(lambda gradient: gradient * 0.5)
            model[4].weight.register_post_accumulate_grad_hook(lambda weight: sums.append(weight.grad.sum()))

    yield from train(way.loss(model, loss_fn), optimizer, data, between)
    yield torch.stack(sums)
    yield from state(model, optimizer)


class _Average(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.net, self._in_place = net(), in_place
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.net(inputs)
        mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        if self._in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return outputs - mean


def python_buffer_assigned_anew_in_forward(way: Way) -> Tensors:
    """Assign a running mean in forward."""
    yield from _steps(way, _Average(in_place=False), loss_fn, lambda _: None)


def buffer_changed_in_place_in_forward(way: Way) -> Tensors:
    """Update a running mean in place in forward."""
    yield from _steps(way, _Average(in_place=True), loss_fn, lambda _: None)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = net(), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.net(inputs) * min(1.0, self.steps / 4)


def counter_that_forward_reads(way: Way) -> Tensors:
    """Count steps in forward, for a warm-up that forward reads."""
    yield from _steps(way, _Counting(), loss_fn, lambda _: None)


def forward_replaced_on_the_object(way: Way) -> Tensors:
    """Replace the forward of one module by another function, as wrappers do."""
    model = net()
    plain = model[5].forward

    def between(number: int) -> None:
        if number == 2:
            model[5].forward = lambda inputs: 2 * plain(inputs)

    yield from _steps(way, model, loss_fn, between)


def eval_mode_of_a_part(way: Way) -> Tensors:
    """Freeze the statistics of a batch norm after some steps."""
    model = net()
    yield from _steps(way, model, loss_fn, lambda number: model[1].train(number < 2))


def default_dtype_changed(way: Way) -> Tensors:
    """Change the default dtype, in which the loss makes a tensor."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * torch.full((), 1 / 3).float()

    try:
        yield from _steps(
            way, net(), loss, lambda number: torch.set_default_dtype(torch.float64 if number > 1 else torch.float32)
        )
    finally:
        torch.set_default_dtype(torch.float32)


def python_random_numbers(way: Way) -> Tensors:
    """Draw from Python's generator in the loss."""
    import random

    random.seed(1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * random.random()

    yield from _steps(way, net(), loss, lambda _: None)


CASES = (
    dropout_p_changed_between_steps, dropout_p_annealed_in_every_step, python_attribute_of_the_model_changed,
    closure_variable_of_the_loss_changed, global_variable_of_the_loss_changed, tensor_in_the_closure_bound_anew,
    tensor_in_the_closure_changed_in_place, module_without_parameters_replaced, module_replaced, forward_hook_added_later,
    forward_hook_that_counts, parameter_hook_added_later, parameter_hooks_with_a_loss, python_buffer_assigned_anew_in_forward,
    buffer_changed_in_place_in_forward, counter_that_forward_reads, forward_replaced_on_the_object, eval_mode_of_a_part,
    default_dtype_changed, python_random_numbers,
)  # fmt: skip
