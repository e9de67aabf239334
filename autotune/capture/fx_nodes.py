"""Read nodes of an FX trace: their phase, memory, module and name."""

import re
from typing import Any

import torch
from torch import fx


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def is_backward(node: fx.Node) -> bool:
    """Whether the tracer made this for a gradient."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def is_tensor(node: fx.Node) -> bool:
    """Whether it makes one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: fx.Node) -> int:
    """Number of the memory that its tensor lies in; a view has that of what it is of."""
    return _storage(node.meta["val"])


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _layer(node: fx.Node) -> str:
    """Path of the leaf module that an op belongs to; empty outside of all modules."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0].partition(".")[2]  # behind the tracer's name for the step itself
    return (
        _own_name(re.sub(r"\._modules\['(\w+)'\]|\['?(\w+)'?\]", lambda found: "." + (found[1] or found[2]), path))
        or "model"
    )


def _own_name(target: str) -> str:
    """A name as the user's model has it, without the step around it."""
    return "" if target == "model" else target.removeprefix("model.")


def _shown_target(target: Any) -> str:
    """An op's name: ATen's own, or that of our function, without the folders of its module.

    Names are in the digest of a graph, and stored plans name graphs by digest: they outlive moves of files.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"autotune.{target.__module__.rpartition('.')[2]}.{target.__name__}"
