"""One anonymous file, allocated in full, whose bytes go past the page cache.

No name in the directory ever points to it, or only for the moment between create and unlink, so nothing of it survives
the process, however that ends. The disk reads and writes memory that lies as O_DIRECT wants it, as an arena's tensors do
and weights that came back; the bytes of other memory pass through one bounce buffer per direction, and their copying
slows the cores that compute. Where a file system refuses O_DIRECT, every chunk is flushed and dropped from the page cache
at once; on a tmpfs neither would mean anything.
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
from autotune.runtime.tensor_bytes import Bytes
from autotune.units import PAGE_BYTES, fmt_bytes

CHUNK_BYTES = 2 * 2**20
"""Of one bounce buffer, and of one system call on it."""
DIRECT_BYTES = 8 * 2**20
"""Of one system call on memory that the disk reads and writes itself."""

_TMPFS, _RAMFS = 0x01021994, 0x858458F6
_CACHESTAT = 451  # the number of the system call on every architecture but alpha
_AT_EMPTY_PATH, _STATX_DIOALIGN, _DIO_MEM_ALIGN = 0x1000, 0x2000, 152  # linux/stat.h; the last is the field's place
_PINS = (6, 5)
"""The Linux whose direct transfers pin their pages: before it a fork, as of a data loader, in the middle of a direct read
could leave the disk writing to the child's copy."""
_REFUSES_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Transfer = Callable[[int, list[memoryview], int], int]
"""`os.pwritev` or `os.preadv`: file, buffers, offset, giving the bytes that were moved."""


class Hasher(Protocol):
    """What sees every byte on its way."""

    def update(self, data: memoryview, /) -> None: ...


class Slab:
    """An anonymous file of `nbytes`; one thread may write while another reads.

    `only_memory` refuses a directory that is no tmpfs. `pwritev` and `preadv` let a test put a faulty disk underneath.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        nbytes: int,
        *,
        only_memory: bool = False,
        pwritev: Transfer = os.pwritev,
        preadv: Transfer = os.preadv,
    ) -> None:
        self.name, self.directory, self.nbytes = name, directory, padded(nbytes)
        self._pwritev, self._preadv = pwritev, preadv
        with contextlib.ExitStack() as undo:
            self._file = _open_anonymous(name, directory)
            undo.callback(os.close, self._file)
            self.holds_memory = _lies_in_memory(self._file)
            if only_memory and not self.holds_memory:
                raise StoreError(
                    f"{name} store: {directory} lies on a disk; name a directory on a tmpfs, or write --store ssd={directory}"
                )
            _allocate(self._file, name, directory, self.nbytes)
            self.direct = not self.holds_memory and _bypass_page_cache(self._file)
            """Whether O_DIRECT is in force."""
            self._alignment = _memory_alignment(self._file) if self.direct else 0
            self._outgoing, self._incoming = (_bounce_buffer() if self.direct else None for _ in range(2))
            self._close = undo.pop_all()
        # without O_DIRECT the page cache holds the chunk on its way
        self.pool_bytes = 0 if self.holds_memory else 2 * CHUNK_BYTES

    def write(self, offset: int, data: Bytes, hasher: Hasher | None = None) -> None:
        """Write all of `data` at a page-aligned offset, or raise OSError."""
        for start, piece, fits in self._pieces(data):
            if hasher is not None:
                hasher.update(piece.data)
            staged = piece
            if self._outgoing is not None and not fits:
                self._outgoing[: len(piece)] = piece
                staged = self._outgoing[: padded(len(piece))]
            self._move(self._pwritev, staged, offset + start, "write")

    def read(self, offset: int, into: Bytes, hasher: Hasher | None = None) -> None:
        """Fill `into` from a page-aligned offset, or raise OSError."""
        for start, piece, fits in self._pieces(into):
            staged = piece if self._incoming is None or fits else self._incoming[: padded(len(piece))]
            self._move(self._preadv, staged, offset + start, "read")
            if staged is not piece:
                piece[:] = staged[: len(piece)]
            if hasher is not None:
                hasher.update(piece.data)

    def held_bytes(self) -> int:
        """Bytes of the file in memory right now."""
        if self.holds_memory:
            return os.fstat(self._file).st_blocks * 512
        return page_cache_bytes(self._file, self.nbytes)

    def close(self) -> None:
        """Give the file's space and the buffers back."""
        self._close.close()
        self._outgoing = self._incoming = None

    def _pieces(self, data: Bytes) -> Iterator[tuple[int, Bytes, bool]]:
        """(start, bytes, whether the disk can take them where they lie): whole pages, and what is left."""
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
                moved -= moved % PAGE_BYTES  # the next call must begin on a page
                if moved <= 0:
                    raise OSError(errno.EIO, f"short {verb}: {done} of {len(data)} bytes and no more")
            done += moved
        if not self.direct and not self.holds_memory:
            os.fdatasync(self._file)
            # the whole file: a folio is dropped whole or not at all, and reaches beyond this chunk
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def padded(nbytes: int) -> int:
    """Bytes in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def free_bytes(directory: Path) -> int | None:
    """Bytes that may be allocated there; None on a file system without limit, and where there is nothing to ask."""
    try:
        stat = os.statvfs(directory)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def page_cache_bytes(file: int, nbytes: int) -> int:
    """Bytes of a file that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    everything, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if libc.syscall(_CACHESTAT, file, everything, counts, 0) == 0:
        return int(counts[0]) * PAGE_BYTES
    return page_cache_bytes_by_page(file, nbytes)  # before Linux 6.5


