"""Inspect the directories of runs and of stores."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Properties of a store's directory."""

    free_bytes: int | None
    """Free space; None for no limit."""
    is_direct: bool
    """True if transfers bypass the page cache (O_DIRECT)."""
    holds_memory: bool
    """True if the stored bytes stay in memory."""


def read_free_bytes(directory: Path) -> int | None:
    """Return the free bytes of a directory's file system; None for no limit."""
    from autotune.runtime.stores.slab_file import free_bytes

    return free_bytes(directory)


def inspect_store(name: str, directory: Path) -> StoreFacts:
    """Open a store in a directory for one byte, and return the properties of the directory.

    Raises StoreError where the store cannot be opened.
    """
    from autotune.runtime.stores import open_store

    free = read_free_bytes(directory)
    with open_store(name, directory, {0: 1}) as opened:
        return StoreFacts(free, opened.direct, opened.holds_memory)
