"""Let a region write an output over one of its inputs: decide which inputs allow it, and change the traced graph."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autotune.capture.program import Call, Meta, Read, View, reads
from autotune.capture.rewrites import batch_norm, dropout

aten = torch.ops.aten

ELEMENTWISE_WITH_SUMS: dict[Any, tuple[int, ...]] = {
    aten._log_softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.nll_loss_backward.default: (1,),
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    aten.native_batch_norm_backward.default: (0, 1),
    aten.native_group_norm_backward.default: (0, 1),
    dropout.keep: (0, 1),
}
"""Positions of the arguments whose element, beside sums over others, is in the same element of the op's first result.

The forward softmax is left out: inductor of torch 2.13 raises a KeyError for one that writes over its input.
"""

REDUCTIONS = frozenset(
    [aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
     aten.var_mean.correction, aten.nll_loss_forward.default]
)  # fmt: skip
"""Ops whose result is computed from all elements before an op that reads it begins."""

RESHAPES = frozenset([aten.view.default, aten._unsafe_view.default, aten.reshape.default])
"""Views that keep the order of the elements of a contiguous tensor."""

UNROLLED = 8
"""Number of elements below which inductor computes a sum inside of the loop that reads it."""

_SUMMED: dict[Any, Callable[[tuple[int, ...], tuple[Any, ...]], int]] = {
    aten._log_softmax.default: lambda shape, args: _size(shape, args[1]),
    aten._softmax_backward_data.default: lambda shape, args: _size(shape, args[2]),
    aten._log_softmax_backward_data.default: lambda shape, args: _size(shape, args[2]),
    aten.native_layer_norm.default: lambda _, args: math.prod(args[1]),
    aten.native_layer_norm_backward.default: lambda _, args: math.prod(args[2]),
    aten.native_batch_norm_backward.default: lambda shape, _: math.prod(shape) // max(shape[1], 1),
    aten.native_group_norm_backward.default: lambda shape, args: math.prod(shape[1:]) // args[8],
}
"""Number of elements in each sum of an op, from the shape of its first argument and all arguments."""


def _size(shape: tuple[int, ...], dim: int) -> int:
    return shape[dim] if shape else 1


def find_target(source: Meta | None, outputs: Sequence[Meta | None]) -> int | None:
    """Return the number of the output that takes the memory of an input: the first of as many bytes, if both lie alike."""
    if source is None or not _nbytes(source):
        return None
    number = next((number for number, output in enumerate(outputs) if _nbytes(output) == _nbytes(source)), None)
    result = None if number is None else outputs[number]
    return number if result is not None and _lie_alike(source, result) else None


def find_overwritable(
    calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int], metas: Sequence[Meta | None]
) -> tuple[int, ...]:
    """Return the inputs of a region that an output may overwrite without a second buffer.

    Each element of the output depends on the same element of the input. It may depend on others through sums of at least
    `UNROLLED` elements, which are computed before. What depends on the output does not read the input.
    """
    overwritable = []
    for value in inputs:
        number = find_target(metas[value], [metas[output] for output in outputs])
        if number is not None and _is_elementwise(calls, value, outputs[number], metas):
            overwritable.append(value)
    return tuple(overwritable)


def _is_elementwise(calls: Sequence[Call], value: int, output: int, metas: Sequence[Meta | None]) -> bool:
    aligned, mixed = {output}, set[int]()
    for call in reversed(calls):
        created = _created(call)
        if (aligned | mixed).isdisjoint(created) or (call.target in REDUCTIONS and not has_short_sums(call, metas)):
            continue
        same_place = _same_place(call, metas) if created[0] in aligned - mixed else frozenset[int]()
        aligned |= same_place
        mixed |= _reads(call) - same_place
    later = {output}
    for call in calls:
        if not later.isdisjoint(_reads(call)):
            if value in _reads(call):
                return False
            later.update(_created(call))
    return value in aligned - mixed


def _same_place(call: Call, metas: Sequence[Meta | None]) -> frozenset[int]:
    """Return the values of which an op reads only the element at the place of the element that it writes, beside sums."""
    is_batch_norm = getattr(call.target, "__module__", "") == batch_norm.__name__
    positions = (0,) if is_batch_norm else ELEMENTWISE_WITH_SUMS.get(call.target)
    pointwise = isinstance(call.target, torch._ops.OpOverload) and torch.Tag.pointwise in call.target.tags
    if (positions is None and not pointwise) or has_short_sums(call, metas):
        return frozenset()
    result = metas[_created(call)[0]]
    aligned: set[int] = set()
    others: set[int] = set()
    for position, argument in enumerate(call.args):
        source = argument
        while isinstance(source, View) and source.target in RESHAPES:
            source = source.args[0]
        meta = metas[source.value] if isinstance(source, Read) else None
        fits = (
            meta is not None
            and result is not None
            and _lie_alike(meta, result)
            and (isinstance(argument, Read) or _is_contiguous(meta))
            and (positions is None or position in positions)
        )
        (aligned if fits else others).update(reads(argument))
    return frozenset(aligned - others - set(reads([part for _, part in call.kwargs])))


def has_short_sums(call: Call, metas: Sequence[Meta | None]) -> bool:
    """Return whether an op adds up so few elements that inductor reads them all for each element that it computes."""
    if call.target in _SUMMED:
        return _SUMMED[call.target](_shape(call.args[0], metas), call.args) < UNROLLED
    if call.target not in REDUCTIONS:
        return False
    result = next((metas[value] for value in _created(call) if value >= 0), None)
    sums = 1 if result is None else math.prod(result.shape)
    return sums > 1 and math.prod(_shape(call.args[0], metas)) < UNROLLED * sums


def _shape(argument: Any, metas: Sequence[Meta | None]) -> tuple[int, ...]:
    return tuple(_without_memory(argument, metas).shape)


def _without_memory(argument: Any, metas: Sequence[Meta | None]) -> Any:
    """Return an argument with tensors that have no memory."""
    match argument:
        case Read(value):
            meta = metas[value]
            assert meta is not None  # only updates read optimizer state, which has none
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        case View(target, args, kwargs):
            return target(*_without_memory(args, metas), **{key: _without_memory(part, metas) for key, part in kwargs})
        case tuple() | list():
            parts = (_without_memory(part, metas) for part in argument)
            return tuple(parts) if isinstance(argument, tuple) else list(parts)
        case _:
            return argument


def write_over(graph: fx.Graph, position: int, number: int) -> None:
    """Change a traced graph so that one of its outputs is written to the memory of an input, and not returned.

    What depends on the output reads it there: a sum over it would otherwise keep a second buffer. Everything else is
    computed before, so that inductor need not keep what it reads of the input.
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    source, returned = inputs[position], graph.output_node()
    _copy_returned_inputs(graph, inputs, source, number)
    output = returned.args[0][number]  # type: ignore[index]
    assert isinstance(output, fx.Node)
    later = {output}
    for node in graph.nodes:
        if not later.isdisjoint(node.all_input_nodes):
            later.add(node)
    following = list(graph.nodes)[list(graph.nodes).index(output) :]
    for node in following:
        if node not in later:
            output.prepend(node)
    shape, original = source.meta["val"].shape, output.meta["val"].shape
    with graph.inserting_before(output.next):
        reshaped = output if shape == original else _add(graph, aten.view.default, output, list(shape))
        written = _add(graph, aten.copy_.default, source, reshaped)
        result = written if shape == original else _add(graph, aten.view.default, written, list(original))
    output.replace_all_uses_with(result, delete_user_cb=lambda user: user not in (reshaped, written))
    results: list[Any] = list(returned.args[0])  # type: ignore[arg-type]
    del results[number]
    returned.args = (tuple(results),)