def page_cache_bytes_by_page(file: int, nbytes: int) -> int:
    """The same from mincore: slower, 50 ms for 4 GiB."""
    if nbytes == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file, nbytes) as mapping:
        resident = np.zeros(nbytes // PAGE_BYTES, np.uint8)
        first = ctypes.c_char.from_buffer(mapping)
        asked = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data)
        )
        del first
    if asked != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((resident & 1).sum()) * PAGE_BYTES


def _bounce_buffer() -> Bytes:
    # private, or the kernel counts it as shared memory; touched, or the first transfers pay for its pages
    pages = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a fork in the middle of a direct read, as a data loader does it, could leave the disk writing to the child's copy
    pages.madvise(mmap.MADV_DONTFORK)
    buffer = np.frombuffer(pages, np.uint8)
    buffer.fill(0)
    return buffer


def _open_anonymous(name: str, directory: Path) -> int:
    other = f"name another directory with --store {name}=DIR"
    if not directory.exists():
        raise StoreError(f"{name} store: no directory {directory}; create it, or {other}")
    if not directory.is_dir():
        raise StoreError(f"{name} store: {directory} is no directory; {other}")
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _REFUSES_TMPFILE:
                raise
        path = directory / f".autotune-{secrets.token_hex(8)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        path.unlink()
    except OSError as error:
        reason = "is full" if error.errno in _NO_ROOM else "is not writable"
        raise StoreError(f"{name} store: {directory} {reason} ({error.strerror}); {other}") from None
    return file


def _lies_in_memory(file: int) -> bool:
    buffer = ctypes.create_string_buffer(256)  # struct statfs begins with the magic number, as a word
    ctypes.CDLL(None).fstatfs(file, buffer)
    return struct.unpack_from("l", buffer)[0] in (_TMPFS, _RAMFS)


def _allocate(file: int, name: str, directory: Path, nbytes: int) -> None:
    room = free_bytes(directory)
    try:
        if room is not None and nbytes > room:  # trying would fill a disk that others share
            raise OSError(errno.ENOSPC, "it was not tried")
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:  # the cause, by which a full disk is told from other faults
        free = "unknown" if room is None else fmt_bytes(room)
        raise StoreError(
            f"{name} store: {directory} cannot take {fmt_bytes(nbytes)}, free: {free} ({error.strerror}); "
            f"free space there, or name another directory with --store {name}=DIR"
        ) from error


def _bypass_page_cache(file: int) -> bool:
    """Turn O_DIRECT on and see that it works; some file systems accept the flag and refuse the transfer."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [mmap.mmap(-1, PAGE_BYTES)], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead into the page cache
        return False
    return True


def _memory_alignment(file: int) -> int:
    """What the address of memory must be a multiple of for the disk to read and write it; 0 where that is not safe."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or tuple(map(int, release.groups())) < _PINS:
        return 0
    told = ctypes.create_string_buffer(256)
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None or statx(file, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told):
        return PAGE_BYTES
    return struct.unpack_from("I", told, _DIO_MEM_ALIGN)[0] or PAGE_BYTES
