"""Checks of directories: of the runs, and of the stores for offloaded bytes."""

import os
from pathlib import Path

from autotune.cli.doctor.check_result import CheckResult
from autotune.measure.device.directories import inspect_store, read_free_bytes
from autotune.units import fmt_bytes

_ENOUGH_BYTES = 2**30


def check_runs(directory: Path) -> CheckResult:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = read_free_bytes(existing)
    detail = f"{directory}, {_format_free(free)}"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return CheckResult("runs", "bad", f"{detail}, not writable", f"make {existing} a writable directory")
    if free is not None and free < _ENOUGH_BYTES:
        return CheckResult("runs", "warn", detail, "free space: a run writes its records and logs there")
    return CheckResult("runs", "ok", detail)


def check_store(name: str, directory: Path) -> CheckResult:
    title, store = f"store {name}", inspect_store(name, directory)
    free = store.free_bytes
    if store.holds_memory:
        fix = "on a CPU it saves no memory; name a directory on a disk with --store ssd=DIR"
        return CheckResult(title, "warn", f"{directory} is in memory, {_format_free(free)}", fix)
    if free is not None and free < _ENOUGH_BYTES:
        return CheckResult(
            title, "warn", f"{directory}, {_format_free(free)}", "free space: a step may offload more than this"
        )
    if not store.is_direct:
        fix = "transfers take more time and CPU; name a directory on a local disk (ext4, xfs)"
        return CheckResult(title, "warn", f"{directory} has no O_DIRECT, {_format_free(free)}", fix)
    return CheckResult(title, "ok", f"{directory}, O_DIRECT, {_format_free(free)}")


def _format_free(free: int | None) -> str:
    return "no limit" if free is None else f"{fmt_bytes(free)} free"
