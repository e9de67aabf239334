"""Tensors on disk with their hashes: results are compared by hash, and by value where hashes differ."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from autotune.runtime.tensor_bytes import Bytes, element_bytes, storage_bytes

_ALIGNMENT = 64
_PIECE_BYTES = 2**18
"""Size of the copies in which a tensor that is not contiguous is hashed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    digest: str


class Writer:
    """A writer of tensors, one after the other, into a directory; after `close` a `Reference` reads them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file: IO[bytes] = (directory / "tensors.bin").open("wb")
        self._entries: dict[str, list[Any]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor."""
        flat = _flat(tensor)
        data = element_bytes(flat).data
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries[name] = [
            self._file.tell(),
            data.nbytes,
            list(tensor.shape),
            dtype,
            xxhash.xxh3_128_hexdigest(data),
        ]
        self._file.write(data)

    def close(self) -> None:
        """Write the index and close the file."""
        self._file.close()
        (self._directory / "index.json").write_text(json.dumps(self._entries), encoding="utf-8")


class Reference:
    """Tensors that a Writer wrote."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "tensors.bin"
        index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
        self._entries = {
            name: _Entry(offset, nbytes, tuple(shape), dtype, digest)
            for name, (offset, nbytes, shape, dtype, digest) in index.items()
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor mapped from the file: it uses page cache instead of the process's memory."""
        entry = self._entries[name]
        dtype = getattr(torch, entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        mapped = np.memmap(self._path, np.uint8, "r+", entry.offset, (entry.nbytes,))
        return torch.from_numpy(mapped).view(dtype).reshape(entry.shape)

    def evict(self) -> None:
        """Drop the file's page cache; `load` reads it again.

        The kernel may drop cold pages of a file at any time, as proactive reclaim does. A meter cannot tell a drop
        during a step from memory that the step used. Pages that are still mapped stay.
        """
        with self._path.open("rb") as file:
            os.fdatasync(file.fileno())  # a page that is not on the disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def comparable(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if a tensor of this name, shape and dtype was written."""
        entry = self._entries.get(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return entry is not None and (entry.shape, entry.dtype) == (tuple(tensor.shape), dtype)

    def equals(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if every bit agrees."""
        return self.comparable(name, tensor) and digest(tensor) == self._entries[name].digest


def digest(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's elements in their logical order.

    A tensor on the CPU is hashed without a request to PyTorch's allocator, which would shift the slots of an arena's step.
    One that PyTorch conjugates or negates by a flag alone is copied.
    """
    tensor = _resolve(tensor)
    if tensor.device.type != "cpu" or tensor.is_contiguous():
        flat = _flat(tensor)
        return xxhash.xxh3_128_hexdigest(element_bytes(flat).data)
    size = tensor.element_size()
    elements = np.ndarray(
        tuple(tensor.shape),
        f"V{size}",
        storage_bytes(tensor).data,
        tensor.storage_offset() * size,
        tuple(stride * size for stride in tensor.stride()),
    )
    state = xxhash.xxh3_128()
    for piece in _contiguous_pieces(elements):
        state.update(piece.data)
    return state.hexdigest()


def _contiguous_pieces(elements: NDArray[Any]) -> Iterator[Bytes]:
    """Yield the bytes of an array in logical order, in copies of at most `_PIECE_BYTES` where rows are that small."""
    rows = max(1, _PIECE_BYTES // max(1, elements[:1].nbytes))
    for start in range(0, len(elements), rows):
        piece = elements[start : start + rows]
        if rows == 1 and piece[0].ndim and piece.nbytes > _PIECE_BYTES:
            yield from _contiguous_pieces(piece[0])
        else:
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor on the CPU, without a copy if it is contiguous there."""
    return _resolve(tensor).cpu().contiguous().reshape(-1)


def _resolve(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its values in memory; PyTorch conjugates and negates some by a flag alone."""
    return tensor.detach().resolve_conj().resolve_neg()
