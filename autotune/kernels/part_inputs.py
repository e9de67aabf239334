"""Pass parts of tensors to regions as arguments: regions that differ only in the part which they read share one kernel.

Each step of a recurrent layer reads another slice of one tensor. Inside of a region the slice's number is a constant, so
each step would need a kernel of its own.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.capture.program import Meta, Read, View, reads
from autotune.capture.regions import Region

aten = torch.ops.aten
PARTS = frozenset([aten.select.int, aten.slice.Tensor])
"""Views of a part of a tensor."""
_LISTS = frozenset([aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default])
"""Views of all parts, of which one is taken."""


def read_parts(
    region: Region, arguments: Sequence[Any], metas: Sequence[Meta | None]
) -> tuple[Region, tuple[Any, ...], list[Meta | None]]:
    """Return a region that gets parts of its inputs as inputs, its arguments, and the descriptions of values inside.

    Args:
        region: A region that reads whole values.
        arguments: What the step passes for each of its inputs.
        metas: Descriptions of the values inside of the region.
    """
    inside = list(metas)
    parts: dict[str, tuple[View, int]] = {}  # by text: the arguments of a view may be lists
    argument_of = dict(zip(region.inputs, arguments, strict=True))

    def substitute(argument: Any) -> Any:
        match argument:
            case View() if _is_part(argument) and next(reads(argument)) in argument_of:
                text = repr(argument)
                if text not in parts:
                    parts[text] = argument, len(inside)
                    inside.append(_describe(argument, metas))
                return Read(parts[text][1])
            case View(target, args, kwargs):
                return View(target, substitute(args), substitute(kwargs))
            case tuple():
                return tuple(substitute(each) for each in argument)
            case list():
                return [substitute(each) for each in argument]
        return argument

    calls = [replace(call, args=substitute(call.args), kwargs=substitute(call.kwargs)) for call in region.calls]
    if not parts:
        return region, tuple(arguments), inside
    still_read = {value for call in calls for value in reads((call.args, [each for _, each in call.kwargs]))}
    inputs = [value for value in region.inputs if value in still_read]
    other = Region(region.__name__, calls, [*inputs, *(value for _, value in parts.values())], region.outputs, inside)
    return (
        other,
        (*(argument_of[value] for value in inputs), *(_pass(part, argument_of) for part, _ in parts.values())),
        inside,
    )


def _is_part(view: View) -> bool:
    """Return whether a view is a part of one value, or of a view of it."""
    match view:
        case View(operator.getitem, (View(target, (source, *_), ()), int()), ()) if target in _LISTS:
            return len(list(reads(source))) == 1
        case View(target, (source, *_), ()):
            return target in PARTS and len(list(reads(source))) == 1
    return False


def _describe(view: View, metas: Sequence[Meta | None]) -> Meta:
    """Return the description of a view of one value."""

    def evaluate(argument: Any) -> Any:
        match argument:
            case Read(value):
                meta = metas[value]
                assert meta is not None
                return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            case View(target, args, kwargs):
                return target(*map(evaluate, args), **{key: evaluate(each) for key, each in kwargs})
        return argument

    tensor, source = evaluate(view), metas[next(reads(view))]
    assert source is not None
    return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, source.device)


def _pass(argument: Any, argument_of: dict[int, Any]) -> Any:
    """Return a part as an argument of the step's call."""
    match argument:
        case Read(value):
            return argument_of[value]
        case View(target, args, kwargs):
            return View(target, tuple(_pass(each, argument_of) for each in args), kwargs)
    return argument
