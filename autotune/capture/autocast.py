"""Trace autocast as eager runs it: a weight is cast once in a region for all its readers, and one kernel casts inside.

Backward follows from the shared cast: the gradients of all readers are added in the lower precision, then cast back once.
torch's tracers switch that cache off. Besides, their stand-ins for weights are no leaves, and only casts of leaves are cached.

The kernel of a bilinear layer is not cast itself, but calls matrix products that are. A captured step runs without autocast,
so this kernel is run under the autocast of its trace.
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
"""Function of a bilinear layer, and the kernel below it that casts inside."""
_UNDER = "autotune_autocast"
"""Key among a traced node's annotations: device and dtype of the active autocast."""


@contextmanager
def eager_autocast() -> Iterator[None]:
    """Trace autocast as eager runs it; other threads of the process must not trace meanwhile."""
    from torch._functorch._aot_autograd import collect_metadata_analysis

    annotating = dict.fromkeys((DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd), _bilinear)
    mirror = torch._mirror_autograd_meta_to  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for module in (proxy_tensor, collect_metadata_analysis):
            stack.enter_context(mock.patch.object(module, "disable_autocast_cache", nullcontext))
        stack.enter_context(mock.patch.object(torch, "_mirror_autograd_meta_to", _leaves_for_leaves(mirror)))
        stack.callback(LAYER._dispatch_cache.clear)
        stack.enter_context(mock.patch.dict(LAYER.py_kernels, annotating))
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
    """Trace a bilinear layer's function, annotated with the active autocast."""
    device = data.device.type
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    with traceback.annotate({_UNDER: autocast}):
        result: torch.Tensor = LAYER._op_dk(DispatchKey.CompositeImplicitAutograd, data, *arguments)
    return result


def cast_inside(graph: fx.Graph) -> None:
    """Run the kernel that casts inside under the autocast of its trace; backward has none."""
    for node in graph.find_nodes(op="call_function", target=KERNEL):
        # the tracer copies a forward node's annotation to the backward nodes of the same call
        autocast = node.meta.get("custom", {}).get(_UNDER)
        if autocast is not None and node.meta.get("partitioner_tag") != "is_backward":
            node.target = make_trilinear(*autocast)


@cache
def make_trilinear(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a function that runs the kernel under autocast."""

    def run(*arguments: Any) -> torch.Tensor:
        with torch.autocast(device, dtype, cache_enabled=False):
            result: torch.Tensor = KERNEL(*arguments)
        return result

    run.__name__ = f"trilinear_under_{str(dtype).removeprefix('torch.')}"
    return run
