"""Run an eager step of gradients alone, beside a planned one, without touching what autograd keeps on parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.workloads.workload import LossFn


def run_eager_gradients(
    model: torch.nn.Module,
    loss_fn: LossFn,
    tangent: torch.Tensor,
    batch: Any,
    on_gradient: Callable[[str, torch.Tensor], None],
) -> Any:
    """Run forward and backward in eager from the gradient `tangent` of the loss; return the results, detached.

    `on_gradient` is called with each parameter's name and gradient.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.enable_grad():
        results = loss_fn(model, batch)
        loss = results[0] if isinstance(results, tuple) else results
        # not backward(): post-accumulate hooks and DistributedDataParallel would see a step that the loop does not make
        gradients = torch.autograd.grad(loss, list(trained.values()), tangent.to(loss.dtype), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            on_gradient(name, gradient)
    return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, results)


@contextmanager
def without_gradients_and_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Set `.grad` and the hooks of all parameters aside for the block."""
    saved = [(parameter, parameter.grad, parameter._backward_hooks) for parameter in model.parameters()]
    try:
        for parameter, _, hooks in saved:
            parameter.grad = None
            if hooks:
                parameter._backward_hooks = None
        yield
    finally:
        for parameter, gradient, hooks in saved:
            parameter.grad = gradient
            if hooks:
                parameter._backward_hooks = hooks
