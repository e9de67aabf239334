"""Trace autocast with its cache: eager casts a weight once in a region, for all that read it.

Backward follows from that: the gradients of all readers are added in the lower precision, then cast back once. torch's
tracers do without the cache. They switch it off, and their stand-ins for weights are no leaves, whose casts it never keeps.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.fx.experimental import proxy_tensor


@contextmanager
def cached_casts() -> Iterator[None]:
    """Keep casts of weights while a step is traced; other threads of the process must not trace meanwhile."""
    from torch._functorch._aot_autograd import collect_metadata_analysis

    with ExitStack() as stack:
        for module in (proxy_tensor, collect_metadata_analysis):
            stack.enter_context(mock.patch.object(module, "disable_autocast_cache", nullcontext))
        mirror = torch._mirror_autograd_meta_to  # type: ignore[attr-defined]
        stack.enter_context(mock.patch.object(torch, "_mirror_autograd_meta_to", _leaves_for_leaves(mirror)))
        stack.callback(torch.clear_autocast_cache)  # inside of a region of the caller the casts would stay until its end
        yield


def _leaves_for_leaves(mirror: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Let a stand-in for a leaf be a leaf; the tracer gives it a history that only raises."""

    def mirror_to(source: torch.Tensor, stand_in: torch.Tensor) -> None:
        if source.is_leaf and source.requires_grad:
            stand_in.requires_grad_()
        else:
            mirror(source, stand_in)

    return mirror_to
