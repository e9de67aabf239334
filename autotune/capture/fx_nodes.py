"""Read nodes of an FX trace: their phase, memory, module and name."""

import re
from typing import Any

import torch
from torch import fx


def get_attribute(module: Any, path: str) -> Any:
    """Return the attribute at a dotted path."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def is_backward(node: fx.Node) -> bool:
    """Return whether the tracer added the node for a gradient."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def is_tensor(node: fx.Node) -> bool:
    """Return whether the node's result is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: fx.Node) -> int:
    """Return the identity of the memory of a node's tensor; a view shares that of its base."""
    return tensor_storage(node.meta["val"])


def tensor_storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def layer_path(node: fx.Node) -> str:
    """Return the path of the leaf module that an op belongs to; empty outside of all modules."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0].partition(".")[2]  # behind the tracer's name for the step itself
    dotted = re.sub(r"\._modules\['(\w+)'\]|\['?(\w+)'?\]", lambda match: "." + (match[1] or match[2]), path)
    return user_path(dotted) or "model"


def user_path(target: str) -> str:
    """Return a path as the user's model has it, without the module around model and loss."""
    return "" if target == "model" else target.removeprefix("model.")


def target_name(target: Any) -> str:
    """Return the name of an op: ATen's name, or that of our function without the folders of its module.

    Names are in the digest of a graph, and stored plans refer to graphs by digest, so names must outlive moves of files.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"autotune.{target.__module__.rpartition('.')[2]}.{target.__name__}"
