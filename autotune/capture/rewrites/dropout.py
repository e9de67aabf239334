"""Split dropout into two ops: the mask, which is drawn once and kept, and its product, which can be recomputed.

ATen's kernel returns both. As one op its product, four times the bytes of the mask, could never be recomputed. The two ops
have the bits of eager in both directions; ATen's backward kernel rounds another scale.
"""

import operator
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._prims_common import is_non_overlapping_and_dense_or_false

from autotune.capture.eager_kernels import IN_PLACE
from autotune.capture.rewrites.batch_norm import SAME_BITS

aten = torch.ops.aten
WHOLE = aten.native_dropout.default
BACKWARD = aten.native_dropout_backward.default


def draw_mask(size: tuple[int, ...], stride: tuple[int, ...], device: torch.device, p: float) -> torch.Tensor:
    """Draw a bool tensor of the elements that stay; `p` is the probability of dropping one."""
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device).bernoulli_(1 - p)


def draw_over(data: torch.Tensor, p: float) -> torch.Tensor:
    """Draw ones with probability `p` in the layout of `data`, as `bernoulli_` does; `bernoulli` draws in another order."""
    return torch.empty_like(data).bernoulli_(p)


def draw_normal_over(data: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Draw normal numbers for a part of a tensor, as `normal_` does: one by one, where a whole tensor is drawn in groups."""
    drawn = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
    return drawn.normal_(mean, std).contiguous()


def draw_in_layout(graph: fx.Graph) -> None:
    """Let draws that eager makes in place keep the layout of what they overwrite."""
    for node in graph.find_nodes(op="call_function", target=aten.normal_functional.default):
        data, result = node.args[0], node.meta.get("val")
        example = data.meta.get("val") if isinstance(data, fx.Node) else None
        is_part = isinstance(example, torch.Tensor) and not is_non_overlapping_and_dense_or_false(example)
        if is_part and isinstance(result, torch.Tensor) and result.is_contiguous() and result.device.type == "cpu":
            node.target = draw_normal_over
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "generator"}
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        if node.meta.get("custom", {}).get(IN_PLACE) is aten.bernoulli_.float:
            node.target = draw_over
            node.kwargs = {}
            node.args = node.args[:2]


def keep(data: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Scale up the elements of `data` that the mask keeps, and zero the others; the result has the strides of `data`."""
    scale = mask.to(data.dtype).div_(1 - p)
    return scale.mul_(data) if scale.stride() == data.stride() else data * scale


def split_dropout(graph: fx.Graph) -> None:
    """Replace each dropout on a CPU, and its backward, by `draw_mask` and `keep`; on a GPU add an op for the product."""
    for node in graph.find_nodes(op="call_function", target=WHOLE):
        data, p, train = node.args
        if not (train and 0 < p < 1):
            continue
        if data.meta["val"].device.type == "cpu":
            _split(graph, node)
        elif data.meta["val"].device.type == "cuda" and data.meta["val"].is_contiguous():
            _recompute_product(graph, node)


def gpu_scale(p: float, dtype: torch.dtype) -> float:
    """Return the factor of elements that stay, rounded as the GPU's forward kernel does: via `1 - p` in single precision."""
    if dtype == torch.float64:
        return 1.0 / (1.0 - p)
    return float(np.float32(1.0 / float(np.float32(1.0 - p))))


def _recompute_product(graph: fx.Graph, node: fx.Node) -> None:
    """Let the readers of the product read an op that computes it from data and mask; where nothing is saved, do nothing."""
    data, p, _ = node.args
    parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
    if 0 not in parts or 1 not in parts:
        return
    product, scale = parts[0], gpu_scale(p, data.meta["val"].dtype)  # type: ignore[arg-type, union-attr]
    with graph.inserting_before(product):
        mask = graph.node_copy(parts[1])
        again = graph.call_function(BACKWARD, (data, mask, scale))
    again.meta = {**product.meta, SAME_BITS: node}
    product.replace_all_uses_with(again)
    graph.erase_node(product)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    data, p, _ = node.args
    kept, mask = node.meta["val"]
    with graph.inserting_before(node):
        drawn = _insert(graph, node, draw_mask, (tuple(mask.shape), mask.stride(), mask.device, p), mask)
        product = _insert(graph, node, keep, (data, drawn, p), kept)
    for part in list(node.users):
        part.replace_all_uses_with((product, drawn)[part.args[1]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)
    for reader in list(drawn.users):
        if reader.target is BACKWARD:
            reader.target = keep
            reader.args = (reader.args[0], drawn, p)


def _insert(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], result: torch.Tensor) -> fx.Node:
    new = graph.call_function(target, args)
    new.meta = {**node.meta, "val": result}
    return new


def draws(target: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an op draws from the generator: PyTorch tags it so, and it is no attention without dropout.

    Others draw whatever their probability is: `bernoulli(x, 0.0)` moves the generator.
    """
    if target in (draw_mask, draw_over, draw_normal_over):
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" not in names or bool(named.get("dropout_p", 0.0) > 0)
