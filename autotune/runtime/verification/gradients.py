"""Run an eager step of gradients alone, beside a planned one, without touching what autograd keeps on parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree


def run_eager_gradients(
    loss_of: Callable[[Any], Any],
    parameters: Mapping[str, torch.nn.Parameter],
    tangent: torch.Tensor,
    batch: Any,
    on_gradient: Callable[[str, torch.Tensor], None],
) -> Any:
    """Run forward and backward in eager from the gradient `tangent` of the loss; return the results, detached.

    `loss_of` returns the loss of a batch, or a tuple that begins with it. `on_gradient` is called with the name and gradient of each of `parameters`.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with torch.enable_grad():
        results = loss_of(batch)
        loss = results[0] if isinstance(results, tuple) else results
        # not backward(): post-accumulate hooks and DistributedDataParallel would see a step that the loop does not make
        gradients = torch.autograd.grad(loss, list(trained.values()), tangent.to(loss.dtype), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            on_gradient(name, gradient)
    return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, results)


@contextmanager
def without_gradients_and_hooks(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Set `.grad` and the hooks of parameters aside for the block."""
    saved = [(parameter, parameter.grad, parameter._backward_hooks) for parameter in parameters]
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
