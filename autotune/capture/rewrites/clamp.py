"""Let the gradient of a clamp read the clamp's result, so that one value is saved for backward where eager saves two.

Eager saves the input of a clamp (in place, a copy of it), and the next op saves the clamp's result. The gradient depends only
on which elements were clamped, and those lie at the bounds. From the result it computes the same bits.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autotune.capture.fx_nodes import is_backward, is_tensor, storage_of

aten = torch.ops.aten
CLAMPS = {
    aten.hardtanh_backward.default: aten.hardtanh.default,
    aten.leaky_relu_backward.default: aten.leaky_relu.default,
}
"""Clamps by their gradients, which read the clamp's input and then its bounds. ReLU6 is a hardtanh."""
BITS = 8
"""Maximum significant bits of a bound that is the same number in every dtype."""


def read_results(graph: fx.Graph) -> None:
    """Let gradients of clamps read results that backward saves anyway."""
    saved = {storage_of(value) for node in graph.nodes if is_backward(node) for value in _read(node)}
    for target, forward in CLAMPS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            read = node.args[1]
            if read.target is aten.clone.default:  # in place: eager's copy of what is overwritten
                read = read.args[0]
            bounds = _bounds(node)[: len(_bounds_of(forward))]
            for clamp in read.users:
                if clamp.target is forward and _bounds(clamp) == bounds and _is_exact(forward, bounds):
                    if storage_of(clamp) in saved:
                        node.update_arg(1, clamp)
                    break


def _read(node: fx.Node) -> Iterator[fx.Node]:
    return (source for source in node.all_input_nodes if is_tensor(source))


def _bounds_of(target: Any) -> list[Any]:
    """Return the arguments behind the tensor."""
    return list(target._schema.arguments[1:])


def _bounds(node: fx.Node) -> list[Any]:
    """Return the arguments of a clamp or its gradient behind its tensors, with defaults."""
    target: Any = node.target
    arguments = [argument for argument in target._schema.arguments if str(argument.type) != "Tensor"]
    passed = list(node.args[len(target._schema.arguments) - len(arguments) :])
    return passed + [argument.default_value for argument in arguments[len(passed) :]]


def _is_exact(forward: Any, bounds: list[Any]) -> bool:
    """Return whether the result shows exactly which elements were clamped; not where a bound is an input of the step."""
    if any(isinstance(bound, fx.Node) for bound in bounds):
        return False
    if forward is aten.leaky_relu.default:  # a negative slope makes negative elements positive
        return bool(bounds[0] >= 0)
    return all((math.frexp(bound)[0] * 2**BITS).is_integer() for bound in bounds)
