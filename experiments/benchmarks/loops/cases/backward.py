"""Uses of `backward()` and of gradients that a planned loss must equal or refuse."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, state, train
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]


def _gradients(model: nn.Module) -> Tensors:
    yield from (p.grad.clone() for p in model.parameters() if p.grad is not None)


def loss_times_numbers_that_change(way: Way) -> Tensors:
    """Multiply the loss by another number in each step."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for number, batch in enumerate(batches()):
        loss = loss_of(batch) * (1.5 - 0.3 * number)
        loss.backward()
        yield from _gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def loss_in_a_formula(way: Way) -> Tensors:
    """Compute with the loss before `backward()`: a flood level, and a regularizer of the weights."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for batch in batches():
        loss = (loss_of(batch) - 1.5).abs() + 1.5 + 1e-2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        yield from _gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def item_before_backward(way: Way) -> Tensors:
    """Read the loss, and skip bad batches by its value."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for batch in batches(8):
        loss = loss_of(batch)
        if loss.item() < 2.1:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
    yield from state(model, optimizer)


def backward_never_called(way: Way) -> Tensors:
    """Compute losses that nothing differentiates, and drop them."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    kept = [loss_of(batch) for batch in batches(3)]
    del kept
    gc.collect()
    yield from train(loss_of, optimizer, batches())
    yield from state(model, optimizer)


def backward_called_twice(way: Way) -> Tensors:
    """Call `backward()` twice, which eager refuses."""
    model = net()
    loss = way.loss(model, loss_fn)(batches()[0])
    loss.backward()
    yield from _gradients(model)
    loss.backward()
    yield from _gradients(model)


def retain_graph(way: Way) -> Tensors:
    """Retain the graph, and differentiate again with another factor."""
    model = net()
    loss = way.loss(model, loss_fn)(batches()[0])
    loss.backward(retain_graph=True)
    (loss * 3).backward(retain_graph=True)
    (loss * 3).backward()
    yield from _gradients(model)
    yield from state(model)


def double_backward(way: Way) -> Tensors:
    """Differentiate the norm of the gradients."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    loss = way.loss(model, loss_fn)(batches()[0])
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    yield from _gradients(model)


def autograd_grad_instead_of_backward(way: Way) -> Tensors:
    """Ask for the gradients as results, of all and of some parameters."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    for batch in batches(3):
        yield from torch.autograd.grad(loss_of(batch), list(model.parameters()))
        yield from torch.autograd.grad(loss_of(batch), [model[6].weight])
    yield torch.tensor([p.grad is None for p in model.parameters()])


def backward_with_inputs(way: Way) -> Tensors:
    """Accumulate the gradients of some parameters only."""
    model = net()
    way.loss(model, loss_fn)(batches()[0]).backward(inputs=[model[0].weight, model[6].bias])
    yield from _gradients(model)
    yield torch.tensor([p.grad is None for p in model.parameters()])


def gradient_given_to_backward(way: Way) -> Tensors:
    """Pass a gradient to `backward()`."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    for batch in batches(3):
        loss_of(batch).backward(torch.tensor(0.7))
        yield from _gradients(model)


def hook_on_the_loss(way: Way) -> Tensors:
    """Change the gradient of the loss by a hook on it, and keep it."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    for batch in batches(3):
        loss = loss_of(batch)
        loss.register_hook(lambda gradient: gradient * 0.3)
        loss.retain_grad()
        loss.backward()
        yield loss.grad
        yield from _gradients(model)


def two_losses_over_shared_parameters(way: Way) -> Tensors:
    """Add two losses of one network."""
    model = net()
    optimizer = adamw(model)

    def quiet(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    first, second = way.loss(model, loss_fn), way.loss(model, quiet)
    for batch in batches():
        loss = first(batch) + 0.1 * second(batch)
        loss.backward()
        yield from _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


def two_losses_backward_in_another_order(way: Way) -> Tensors:
    """Compute two losses, and differentiate the second one first."""
    model = net()
    loss_of, data = way.loss(model, loss_fn), batches()
    for one, other in zip(data[::2], data[1::2], strict=False):
        losses = loss_of(one), loss_of(other)
        losses[1].backward()
        losses[0].backward()
        yield from _gradients(model)
        yield from state(model)


def loss_kept_over_an_update(way: Way) -> Tensors:
    """Differentiate a loss after the weights moved; autograd refuses that."""
    model = net()
    optimizer, loss_of, data = torch.optim.SGD(model.parameters(), lr=0.1), way.loss(model, loss_fn), batches()
    late = loss_of(data[0]) * 0.5
    yield from train(loss_of, optimizer, data[1:3])
    late.backward()
    yield from _gradients(model)


def losses_of_one_epoch_stacked(way: Way) -> Tensors:
    """Differentiate the mean of several losses at once."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    torch.stack([loss_of(batch) for batch in batches(4)]).mean().backward()
    yield from _gradients(model)


