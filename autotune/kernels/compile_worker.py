"""The main module of a compiling process: `python -m autotune.kernels.compile_worker REQUESTS REPLIES`.

The arguments are two open pipes. A request is a pickled region with a number of threads and a default dtype; the reply is an
error, or empty. The process ends when the other end of the pipe is closed.
"""

import errno
import fcntl
import io
import json
import os
import pickle
import sys
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from autotune.capture.rewrites.batch_norm import REMADE_BY
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.kernels.compiled_region import CompiledRegion


def main() -> None:
    """Compile regions until the pipe is closed; a marker stands in the scratch directory while one is compiled."""
    requests, replies = (Connection(int(number)) for number in sys.argv[1:])
    scratch = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    marker = scratch / f"unfinished-{os.getpid()}"
    with scratch.with_suffix(".lock").open("a+") as lock:  # NFS locks files for readers only where they can be read
        lock_where_possible(lock, fcntl.LOCK_SH)
        while True:
            try:
                request = requests.recv_bytes()
            except EOFError:
                return
            region, threads, dtype = pickle.loads(request)
            marker.touch()
            reply = json.dumps(_compile(region, threads, dtype)).encode()
            marker.unlink()  # before the reply, after which this process may be ended
            replies.send_bytes(reply)


def lock_where_possible(file: IO[str], operation: int) -> None:
    """Lock a file, as `fcntl.flock` does; go on without a lock on a file system that has none.

    Raises BlockingIOError where another process has the lock.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise


def encode_request(region: "CompiledRegion", threads: int, dtype: torch.dtype) -> bytes:
    """Return the request to compile a region for a number of threads and a default dtype."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump((region, threads, dtype))
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler of ops, and of functions that another function returned."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to make an object again; NotImplemented for the usual way."""
        if isinstance(obj, torch._ops.OpOverload):
            return find_overload, (obj._schema.name, obj._schema.overload_name or "default")
        return getattr(obj, REMADE_BY, NotImplemented) if isinstance(obj, types.FunctionType) else NotImplemented


def find_overload(name: str, overload: str) -> Any:
    """Return an op by its name, `aten::add`, and its overload, `Tensor`."""
    namespace, _, op = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def _compile(region: "CompiledRegion", threads: int, dtype: torch.dtype) -> tuple[str, str]:
    """Compile a region; return the class name and the message of an error, or two empty strings."""
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    try:
        region.write()
    except AutotuneError as error:
        return type(error).__name__, str(error)
    return "", ""


if __name__ == "__main__":
    main()
