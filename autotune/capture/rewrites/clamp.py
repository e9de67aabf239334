"""The gradient of a clip reads what the clip made: one value is kept for backward where eager keeps two.

Eager keeps what a clip read, in place even a copy of it, and the op behind the clip keeps what it made. A gradient needs
to know only which elements were clipped, and those lie at the bounds: of the result it makes the same bits.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autotune.capture.fx_nodes import is_backward, is_tensor, storage_of

aten = torch.ops.aten
CLIPS = {
    aten.hardtanh_backward.default: aten.hardtanh.default,
    aten.leaky_relu_backward.default: aten.leaky_relu.default,
}
"""By their gradients, which read the clip's input and then its bounds. ReLU6 is a hardtanh."""
BITS = 8
"""Of a bound: in every dtype the same number, for the clip as for its gradient."""


def read_results(graph: fx.Graph) -> None:
    """Let gradients of clips read results that backward keeps anyway."""
    kept = {storage_of(value) for node in graph.nodes if is_backward(node) for value in _read(node)}
    for target, forward in CLIPS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            read = node.args[1]
            if read.target is aten.clone.default:  # in place: eager's copy of what is overwritten
                read = read.args[0]
            bounds = _bounds(node)[: len(_bounds_of(forward))]
            for clip in read.users:
                if clip.target is forward and _bounds(clip) == bounds and _exact(forward, bounds):
                    if storage_of(clip) in kept:
                        node.update_arg(1, clip)
                    break


def _read(node: fx.Node) -> Iterator[fx.Node]:
    return (source for source in node.all_input_nodes if is_tensor(source))


def _bounds_of(target: Any) -> list[Any]:
    """Arguments behind the tensor."""
    return list(target._schema.arguments[1:])


def _bounds(node: fx.Node) -> list[Any]:
    """What a clip or its gradient was called with behind its tensors, defaults written out."""
    target: Any = node.target
    arguments = [one for one in target._schema.arguments if str(one.type) != "Tensor"]
    given = list(node.args[len(target._schema.arguments) - len(arguments) :])
    return given + [one.default_value for one in arguments[len(given) :]]


def _exact(forward: Any, bounds: list[Any]) -> bool:
    """Whether the result tells what was clipped, bit for bit."""
    if forward is aten.leaky_relu.default:  # of a negative slope, what was negative comes out positive
        return bool(bounds[0] >= 0)
    return all((math.frexp(bound)[0] * 2**BITS).is_integer() for bound in bounds)
