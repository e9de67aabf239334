"""Fold sums into matrix products: a product that is only added to a value becomes one kernel that adds to it.

The gradients of a weight that is used in each step of a recurrent layer are such sums. The kernel rounds differently.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from autotune.capture.fx_nodes import target_name
from autotune.capture.program import Call, Meta, Read, View, argument_text, hash_signature, reads
from autotune.capture.regions import GroupedOps, Region, renumber
from autotune.ir.graph import Op

aten = torch.ops.aten
NAME = "addmm"
"""Name of a region of a product and its sum, until `as_addmm` replaces it."""


def find_sums(
    ops: Sequence[Op], calls: Sequence[Call], metas: Sequence[Meta | None], excluded: Set[int], kept: Set[int]
) -> list[tuple[int, int]]:
    """Return the positions of each matrix product and of the addition that alone reads it.

    Args:
        ops: Ops in an order in which they can run.
        calls: Their calls.
        metas: Descriptions of all values.
        excluded: Positions of ops that stay as they are.
        kept: Values that outlive the step.
    """
    readers: dict[int, list[int]] = {}
    for position, op in enumerate(ops):
        for value in op.inputs:
            readers.setdefault(value, []).append(position)
    products = {
        call.outputs: position
        for position, call in enumerate(calls)
        if call.target is aten.mm.default and position not in excluded and isinstance(call.outputs, int)
    }
    pairs = []
    for position, call in enumerate(calls):
        if call.target is not aten.add.Tensor or position in excluded or call.kwargs or len(call.args) != 2:
            continue
        values = [_whole_value(argument) for argument in call.args]
        same = {_place(metas[value]) for value in (*values, call.outputs) if isinstance(value, int)}
        if None in values or values[0] == values[1] or len(same) != 1:
            continue
        folded = [
            products[value]
            for value in values
            if value in products and readers[value] == [position] and value not in kept
            and ops[products[value]].phase is ops[position].phase
        ]  # fmt: skip
        if folded:
            pairs.append((max(folded), position))  # the later one: the other summand exists already
    return pairs


def as_addmm(op: Op, region: Region, step: GroupedOps, static: Set[int]) -> tuple[Op, Call]:
    """Return one op and call for a region of a product and its sum.

    Args:
        op: The region's op.
        region: The calls of the product and of the addition.
        step: The step that the op is in.
        static: Values that no op may overwrite.
    """
    product, addition = region.calls
    added = [_whole_value(argument) for argument in addition.args]
    summand = step.new_ids[next(value for value in added if value is not None and value != product.outputs)]
    arguments: Any = (Read(summand), *renumber(product.args, step.new_ids))
    is_read_twice = summand in set(reads(arguments[1:]))
    fits = step.values[summand].nbytes == step.values[op.outputs[0]].nbytes
    target = aten.addmm.default
    name = target_name(target)
    merged = replace(
        op,
        name=f"{op.layer}.{NAME}{op.id}",
        target=name,
        inputs=tuple(dict.fromkeys(reads(arguments))),
        signature=hash_signature((name, "", argument_text(arguments, step.metas), argument_text((), step.metas))),
        inplace=(summand,) if fits and not is_read_twice and summand not in static else (),
    )
    return merged, Call(target, arguments, (), op.outputs[0])


def _whole_value(argument: Any) -> int | None:
    """Return the value that an argument is, or is transposed twice; None for other views."""
    match argument:
        case Read(value):
            return value
        case View(aten.t.default, (View(aten.t.default, (inner,), ()),), ()):
            return _whole_value(inner)
    return None


def _place(meta: Meta | None) -> object:
    return None if meta is None else (meta.shape, meta.stride, meta.dtype, meta.device)
