"""Trace autocast as eager runs it: weights are cast once in a region for all that read them, and one kernel casts inside.

Backward follows from the former: the gradients of all readers are added in the lower precision, then cast back once. torch's
tracers do without that cache. They switch it off, and their stand-ins for weights are no leaves, whose casts it never keeps.

The kernel of a bilinear layer has no cast of its own, but calls matrix products that have one. Where the captured step runs
it autocast is off, so it gets the autocast that it was traced under.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._C import DispatchKey
from torch.fx import traceback
from torch.fx.experimental import proxy_tensor

LAYER, KERNEL = torch.ops.aten.bilinear.default, torch.ops.aten._trilinear.default
"""A bilinear layer's function, and the kernel below it that casts inside."""
_UNDER = "autotune_autocast"
"""Key among a traced node's annotations: device and dtype of the autocast that eager calls it under."""


@contextmanager
def eager_autocast() -> Iterator[None]:
    """Trace autocast as eager runs it; other threads of the process must not trace meanwhile."""
    from torch._functorch._aot_autograd import collect_metadata_analysis

    noting = dict.fromkeys((DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd), _bilinear)
    mirror = torch._mirror_autograd_meta_to  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for module in (proxy_tensor, collect_metadata_analysis):
            stack.enter_context(mock.patch.object(module, "disable_autocast_cache", nullcontext))
        stack.enter_context(mock.patch.object(torch, "_mirror_autograd_meta_to", _leaves_for_leaves(mirror)))
        stack.callback(LAYER._dispatch_cache.clear)
        stack.enter_context(mock.patch.dict(LAYER.py_kernels, noting))
        LAYER._dispatch_cache.clear()
        stack.callback(torch.clear_autocast_cache)  # in a region of the caller the casts would stay until its end
        yield


def _leaves_for_leaves(
    mirror: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Let a stand-in for a leaf be a leaf; the tracer gives it a history that only raises."""

    def mirror_to(source: torch.Tensor, stand_in: torch.Tensor) -> None:
        if source.is_leaf and source.requires_grad:
            stand_in.requires_grad_()
        else:
            mirror(source, stand_in)

    return mirror_to


def _bilinear(data: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Trace a bilinear layer's function, and note which autocast is on."""
    device = data.device.type
    noted = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    with traceback.annotate({_UNDER: noted}):
        made: torch.Tensor = LAYER._op_dk(DispatchKey.CompositeImplicitAutograd, data, *arguments)
    return made


def cast_inside(graph: fx.Graph) -> None:
    """Run the kernel that casts inside under the autocast that eager runs it under; backward has none."""
    for node in graph.find_nodes(op="call_function", target=KERNEL):
        # the tracer copies a forward node's annotation to the backward nodes of the same call
        noted = node.meta.get("custom", {}).get(_UNDER)
        if noted is not None and node.meta.get("partitioner_tag") != "is_backward":
            node.target = trilinear(*noted)


@cache
def trilinear(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return what runs the kernel under autocast."""

    def run(*arguments: Any) -> torch.Tensor:
        with torch.autocast(device, dtype, cache_enabled=False):
            made: torch.Tensor = KERNEL(*arguments)
        return made

    run.__name__ = f"trilinear_under_{str(dtype).removeprefix('torch.')}"
    return run
