"""Modes, copies and threads around a step."""

import copy
import pickle
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, state, train
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]


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


CASES = (
    evaluation_between_steps, evaluation_between_micro_batches, no_grad_around_the_step, no_grad_around_the_loss,
    anomaly_mode_with_nan, loss_of_several_elements, autocast_around_the_step, autocast_around_the_loss,
    saved_tensors_hooks_around_the_loss, pickle_and_deepcopy_of_the_planned_loss,
    deepcopy_and_pickle_of_the_model_after_steps, step_from_another_thread, loss_from_another_thread,
    two_models_in_two_threads, one_loss_in_two_threads, deterministic_mode,
)  # fmt: skip
