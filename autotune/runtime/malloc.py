"""glibc's malloc: when it gives memory back to the kernel. Without glibc nothing here does anything."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
RETURNED_BYTES = 64 * 2**10
"""What is smaller shares its pages with others, and they stay."""
_AT_ONCE = RETURNED_BYTES, RETURNED_BYTES
_LONG_LIVED = 64 * 2**20, 32 * 2**20  # where glibc's own adjustment ends
_always = False


def return_always() -> None:
    """From now on every block of 64 KiB and more goes back as soon as it is freed: for a process that weighs bytes."""
    global _always  # noqa: PLW0603 - the setting is the process's
    _always = True
    _set(*_AT_ONCE)


@contextmanager
def returning(wanted: bool = True) -> Iterator[None]:
    """The same for a while, if wanted; afterwards as glibc behaves in a long-lived process."""
    if not wanted:
        yield
        return
    _set(*_AT_ONCE)
    try:
        yield
    finally:
        trim()
        if not _always:
            _set(*_LONG_LIVED)


def trim() -> None:
    """Give back what is kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _set(trim_threshold: int, mmap_threshold: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
