"""Uses of `backward()` and of gradients that a planned loss must equal or refuse."""

import copy
import gc
import pickle
import threading
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


def evaluation_between_steps(way: Way) -> Tensors:
    """Evaluate without gradients between steps."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for batch in batches():
        yield from train(loss_of, optimizer, [batch])
        model.eval()
        with torch.no_grad():
            yield loss_of(batch)
        with torch.inference_mode():
            yield loss_of(batch).clone()
        model.train()
    yield from state(model, optimizer)


def evaluation_between_micro_batches(way: Way) -> Tensors:
    """Evaluate while gradients wait for the update, and between a loss and its backward."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for number, batch in enumerate(batches(6)):
        loss = loss_of(batch)
        model.eval()
        with torch.no_grad():
            yield model(batch[0])
        model.train()
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    yield from state(model, optimizer)


def no_grad_around_the_step(way: Way) -> Tensors:
    """Run a step under `no_grad`, which eager refuses."""
    model, data = net(), batches(2)
    step = way.step(model, loss_fn, adamw(model), data[0])
    with torch.no_grad():
        yield step(data[0])


def no_grad_around_the_loss(way: Way) -> Tensors:
    """Compute the loss under `no_grad`."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    with torch.no_grad():
        loss = loss_of(batches()[0])
    yield loss
    yield torch.tensor(loss.requires_grad)


def anomaly_mode_with_nan(way: Way) -> Tensors:
    """Look for a NaN with the anomaly mode."""
    model, data = net(), batches(2)
    data[1][0].fill_(torch.nan)
    step = way.step(model, loss_fn, adamw(model), data[0])
    with torch.autograd.set_detect_anomaly(True):
        for batch in data:
            yield step(batch)


def loss_of_several_elements(way: Way) -> Tensors:
    """Return a loss for each row, which has no `backward()`."""
    model, data = net(), batches(1)
    each = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")  # noqa: E731
    yield from (step_loss for step_loss in [way.step(model, each, adamw(model), data[0])(data[0])])


def autocast_around_the_step(way: Way) -> Tensors:
    """Enter autocast around a whole step."""
    model, data = net(), batches(2)
    step = way.step(model, loss_fn, adamw(model), data[0])
    with torch.autocast("cpu", torch.bfloat16):
        yield step(data[0])


def autocast_around_the_loss(way: Way) -> Tensors:
    """Enter autocast around the loss, in some steps."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    for number, batch in enumerate(batches(6)):
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
            loss = loss_of(batch)
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer)


def saved_tensors_hooks_around_the_loss(way: Way) -> Tensors:
    """Pack what autograd saves, as offloading libraries do."""
    model = net()
    optimizer, loss_of = adamw(model), way.loss(model, loss_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(), torch.from_numpy):
        yield from train(loss_of, optimizer, batches(3))
    yield from state(model, optimizer)


def pickle_and_deepcopy_of_the_planned_loss(way: Way) -> Tensors:
    """Copy a module that holds the loss, after steps, and train the copy."""
    model = net()
    loss_of = way.loss(model, loss_fn)
    yield from train(loss_of, adamw(model), batches(2))
    copies = [copy.deepcopy(loss_of), pickle.loads(pickle.dumps(loss_of))] if way.is_planned else [None, None]
    for twin in copies:
        model_of = copy.deepcopy(model) if twin is None else twin.model
        again = way.loss(model_of, loss_fn) if twin is None else twin
        yield from train(again, adamw(model_of), batches(3))
        yield from state(model_of)
    yield from state(model)


def deepcopy_and_pickle_of_the_model_after_steps(way: Way) -> Tensors:
    """Copy the model after steps, and evaluate the copies."""
    model, data = net(), batches(3)
    step = way.step(model, loss_fn, adamw(model), data[0])
    for batch in data:
        yield step(batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        yield twin.eval()(data[0][0])


def step_from_another_thread(way: Way) -> Tensors:
    """Run steps in another thread."""
    model, data = net(), batches()
    optimizer = adamw(model)
    step = way.step(model, loss_fn, optimizer, data[0])
    losses = [step(data[0])]
    thread = threading.Thread(target=lambda: losses.extend(step(batch) for batch in data[1:]))
    thread.start()
    thread.join()
    yield torch.stack(losses)
    yield from state(model, optimizer)


def loss_from_another_thread(way: Way) -> Tensors:
    """Make the first call in another thread, and differentiate in the main one."""
    model = net()
    optimizer, loss_of, data = adamw(model), way.loss(model, loss_fn), batches()
    losses: list[torch.Tensor] = []
    for batch in data:
        thread = threading.Thread(target=lambda batch=batch: losses.append(loss_of(batch)))
        thread.start()
        thread.join()
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    yield torch.stack(losses).detach()
    yield from state(model, optimizer)


def two_models_in_two_threads(way: Way) -> Tensors:
    """Train two models at once, each in a thread; neither draws random numbers."""
    models = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2)]
    errors: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            list(train(losses[id(model)], adamw(model), batches(20)))
        except BaseException as error:  # noqa: BLE001 - it belongs to the main thread
            errors.append(error)

    losses = {id(model): way.loss(model, loss_fn) for model in models}
    for model in models:  # captures take turns
        losses[id(model)](batches()[0])
    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for model in models:
        yield from state(model)


def one_loss_in_two_threads(way: Way) -> Tensors:
    """Call one loss from two threads at once."""
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 8))
    loss_of, data = way.loss(model, loss_fn), batches(1, rows=512)
    loss_of(data[0])
    results: list[list[torch.Tensor]] = [[], []]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(40):
                results[number].extend(torch.autograd.grad(loss_of(data[0]), list(model.parameters())))
        except BaseException as error:  # noqa: BLE001 - it belongs to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    yield from results[0]
    yield from results[1]


def deterministic_mode(way: Way) -> Tensors:
    """Switch deterministic algorithms on between steps."""
    model, data = net(), batches()
    optimizer = adamw(model)
    step = way.step(model, loss_fn, optimizer, data[0])
    try:
        for number, batch in enumerate(data):
            torch.use_deterministic_algorithms(number > 1)
            yield step(batch)
    finally:
        torch.use_deterministic_algorithms(False)
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
    losses_of_one_epoch_stacked, exception_in_the_loss, keyboard_interrupt_in_a_step, evaluation_between_steps,
    evaluation_between_micro_batches, no_grad_around_the_step, no_grad_around_the_loss, anomaly_mode_with_nan,
    loss_of_several_elements, autocast_around_the_step, autocast_around_the_loss, saved_tensors_hooks_around_the_loss,
    pickle_and_deepcopy_of_the_planned_loss, deepcopy_and_pickle_of_the_model_after_steps, step_from_another_thread,
    loss_from_another_thread, two_models_in_two_threads, one_loss_in_two_threads, deterministic_mode, checkpoint_in_the_model,
    full_backward_hook_on_a_module, weights_changed_between_loss_and_backward, random_numbers_between_loss_and_backward,
    loss_without_parameters_that_train, parameter_that_the_loss_never_reads,
)  # fmt: skip