def _copy_returned_inputs(graph: fx.Graph, inputs: Sequence[fx.Node], source: fx.Node, number: int) -> None:
    """Return copies where the graph returns a view of an input that is overwritten, or an input as the written output.

    Inductor drops sums with zeros and products with ones. Without a copy, other inputs would change their order, and the
    overwritten input would be returned with its new elements.
    """
    returned = graph.output_node()
    results: list[Any] = list(returned.args[0])  # type: ignore[arg-type]
    for place, result in enumerate(results):
        if _without_views(result) is source or (place == number and result in inputs):
            with graph.inserting_after(inputs[-1] if result in inputs else result):
                results[place] = copied = graph.call_function(aten.clone.default, (result,))
            copied.meta["val"] = result.meta["val"].clone()
    returned.args = (tuple(results),)


def _without_views(result: Any) -> Any:
    """Return the node that a chain of views begins with; the node itself if it is no view."""
    while isinstance(result, fx.Node) and (getattr(result.target, "is_view", False) or result.target in RESHAPES):
        result = result.args[0]
    return result


def _add(graph: fx.Graph, target: Any, first: fx.Node, second: Any) -> fx.Node:
    node = graph.call_function(target, (first, second))
    node.meta["val"] = first.meta["val"].view(second) if isinstance(second, list) else first.meta["val"]
    return node


def _reads(call: Call) -> set[int]:
    return set(reads((call.args, [part for _, part in call.kwargs])))


def _created(call: Call) -> list[int]:
    outputs = call.outputs if isinstance(call.outputs, tuple) else (call.outputs,)
    return [-1 if output is None else output for output in outputs] or [-1]


def _lie_alike(source: Meta, result: Meta) -> bool:
    """Return whether equal places in memory hold equal elements of both tensors."""
    if (source.dtype, source.device) != (result.dtype, result.device) or _nbytes(source) != _nbytes(result):
        return False
    same = (source.shape, source.stride) == (result.shape, result.stride)
    return same or (_is_contiguous(source) and _is_contiguous(result))


def _is_contiguous(meta: Meta) -> bool:
    expected = 1
    for size, stride in reversed(list(zip(meta.shape, meta.stride, strict=True))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _nbytes(meta: Meta | None) -> int:
    """Return the bytes of a tensor whose elements fill their memory; 0 for others, and without a description."""
    if meta is None:
        return 0
    places = sorted((stride, size) for size, stride in zip(meta.shape, meta.stride, strict=True) if size != 1)
    expected = 1
    for stride, size in places:
        if stride != expected:
            return 0
        expected *= size
    return expected * meta.dtype.itemsize
