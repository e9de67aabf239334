"""Tensors on disk with their hashes: results are compared by hash, and by value only where hashes differ."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash

from autotune.runtime.tensor_bytes import element_bytes

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    digest: str


class Writer:
    """Writes tensors one after the other into `directory`; `close` makes them a Reference."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file: IO[bytes] = (directory / "tensors.bin").open("wb")
        self._entries: dict[str, list[Any]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
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
        self._file.close()
        (self._directory / "index.json").write_text(json.dumps(self._entries))


class Reference:
    """Tensors as a Writer left them."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "tensors.bin"
        index = json.loads((directory / "index.json").read_text())
        self._entries = {
            name: _Entry(offset, nbytes, tuple(shape), dtype, digest)
            for name, (offset, nbytes, shape, dtype, digest) in index.items()
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def load(self, name: str) -> torch.Tensor:
        """The tensor, mapped from the file: it takes page cache, no memory of the process's own."""
        entry = self._entries[name]
        dtype = getattr(torch, entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = np.memmap(self._path, np.uint8, "r+", entry.offset, (entry.nbytes,))
        return torch.from_numpy(raw).view(dtype).reshape(entry.shape)

    def comparable(self, name: str, tensor: torch.Tensor) -> bool:
        """Check that a tensor of this name, shape and dtype was written."""
        entry = self._entries.get(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return entry is not None and (entry.shape, entry.dtype) == (tuple(tensor.shape), dtype)

    def equals(self, name: str, tensor: torch.Tensor) -> bool:
        """Check that every bit agrees."""
        return self.comparable(name, tensor) and digest(tensor) == self._entries[name].digest


def digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's elements."""
    flat = _flat(tensor)
    return xxhash.xxh3_128_hexdigest(element_bytes(flat).data)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Without a copy if the tensor is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1)
