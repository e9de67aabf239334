"""Read and write one anonymous file, allocated in full, without the page cache.

No name in the directory points to the file, except between create and unlink, so nothing of it survives the process. The
disk accesses memory directly if its address is aligned for O_DIRECT, as tensors of an arena and restored weights are.
Bytes of other memory are copied through one bounce buffer per direction, which slows the cores that compute. If a file
system refuses O_DIRECT, written chunks are flushed, and all chunks dropped from the page cache. A tmpfs needs neither.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from autotune.errors import StoreError
from autotune.ir.costs import PAGE_BYTES
from autotune.runtime.tensor_bytes import Bytes
from autotune.units import fmt_bytes

CHUNK_BYTES = 2 * 2**20
"""Bytes of one bounce buffer, and of one system call on it."""
DIRECT_BYTES = 8 * 2**20
"""Bytes of one system call on memory that the disk accesses directly."""

_TMPFS, _RAMFS = 0x01021994, 0x858458F6
_CACHESTAT = 451  # the number of the system call on every architecture but alpha
_AT_EMPTY_PATH, _STATX_DIOALIGN, _DIO_MEM_ALIGN = (
    0x1000,
    0x2000,
    152,
)  # linux/stat.h; the last is the offset of the field
_PINNING_LINUX = (6, 5)
"""First Linux whose direct transfers pin their pages.

