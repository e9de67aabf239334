"""Stores: destinations of offloaded values.

To add one, write a module here with a class that implements `SwapStore`. Add a line to `STORES` and to `DEVICE_KINDS`.
Add its name to `records.config.StoreName` and to the knob of `planners.offload.window`. Test it with
`autotune.testing.store_contract`. Importing this package does not import torch.

In: tensors that leave memory.
Out: tensors with the same bytes, read back.
Read first: this file.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from autotune.errors import ConfigError
from autotune.ir.costs import Costs

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.runtime.stores.pinned_host import HostStore
    from autotune.runtime.stores.slab_store import SlabStore


class Direction(StrEnum):
    """Direction of a transfer between memory and a store."""

    WRITE = "write"
    READ = "read"


class SwapStore(Protocol):
    """A destination of tensors, with one writing and one reading worker beside the caller.

    Transfers of one slot keep the order in which they were requested: a fetch returns what the last put before it
    wrote. Every error in a worker becomes a StoreError of the future.
    """

    name: str
    directory: Path
    direct: bool
    """True if transfers bypass the page cache."""
    holds_memory: bool
    """True if its bytes lie in the memory of the device itself."""
    pool_bytes: int
    """Bytes of memory that the open store uses, whatever its slots hold."""
    written_bytes: int
    """Bytes written since it was opened."""
    read_bytes: int
    """Bytes read since it was opened."""

    def put(self, key: int, tensor: "Tensor") -> "Future[None]":
        """Start to write the tensor's whole storage to the slot `key`.

        The store drops its reference to the tensor just before the future is done. Raises StoreError for an unknown slot
        or a tensor that does not fit.
        """
        ...

    def fetch(self, key: int, into: "Tensor | None" = None) -> "Future[Tensor]":
        """Start to read what the last put to the slot `key` wrote.

        Args:
            key: The slot.
            into: A tensor whose storage has exactly as many bytes, which is filled and returned. None allocates a new
                tensor in the calling thread.

        Raises:
            StoreError: The slot is unknown or empty, or `into` has another number of bytes.
        """
        ...

    def transfers(self) -> list[tuple[Direction, float, float]]:
        """Return (direction, start, end) of each transfer since the last call; seconds of `time.perf_counter`."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes of memory that the stored bytes occupy now: all on a tmpfs, cached pages on a disk."""
        ...

    def close(self) -> None:
        """Release everything; transfers that have not started fail. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def _ssd(directory: Path, slots: Mapping[int, int], device: str, **options: Any) -> "SlabStore":
    if device == "cuda":
        from autotune.runtime.stores.gpu_slab_store import GpuSlabStore

        return GpuSlabStore("ssd", directory, slots, **options)
    from autotune.runtime.stores.slab_store import SlabStore

    return SlabStore("ssd", directory, slots, **options)


def _ramdisk(directory: Path, slots: Mapping[int, int], device: str, **options: Any) -> "SlabStore":
    from autotune.runtime.stores.slab_store import SlabStore

    del device
    return SlabStore("ramdisk", directory, slots, only_memory=True, **options)


def _host(directory: Path, slots: Mapping[int, int], device: str, **options: Any) -> "HostStore":
    from autotune.runtime.stores.pinned_host import HostStore

    del device
    return HostStore("host", directory, slots, **options)


STORES: dict[str, Callable[..., SwapStore]] = {"ssd": _ssd, "ramdisk": _ramdisk, "host": _host}
"""Constructor of each store, by name."""
DEVICE_KINDS: dict[str, tuple[str, ...]] = {"ssd": ("cpu", "cuda"), "ramdisk": ("cpu",), "host": ("cuda",)}
"""Kinds of devices whose tensors each store accepts."""
WITHOUT_DIRECTORY = frozenset(["host"])
"""Stores that use no directory."""


def open_store(
    name: str, directory: str | Path, slots: Mapping[int, int], device: str = "cpu", **options: Any
) -> SwapStore:
    """Open a store with all of its slots allocated.

    Args:
        name: A key of `STORES`.
        directory: Existing directory for the store's file; unused by `host`.
        slots: Bytes of each slot, by key.
        device: Kind of the device whose tensors the store takes, one of `DEVICE_KINDS[name]`.
        options: The store's own options, such as `checksums` ("all", "sampled" or "off").

    Raises:
        ConfigError: There is no store of this name.
        StoreError: The directory or the memory cannot hold the slots.

    Examples:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory, open_store("ssd", directory, {0: 4096}) as store:
        ...     store.put(0, torch.arange(3)).result()
        ...     store.fetch(0).result()
        tensor([0, 1, 2])
    """
    if name not in STORES:
        raise ConfigError(f"unknown store {name!r}; known: {', '.join(sorted(STORES))}. Write --store ssd=DIR")
    return STORES[name](Path(directory), slots, device, **options)


def measure_stores(costs: Costs, directories: Mapping[str, Path], device: str = "cpu") -> Costs:
    """Return `costs` with the measured speed of each store in its directory, and its contention with computing.

    Raises ConfigError for a store that does not accept tensors of `device`.
    """
    from autotune.runtime.stores import probe

    for name in directories:
        if device not in DEVICE_KINDS[name]:
            options = ", ".join(f"--store {store}=DIR" for store, kinds in DEVICE_KINDS.items() if device in kinds)
            raise ConfigError(f"the store {name!r} takes no tensors of device {device}; use {options}")
    stores = {}
    for name, directory in directories.items():
        contention, slowdown = probe.measure_contention(name, directory, device)
        stores[name] = replace(probe.measure_speed(name, directory, device), contention=contention, slowed=slowdown)
    return replace(costs, stores=stores)
