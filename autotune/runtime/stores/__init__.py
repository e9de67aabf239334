"""Stores: where offloaded values go and come back from.

To add one: a file here with a class that keeps `SwapStore`, a line in `STORES`, and its name in `records.config.StoreName` and the
knob of `planners.offload.window`. The rest takes it from there. Importing this package imports no torch.

In: tensors that leave memory.
Out: the same bytes, back in time.
Read first: this file.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from autotune.errors import ConfigError
from autotune.ir.costs import Costs

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.runtime.stores.pinned_host import HostStore
    from autotune.runtime.stores.slab_store import SlabStore


class SwapStore(Protocol):
    """Takes tensors away and brings them back, one writing and one reading worker beside the caller.

    Transfers of one slot keep the order in which they were asked for: a fetch gives what the last put before it wrote.
    Everything that goes wrong in a worker is a StoreError of the future.
    """

    name: str
    directory: Path
    direct: bool
    """Its transfers go past the page cache."""
    holds_memory: bool
    """Its bytes lie in this device's own memory."""
    pool_bytes: int
    """Memory that it holds as long as it is open, whatever is in it."""
    written_bytes: int
    """Since it was opened."""
    read_bytes: int

    def put(self, key: int, tensor: "Tensor") -> "Future[None]":
        """Begin to write the tensor's whole storage; it is let go the moment before the future is done."""
        ...

    def fetch(self, key: int, into: "Tensor | None" = None) -> "Future[Tensor]":
        """Begin to read what the last put of this key holds: into memory that this thread allocates now, or into the
        storage of a tensor that has as many bytes.
        """
        ...

    def transfers(self) -> list[tuple[str, float, float]]:
        """(`write` or `read`, start, end) of every transfer since this was asked last; seconds of `time.perf_counter`."""
        ...

    def held_bytes(self) -> int:
        """Bytes that its file takes from memory right now: all of it on a tmpfs, what the page cache holds on a disk."""
        ...

    def close(self) -> None:
        """Give everything back; transfers not yet begun fail. Twice is once."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def _ssd(directory: Path, slots: Mapping[int, int], **options: Any) -> "SlabStore":
    from autotune.runtime.stores.slab_store import SlabStore

    return SlabStore("ssd", directory, slots, **options)


def _ramdisk(directory: Path, slots: Mapping[int, int], **options: Any) -> "SlabStore":
    from autotune.runtime.stores.slab_store import SlabStore

    return SlabStore("ramdisk", directory, slots, only_memory=True, **options)


def _host(directory: Path, slots: Mapping[int, int], **options: Any) -> "HostStore":
    from autotune.runtime.stores.pinned_host import HostStore

    return HostStore("host", directory, slots, **options)


STORES: dict[str, Callable[..., SwapStore]] = {"ssd": _ssd, "ramdisk": _ramdisk, "host": _host}
FOR = {"ssd": "cpu", "ramdisk": "cpu", "host": "cuda"}
"""The kind of device whose tensors a store takes."""


def open_store(name: str, directory: str | Path, slots: Mapping[int, int], **options: Any) -> SwapStore:
    """Open the store of this name with all of its slots (key to bytes) allocated, or raise a StoreError.

    `options` are the store's own: `checksums` ("all", "sampled", "off").
    """
    if name not in STORES:
        raise ConfigError(f"unknown store {name!r}; known: {', '.join(sorted(STORES))}. Write --store ssd=DIR")
    return STORES[name](Path(directory), slots, **options)


def measured(costs: Costs, directories: Mapping[str, Path], device: str = "cpu") -> Costs:
    """The costs with what each store does in its directory, and how much it slows computing: see `probe`."""
    from autotune.runtime.stores import probe as rates

    for name in directories:
        if FOR[name] != device:
            fits = ", ".join(f"--store {other}=DIR" for other, kind in FOR.items() if kind == device)
            raise ConfigError(f"the store {name!r} takes no tensors of device {device}; use {fits}")
    found = {}
    for name, directory in directories.items():
        contention, slowed = rates.contention(name, directory)
        found[name] = replace(rates.probe(name, directory), contention=contention, slowed=slowed)
    return replace(costs, stores=found)
