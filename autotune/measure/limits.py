"""Enforce a memory limit on a child, and tell when a failure was for want of memory or of disk."""

import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.measure.meters.cgroup import Cgroup
from autotune.records.measurement import Outcome

CGROUP = "cgroup"
RLIMIT = "rlimit (emulated)"
FRACTION = "fraction (emulated)"

_ROOT = Path("/")
_NO_MEMORY_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
)


def limit_cgroup(cgroup: Cgroup, nbytes: int) -> None:
    """Let everything in the cgroup, swap included, have `nbytes` and no more; the kernel kills what needs more."""
    if cgroup.version == 1:
        (cgroup.path / "memory.limit_in_bytes").write_text(str(nbytes))
        swap, none = cgroup.path / "memory.memsw.limit_in_bytes", str(nbytes)
    else:
        (cgroup.path / "memory.max").write_text(str(nbytes))
        swap, none = cgroup.path / "memory.swap.max", "0"
    if swap.exists():  # a kernel may be built without swap accounting
        swap.write_text(none)


def limit_data(
    nbytes: int, now_bytes: int, root: Path = _ROOT, setrlimit: Callable[..., None] = resource.setrlimit
) -> None:
    """Let this process take what is left of `nbytes` once its `now_bytes`, stores included, are paid.

    The kernel's limit counts private mappings, so what it counts already is added.
    """
    status = (root / "proc/self/status").read_text()
    data = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    allowed = data + max(0, nbytes - now_bytes)
    setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def limit_fraction(nbytes: int, context_bytes: int, cuda: Any = None) -> None:
    """Let the caching allocator have what is left of `nbytes` beside the context. `cuda` is `torch.cuda`."""
    if cuda is None:
        import torch

        cuda = torch.cuda
    total = cuda.get_device_properties(cuda.current_device()).total_memory
    cuda.set_per_process_memory_fraction(min(1.0, max(0, nbytes - context_bytes) / total))


def oom_kills(cgroup: Cgroup | None, root: Path = _ROOT) -> int:
    """Processes killed for memory so far: in the cgroup, else on the whole machine."""
    if cgroup is not None:
        return cgroup.oom_kills()
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def outcome_of(error: BaseException) -> Outcome:
    """What a child's exception means for its trial."""
    for cause in _causes(error):
        match cause:
            case MemoryError():
                return Outcome.OUT_OF_MEMORY
            case OSError(errno=errno.ENOMEM):
                return Outcome.OUT_OF_MEMORY
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return Outcome.DISK_FULL
            case RuntimeError() if says_no_memory(str(cause)):  # torch.OutOfMemoryError is one
                return Outcome.OUT_OF_MEMORY
    return Outcome.CRASHED


def says_no_memory(text: str) -> bool:
    """Whether an error's text is one of those that allocators give up with."""
    return any(known in text.lower() for known in _NO_MEMORY_TEXTS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
