"""Let a region write an output over one of its inputs: decide which inputs allow it, and change the traced graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autotune.capture.program import Call, Meta, Read, View, reads
from autotune.capture.rewrites import batch_norm, dropout

aten = torch.ops.aten

RESHAPES = frozenset([aten.view.default, aten._unsafe_view.default, aten.reshape.default])
"""Views that keep the order of the elements of a contiguous tensor."""


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

    Each element of the output depends on the same element of the input. What depends on the output does not read the
    input. Regions with sums are left out: inductor splits their loops where one writes over an input, and the parts pass
    values on in buffers that the region itself does not need.
    """
    if not all(_is_pointwise(call) for call in calls):
        return ()
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
        if (aligned | mixed).isdisjoint(created):
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


def _is_pointwise(call: Call) -> bool:
    """Return whether each element of an op's result depends on the elements at its place, and on those of broadcast inputs."""
    is_batch_norm = getattr(call.target, "__module__", "") == batch_norm.__name__
    overload = isinstance(call.target, torch._ops.OpOverload) and torch.Tag.pointwise in call.target.tags
    return is_batch_norm or call.target is dropout.keep or overload


def _same_place(call: Call, metas: Sequence[Meta | None]) -> frozenset[int]:
    """Return the values of which a pointwise op reads only the element at the place of the element that it writes."""
    result = metas[_created(call)[0]]
    aligned: set[int] = set()
    others: set[int] = set()
    for argument in call.args:
        source = argument
        while isinstance(source, View) and source.target in RESHAPES:
            source = source.args[0]
        meta = metas[source.value] if isinstance(source, Read) else None
        fits = (
            meta is not None
            and result is not None
            and _lie_alike(meta, result)
            and (isinstance(argument, Read) or _is_contiguous(meta))
        )
        (aligned if fits else others).update(reads(argument))
    return frozenset(aligned - others - set(reads([part for _, part in call.kwargs])))


def write_over(graph: fx.Graph, position: int, number: int) -> None:
    """Change a traced graph so that one of its outputs is written to the memory of an input, and not returned.

    Inductor writes the input in the kernel that computes the output, after all reads of the input.
    """
    source = list(graph.find_nodes(op="placeholder"))[position]
    returned = graph.output_node()
    results: list[Any] = list(returned.args[0])  # type: ignore[arg-type]
    output = results.pop(number)
    shape = list(source.meta["val"].shape)
    with graph.inserting_before(returned):
        if list(output.meta["val"].shape) != shape:
            reshaped = graph.call_function(aten.view.default, (output, shape))
            reshaped.meta["val"] = output.meta["val"].view(shape)
            output = reshaped
        written = graph.call_function(aten.copy_.default, (source, output))
        written.meta["val"] = source.meta["val"]
    returned.args = (tuple(results),)


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
