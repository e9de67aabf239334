"""Memory limits of a child process, and the classification of failures for lack of memory or disk."""

import errno
import resource
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from autotune.measure.meters.cgroup import Cgroup
from autotune.records.measurement import Outcome


class LimitKind(StrEnum):
    """Mechanism that enforces a memory limit."""

    CGROUP = "cgroup"
    RLIMIT = "rlimit (emulated)"
    FRACTION = "fraction (emulated)"


_ROOT = Path("/")
_PARALLEL_ELEMENTS = 2**15
"""Number of tensor elements for each thread, with which torch uses all of its threads."""
_NO_MEMORY_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # cuBLAS on a full GPU, where its handle finds no memory
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cudnn_status_internal_error_host_allocation_failed",
    "cusolver_status_alloc_failed",
    "cufft_alloc_failed",
    "thread creation failed",  # libgomp, where a limit leaves no room for a stack
)


def limit_cgroup(cgroup: Cgroup, nbytes: int) -> None:
    """Limit all processes of the cgroup to `nbytes` together, swap included; beyond that the kernel kills them."""
    if cgroup.version == 1:
        (cgroup.path / "memory.limit_in_bytes").write_text(str(nbytes), encoding="utf-8")
        swap, no_swap = cgroup.path / "memory.memsw.limit_in_bytes", str(nbytes)
    else:
        (cgroup.path / "memory.max").write_text(str(nbytes), encoding="utf-8")
        swap, no_swap = cgroup.path / "memory.swap.max", "0"
    if swap.exists():  # a kernel may be built without swap accounting
        swap.write_text(no_swap, encoding="utf-8")


def start_threads(count: int | None) -> None:
    """Start torch's threads, `count` of them or by default as many as torch has.

    The emulated limit counts the whole stack that is reserved for each thread, of which a thread uses little. Stacks that
    exist when the limit is set are no part of it.
    """
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(max(count or 0, usual))
    torch.zeros(_PARALLEL_ELEMENTS * torch.get_num_threads()).add_(1)
    torch.set_num_threads(usual)


def limit_data(
    nbytes: int, now_bytes: int, root: Path = _ROOT, setrlimit: Callable[..., None] = resource.setrlimit
) -> None:
    """Limit this process to `nbytes`, of which it and its stores use `now_bytes` already.

    The kernel's limit counts private mappings, so their present size is added. Later calls move the limit along with
    mappings that hold no memory any more; the hard limit stays.
    """
    status = (root / "proc/self/status").read_text(encoding="utf-8")
    data = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    allowed = data + max(0, nbytes - now_bytes)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    setrlimit(resource.RLIMIT_DATA, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def limit_fraction(nbytes: int, context_bytes: int, cuda: Any = None) -> None:
    """Limit the caching allocator to `nbytes` less the bytes of the context; `cuda` replaces `torch.cuda` in tests.

    The context grows with every library and kernel that is loaded, so the limit is set again after first steps.
    """
    if cuda is None:
        import torch

        cuda = torch.cuda
    total = cuda.get_device_properties(cuda.current_device()).total_memory
    cuda.set_per_process_memory_fraction(min(1.0, max(0, nbytes - context_bytes) / total))


def create_context(torch: Any) -> None:
    """Create the process's context on the GPU, with the handles of cuBLAS and cuDNN.

    The driver lists a process, and its context's bytes, only then. `torch` is the module, or its replacement in tests.
    """
    torch.cuda.init()
    product = torch.ones(16, 16, device="cuda")
    torch.mm(product, product)
    torch.nn.functional.conv2d(product.view(1, 1, 16, 16), product[:3, :3].reshape(1, 1, 3, 3))
    del product
    torch.cuda.synchronize()


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that processes may still take: those available on the machine, or left by a limit of a container or job."""
    available = psutil.virtual_memory().available
    home = Cgroup.current(root)
    tightest = home.tightest_limit() if home is not None else None
    return available if tightest is None else min(available, tightest[0])


def oom_kills(cgroup: Cgroup | None, root: Path = _ROOT) -> int:
    """Count the processes killed for memory so far: in the cgroup, without one on the whole machine."""
    if cgroup is not None:
        return cgroup.oom_kills()
    try:
        lines = (root / "proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def classify_error(error: BaseException) -> Outcome:
    """Return the outcome of a trial whose child raised this exception."""
    for cause in _causes(error):
        match cause:
            case MemoryError():
                return Outcome.OUT_OF_MEMORY
            case OSError(errno=errno.ENOMEM):
                return Outcome.OUT_OF_MEMORY
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return Outcome.DISK_FULL
            case RuntimeError() if reports_no_memory(str(cause)):  # torch.OutOfMemoryError is one
                return Outcome.OUT_OF_MEMORY
    return Outcome.CRASHED


def reports_no_memory(text: str) -> bool:
    """Return True if an error's text is one with which allocators report a lack of memory."""
    return any(phrase in text.lower() for phrase in _NO_MEMORY_TEXTS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    visited: list[BaseException] = []
    # `raise error from error` makes a chain without an end
    while error is not None and not any(error is other for other in visited):
        visited.append(error)
        yield error
        error = error.__cause__ or error.__context__
