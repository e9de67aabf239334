"""Control when glibc's malloc returns freed memory to the kernel. Without glibc nothing here has an effect."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
RETURNED_BYTES = 64 * 2**10
"""Smallest block that can return to the kernel; smaller blocks share their pages with others."""
_IMMEDIATE = RETURNED_BYTES, RETURNED_BYTES
_LONG_LIVED = 64 * 2**20, 32 * 2**20  # the limits of glibc's own adjustment
_is_permanent = False


def always_release() -> None:
    """Return every freed block of 64 KiB or more at once, from now on: for a process whose bytes are measured."""
    global _is_permanent  # noqa: PLW0603 - the setting belongs to the process
    _is_permanent = True
    _set(*_IMMEDIATE)


@contextmanager
def eager_release(enabled: bool = True) -> Iterator[None]:
    """Return freed blocks of 64 KiB or more at once inside the context, if enabled.

    Afterwards malloc behaves as in a long-lived process, unless `always_release` was called.
    """
    if not enabled:
        yield
        return
    _set(*_IMMEDIATE)
    try:
        yield
    finally:
        trim()
        if not _is_permanent:
            _set(*_LONG_LIVED)


def trim() -> None:
    """Return all free pages of malloc's heap to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _set(trim_threshold: int, mmap_threshold: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
