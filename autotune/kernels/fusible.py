"""Decide which ops of a captured step may be fused: those that inductor generates a kernel for."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autotune.capture.program import Call, Program, View
from autotune.capture.rewrites import batch_norm, dropout
from autotune.ir.graph import Op, Phase

aten = torch.ops.aten

UNFUSED = frozenset(
    [
        aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot, aten.addmv,
        aten.convolution, aten.convolution_backward,
        aten.embedding_dense_backward, aten.index_put, aten._unsafe_index_put, aten.scatter_add, aten.index_add,
        aten.scatter_reduce, aten.col2im,
        aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
        aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward,
        aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.grid_sampler_2d,
        aten.sort, aten.topk, aten.cumsum, aten.cumprod,
    ]
)  # fmt: skip
"""Ops for which a library's kernel is faster, or which add up in an order that depends on the threads."""

_NUMBERS = (aten._local_scalar_dense.default, aten.item.default)
"""Ops that read a number from a tensor, such as a float of the step that changed and is an input now."""


def find_fusible(program: Program) -> list[bool]:
    """Return for each op of a program whether it may be part of a compiled region."""
    return [_is_fusible(op, call) for op, call in zip(program.graph.ops, program.calls, strict=True)]


def _is_fusible(op: Op, call: Call) -> bool:
    if op.phase is Phase.UPDATE or op.random or op.writes or not op.repeatable or not op.outputs:
        return False
    return _has_kernel(call.target) and not _reads_number((call.args, call.kwargs))


def _reads_number(argument: Any) -> bool:
    """Return whether an argument is a Python number that is read from a tensor, which inductor cannot trace."""
    match argument:
        case View(target, args, kwargs):
            return target in _NUMBERS or _reads_number((args, kwargs))
        case tuple() | list():
            return any(map(_reads_number, argument))
    return False


@cache
def _has_kernel(target: Callable[..., Any]) -> bool:
    """Return whether inductor lowers an op to code of its own instead of a call of ATen's kernel."""
    if target is dropout.keep or getattr(target, "__module__", "") == batch_norm.__name__:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket in UNFUSED:
        return False
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallbacks, lowerings

    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target in select_decomp_table() or (target in lowerings and target not in fallbacks)
