"""Write to a part of a tensor as eager does: one copy into the part, in the tensor's buffer where nobody else reads it.

The trace has a copy that clones the whole storage of a part, and then a scatter that clones the tensor again.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.capture.fx_nodes import tensor_storage

aten = torch.ops.aten
Path = tuple[tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""View ops from a tensor to its part, each with the arguments behind the tensor."""
Memories = dict[int, list[fx.Node]]
"""Nodes whose tensors lie in each memory, by its identity."""

VIEW_OF: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
"""View of the part that is written, by the scatter that writes it."""


def write_part(base: torch.Tensor, source: torch.Tensor, path: Path) -> torch.Tensor:
    """Return a copy of `base`, in its strides, with `source`, expanded and converted, in the part at the end of `path`."""
    return write_part_(copy_strided(tuple(base.shape), base.stride(), base.dtype, base.device, base), source, path)


def write_part_(base: torch.Tensor, source: torch.Tensor, path: Path) -> torch.Tensor:
    """Write `source` to a part of `base` itself."""
    part = base
    for view, arguments, keywords in path:
        part = view(part, *arguments, **dict(keywords))
    part.copy_(source)
    return base


def copy_strided(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    source: torch.Tensor,
) -> torch.Tensor:
    """Return a copy of `source`, expanded and converted, in a buffer of these strides."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(source)


def fold_writes(graph: fx.Graph) -> None:
    """Replace copies and scatters of parts by one `write_part` each, other copies by `copy_strided`."""
    memories = _find_memories(graph)
    for node in list(graph.nodes):
        if node.target not in VIEW_OF:
            continue
        base = node.args[0].meta["val"]
        if _has_own_strides(base) and node.meta["val"].stride() == base.stride():
            _fold_scatter(memories, node)
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        place, source = node.args[:2]
        like = place.meta["val"]
        if node.users and _has_own_strides(like) and node.meta["val"].stride() == like.stride():
            node.target, node.kwargs = copy_strided, {}
            node.args = (tuple(like.shape), like.stride(), like.dtype, like.device, source)
            _move(memories, node.meta["val"], _empty_like(like))


def _fold_scatter(memories: Memories, node: fx.Node) -> None:
    base: Any = node.args[0]
    source: Any = node.args[1]
    view = VIEW_OF[node.target]
    path: Path = ((view, tuple(node.args[2:]), tuple(node.kwargs.items())),)
    if source.target is aten.copy.default:
        source = source.args[1]
    elif source.target is write_part and len(source.users) == 1 and _is_part(source.args[0], base, path):
        _, inner, below = source.args
        source, path = inner, (*path, *below)
    if _is_part(source, base, path):
        node.replace_all_uses_with(base)  # the part is written back to the place that it was read from
        _move(memories, node.meta["val"], base.meta["val"])
        return
    node.target, node.args, node.kwargs = write_part, (base, source, path), {}
    _move(memories, node.meta["val"], _empty_like(base.meta["val"]))


def _is_part(node: fx.Node, base: fx.Node, path: Path) -> bool:
    (view, arguments, keywords) = path[0]
    same = node.target is view and node.args == (base, *arguments) and tuple(node.kwargs.items()) == keywords
    return same and len(path) == 1


def _find_memories(graph: fx.Graph) -> Memories:
    memories: Memories = defaultdict(list)
    for node in graph.nodes:
        leaves = pytree.tree_leaves(node.meta.get("val"))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
        for memory in set(map(tensor_storage, tensors)):
            memories[memory].append(node)
    return memories


def _move(memories: Memories, old: Any, new: Any) -> None:
    """Move every node's tensor from the memory of `old` to that of `new`: views are recognized by their memory."""
    shift = new.storage_offset() - old.storage_offset()
    memory = tensor_storage(old)

    def move(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return [move(inner) for inner in part]
        if not isinstance(part, torch.Tensor) or tensor_storage(part) != memory:
            return part
        with new.fake_mode:
            return new.as_strided(part.shape, part.stride(), part.storage_offset() + shift)

    moved = memories.pop(memory, [])
    for node in moved:
        node.meta["val"] = move(node.meta["val"])
    memories[tensor_storage(new)] += moved


def _has_own_strides(tensor: torch.Tensor) -> bool:
    """Return whether no two elements share their memory, as in an expanded tensor."""
    return all(stride > 0 or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _empty_like(tensor: Any) -> torch.Tensor:
    """Return a fake tensor with new memory and the same strides."""
    with tensor.fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