class _BadBatchError(Exception):
    pass


def exception_in_the_loss(way: Way) -> Tensors:
    """Raise in the loss function for a batch of another kind, catch it and go on."""
    model = net()
    optimizer = adamw(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if batch[0].shape[0] == 3:
            raise _BadBatchError("three rows")
        return loss_fn(model, batch)

    loss_of = way.loss(model, loss)
    for batch in [*batches(2), *batches(1, rows=3), *batches(2)]:
        try:
            loss_of(batch).backward()
        except Exception as error:  # noqa: BLE001 - a plan names it in an error of its own
            yield torch.tensor("three rows" in str(error))
            continue
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


class _Interrupt(nn.Module):
    """Raise KeyboardInterrupt in backward, once, as Ctrl-C would."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return gradient


def keyboard_interrupt_in_a_step(way: Way) -> Tensors:
    """Interrupt `backward()`, catch it, clear the gradients and go on."""
    model = net()
    optimizer, loss_of, interrupt = adamw(model), way.loss(model, loss_fn), _Interrupt()
    model[0].weight.register_hook(interrupt)
    for number, batch in enumerate(batches()):
        interrupt.armed = number == 2
        try:
            loss_of(batch).backward()
        except KeyboardInterrupt:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


def checkpoint_in_the_model(way: Way) -> Tensors:
    """Checkpoint a part of the model, with hooks that count."""
    from torch.utils.checkpoint import checkpoint

    model = net()
    optimizer = adamw(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = checkpoint(model[:4], batch[0], use_reentrant=False)
        return F.cross_entropy(model[4:](hidden), batch[1])

    yield from train(way.loss(model, loss), optimizer, batches())
    yield from state(model, optimizer)


def full_backward_hook_on_a_module(way: Way) -> Tensors:
    """Watch the gradients of a module's output by a backward hook."""
    model, norms = net(), []
    optimizer = adamw(model)
    model[4].register_full_backward_hook(lambda *parts: norms.append(parts[2][0].norm()))
    yield from train(way.loss(model, loss_fn), optimizer, batches(3))
    yield torch.stack(norms)


def weights_changed_between_loss_and_backward(way: Way) -> Tensors:
    """Clamp a weight in place between the loss and its backward, which autograd refuses."""
    model = net()
    loss = way.loss(model, loss_fn)(batches()[0])
    with torch.no_grad():
        model[4].weight.clamp_(-0.01, 0.01)
    (loss * 0.5).backward()
    yield from _gradients(model)


def random_numbers_between_loss_and_backward(way: Way) -> Tensors:
    """Draw random numbers between a loss and its backward, with a factor that makes the loss run again."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    for number, batch in enumerate(batches(4)):
        loss = loss_of(batch) * (1 + number)
        yield torch.rand(3)
        loss.backward()
        yield torch.rand(3)
        yield from _gradients(model)


def loss_without_parameters_that_train(way: Way) -> Tensors:
    """Freeze all parameters; `backward()` fails in eager."""
    model = net().requires_grad_(False)
    way.loss(model, loss_fn)(batches()[0]).backward()
    yield torch.ones(1)


def parameter_that_the_loss_never_reads(way: Way) -> Tensors:
    """Leave a layer out of the loss: its `.grad` stays None, and weight decay does not touch it."""
    model = net()
    model.add_module("unused", nn.Linear(4, 4))
    part = nn.Sequential(*list(model.children())[:-1])
    optimizer = adamw(model)
    loss = lambda _, batch: F.cross_entropy(part(batch[0]), batch[1])  # noqa: E731
    loss_of = way.loss(model, loss)
    for batch in batches(3):
        loss_of(batch).backward()
        yield torch.tensor([p.grad is None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


CASES = (
    loss_times_numbers_that_change, loss_in_a_formula, item_before_backward, backward_never_called, backward_called_twice,
    retain_graph, double_backward, autograd_grad_instead_of_backward, backward_with_inputs, gradient_given_to_backward,
    hook_on_the_loss, two_losses_over_shared_parameters, two_losses_backward_in_another_order, loss_kept_over_an_update,
    losses_of_one_epoch_stacked, exception_in_the_loss, keyboard_interrupt_in_a_step, checkpoint_in_the_model,
    full_backward_hook_on_a_module, weights_changed_between_loss_and_backward, random_numbers_between_loss_and_backward,
    loss_without_parameters_that_train, parameter_that_the_loss_never_reads,
)  # fmt: skip
