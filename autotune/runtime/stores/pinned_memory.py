"""Allocate host memory that a GPU copies to and from beside computing."""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune.errors import StoreError
from autotune.units import fmt_bytes

_NO_MEMORY = 2
"""CUDA's error for memory that cannot be allocated or locked (cudaErrorMemoryAllocation)."""


def allocate_pinned(cuda: Any, name: str, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
    """Return a byte tensor of pinned host memory for the store `name`, and a function that unpins it.

    It is registered, because `pin_memory` rounds every block up to a power of two. Huge pages make that 500 times fewer
    pages to pin. A forked data loader gets none of it: the child's copy-on-write would move pages under a running copy.

    Raises StoreError if the memory cannot be pinned.
    """
    pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(pages, dtype=torch.uint8)
    status = int(cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if status:
        if cuda is torch.cuda:
            with contextlib.suppress(RuntimeError):  # the next kernel reports the failed call's error, and clears it
                torch.ones(1, device="cuda")
        advice = (
            "the host's memory or the process's limit is too small; free memory, raise ulimit -l, or offload less"
            if status == _NO_MEMORY
            else "check the driver with nvidia-smi, or use another store"
        )
        raise StoreError(
            f"{name} store: {fmt_bytes(nbytes)} of host memory cannot be pinned (CUDA error {status}); {advice}"
        )
    address = slab.data_ptr()

    def unpin() -> None:
        cuda.cudart().cudaHostUnregister(address)
        pages  # noqa: B018 - the reference keeps the memory until it is unpinned

    return slab, unpin
