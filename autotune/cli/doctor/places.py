"""Directories: where runs are kept, and where stores put what is offloaded."""

import os
from pathlib import Path

from autotune.cli.doctor.finding import Finding
from autotune.units import fmt_bytes

_ROOM_BYTES = 2**30


def runs(directory: Path) -> Finding:
    from autotune.runtime.stores.slab_file import free_bytes

    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = free_bytes(existing)
    detail = f"{directory}, {_room(free)}"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("runs", "bad", f"{detail}, not writable", f"make {existing} a writable directory")
    if free is not None and free < _ROOM_BYTES:
        return Finding("runs", "warn", detail, "free space: a run keeps its records and logs there")
    return Finding("runs", "ok", detail)


def store(name: str, directory: Path) -> Finding:
    from autotune.runtime.stores import open_store
    from autotune.runtime.stores.slab_file import free_bytes

    title, free = f"store {name}", free_bytes(directory)
    with open_store(name, directory, {0: 1}) as opened:
        direct, holds_memory = opened.direct, opened.holds_memory
    if holds_memory:
        cure = "on a CPU it saves nothing; name a directory on a disk with --store ssd=DIR"
        return Finding(title, "warn", f"{directory} lies in memory, {_room(free)}", cure)
    if free is not None and free < _ROOM_BYTES:
        return Finding(title, "warn", f"{directory}, {_room(free)}", "free space: a step may offload more than this")
    if not direct:
        cure = "transfers take more time and CPU; name a directory on a local disk (ext4, xfs)"
        return Finding(title, "warn", f"{directory} has no O_DIRECT, {_room(free)}", cure)
    return Finding(title, "ok", f"{directory}, O_DIRECT, {_room(free)}")


def _room(free: int | None) -> str:
    return "no limit" if free is None else f"{fmt_bytes(free)} free"