On older ones a fork during a direct read, as of a data loader, could leave the disk writing to the child's copy.
"""
_REFUSES_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSES_FILES = {errno.EACCES, errno.EPERM, errno.EROFS}

Transfer = Callable[[int, list[memoryview], int], int]
"""Signature of `os.pwritev` and `os.preadv`: file, buffers and offset to the number of bytes moved."""


class Hasher(Protocol):
    """A checksum that is updated with all bytes of a transfer."""

    def update(self, data: memoryview, /) -> None: ...


class Slab:
    """An anonymous file of `nbytes`; one thread may write while another reads.

    `only_memory` refuses a directory that is not on a tmpfs. `fork_safe` says that memory of transfers is excluded from forks. Tests pass `pwritev` and `preadv` of a faulty disk.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        nbytes: int,
        *,
        only_memory: bool = False,
        fork_safe: bool = False,
        pwritev: Transfer = os.pwritev,
        preadv: Transfer = os.preadv,
    ) -> None:
        self.name, self.directory, self.nbytes = name, directory, padded(nbytes)
        self._pwritev, self._preadv = pwritev, preadv
        with contextlib.ExitStack() as undo:
            self._file = _open_anonymous(name, directory)
            undo.callback(os.close, self._file)
            undo.callback(self._truncate, os.getpid())
            self.holds_memory = _lies_in_memory(self._file)
            if only_memory and not self.holds_memory:
                raise StoreError(
                    f"{name} store: {directory} is on a disk; use a directory on a tmpfs, or write --store ssd={directory}"
                )
            _allocate(self._file, name, directory, self.nbytes)
            self.direct = not self.holds_memory and _bypass_page_cache(self._file)
            """True if O_DIRECT is active."""
            self._alignment = _memory_alignment(self._file, fork_safe=fork_safe) if self.direct else 0
            self._outgoing, self._incoming = (_bounce_buffer() if self.direct else None for _ in range(2))
            self._close = undo.pop_all()
        # without O_DIRECT the page cache holds the chunk in flight
        self.pool_bytes = 0 if self.holds_memory else 2 * CHUNK_BYTES

    def write(self, offset: int, data: Bytes, hasher: Hasher | None = None) -> None:
        """Write all of `data` at a page-aligned offset. Raises OSError."""
        for start, piece, is_direct in self._pieces(data):
            if hasher is not None:
                hasher.update(piece.data)
            staged = piece
            if self._outgoing is not None and not is_direct:
                self._outgoing[: len(piece)] = piece
                staged = self._outgoing[: padded(len(piece))]
            self._move(self._pwritev, staged, offset + start, "write")

    def read(self, offset: int, into: Bytes, hasher: Hasher | None = None) -> None:
        """Fill `into` from a page-aligned offset. Raises OSError."""
        for start, piece, is_direct in self._pieces(into):
            staged = piece if self._incoming is None or is_direct else self._incoming[: padded(len(piece))]
            self._move(self._preadv, staged, offset + start, "read")
            if staged is not piece:
                piece[:] = staged[: len(piece)]
            if hasher is not None:
                hasher.update(piece.data)

    def held_bytes(self) -> int:
        """Return the bytes of the file that are in memory now."""
        if self.holds_memory:
            return os.fstat(self._file).st_blocks * 512
        return page_cache_bytes(self._file, self.nbytes)

    def close(self) -> None:
        """Release the file's space and the buffers. Nothing is read again, so an error of the disk is no error here."""
        with contextlib.suppress(OSError):
            self._close.close()
        self._outgoing = self._incoming = None

    def _truncate(self, owner: int) -> None:
        """Free the file's space, which a forked process would hold with its descriptor: workers of a DataLoader do.

        `owner` is the process that opened the file; a forked process leaves it as it is.
        """
        if os.getpid() == owner:
            # a disk that failed may be read-only now; the last close frees the space, too
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)

    def _pieces(self, data: Bytes) -> Iterator[tuple[int, Bytes, bool]]:
        """Yield (start, bytes, True if the disk can access them directly): whole pages first, then the rest."""
        body = 0
        if self.direct and self._alignment and data.ctypes.data % self._alignment == 0:
            body = len(data) // PAGE_BYTES * PAGE_BYTES
        for start in range(0, body, DIRECT_BYTES):
            yield start, data[start : min(start + DIRECT_BYTES, body)], True
        for start in range(body, len(data), CHUNK_BYTES):
            yield start, data[start : start + CHUNK_BYTES], False

    def _move(self, call: Transfer, data: Bytes, offset: int, verb: str) -> None:
        done = 0
        while done < len(data):
            moved = call(self._file, [data[done:].data], offset + done)
            if done + moved < len(data):
                moved -= moved % PAGE_BYTES  # the next call must start on a page
                if moved <= 0:
                    raise OSError(errno.EIO, f"short {verb}: only {done} of {len(data)} bytes")
            done += moved
        if not self.direct and not self.holds_memory:
            if verb == "write":  # a flush after a read would hide the error of a concurrent write
                os.fdatasync(self._file)
            # for the whole file, because a folio is dropped only as a whole and extends beyond this chunk
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def padded(nbytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def free_bytes(directory: Path) -> int | None:
    """Return the bytes that can be allocated in a directory; None without a limit, or if it cannot be read."""
    try:
        stat = os.statvfs(directory)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def page_cache_bytes(file: int, nbytes: int) -> int:
    """Return the bytes of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    everything, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if libc.syscall(_CACHESTAT, file, everything, counts, 0) == 0:
        return int(counts[0]) * PAGE_BYTES
    return page_cache_bytes_by_page(file, nbytes)  # before Linux 6.5


def page_cache_bytes_by_page(file: int, nbytes: int) -> int:
    """Return the same from mincore, for Linux before 6.5: it takes 50 ms for 4 GiB."""
    if nbytes == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file, nbytes) as mapping:
        resident = np.zeros(nbytes // PAGE_BYTES, np.uint8)
        first = ctypes.c_char.from_buffer(mapping)
        status = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data)
        )
        del first
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((resident & 1).sum()) * PAGE_BYTES


def _bounce_buffer() -> Bytes:
    # private, or the kernel would count it as shared memory; filled, or the first transfers would fault its pages
    pages = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a fork during a direct read, as of a data loader, could leave the disk writing to the child's copy
    pages.madvise(mmap.MADV_DONTFORK)
    buffer = np.frombuffer(pages, np.uint8)
    buffer.fill(0)
    return buffer


def _open_anonymous(name: str, directory: Path) -> int:
    advice = f"use another directory with --store {name}=DIR"
    try:
        if not directory.exists():
            raise StoreError(f"{name} store: no directory {directory}; create it, or {advice}")
        if not directory.is_dir():
            raise StoreError(f"{name} store: {directory} is no directory; {advice}")
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _REFUSES_TMPFILE:
                raise
        path = directory / f".autotune-{secrets.token_hex(8)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        path.unlink()
    except OSError as error:
        refusal = "is not writable" if error.errno in _REFUSES_FILES else "cannot be opened"
        reason = "is full" if error.errno in _NO_ROOM else refusal
        raise StoreError(f"{name} store: {directory} {reason} ({error.strerror}); {advice}") from None
    return file


def is_in_memory(directory: Path) -> bool:
    """Return whether the files of a directory lie in memory: on a tmpfs or ramfs."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _lies_in_memory(file)
    finally:
        os.close(file)


def _lies_in_memory(file: int) -> bool:
    buffer = ctypes.create_string_buffer(256)  # struct statfs begins with the magic number, as a word
    ctypes.CDLL(None).fstatfs(file, buffer)
    return struct.unpack_from("l", buffer)[0] in (_TMPFS, _RAMFS)


def _allocate(file: int, name: str, directory: Path, nbytes: int) -> None:
    room = free_bytes(directory)
    try:
        if room is not None and nbytes > room:  # an attempt would fill a shared disk
            raise OSError(errno.ENOSPC, "not attempted")
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:  # raised as the cause, which distinguishes a full disk from other faults
        free = "unknown" if room is None else fmt_bytes(room)
        raise StoreError(
            f"{name} store: {directory} cannot hold {fmt_bytes(nbytes)}, free: {free} ({error.strerror}); "
            f"free space there, or use another directory with --store {name}=DIR"
        ) from error


def _bypass_page_cache(file: int) -> bool:
    """Turn O_DIRECT on; return False if it does not work. Some file systems accept the flag and refuse the transfer."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [mmap.mmap(-1, PAGE_BYTES)], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the page cache
        return False
    return True


def _memory_alignment(file: int, *, fork_safe: bool) -> int:
    """Return the alignment in bytes of memory that the disk can access directly; 0 if that is not safe."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if not fork_safe and (release is None or tuple(map(int, release.groups())) < _PINNING_LINUX):
        return 0
    fields = ctypes.create_string_buffer(256)
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None or statx(file, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, fields):
        return PAGE_BYTES
    return struct.unpack_from("I", fields, _DIO_MEM_ALIGN)[0] or PAGE_BYTES
