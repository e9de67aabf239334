"""Describe a tensor without its memory, so that an equal tensor can be allocated."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from autotune.errors import StoreError


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Layout of a tensor that owns its whole storage."""

    nbytes: int
    """Bytes of the storage."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    """Offset of the first element, in elements."""
    device: torch.device

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        """Describe `tensor`."""
        nbytes = tensor.untyped_storage().nbytes()
        return cls(nbytes, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.device)

    def allocate(self, into: Tensor | None, slot: str) -> Tensor:
        """Return `into`, or a new uninitialized tensor of this layout if it is None.

        Raises StoreError, which names `slot`, if the storage of `into` has another number of bytes.
        """
        if into is not None:
            if (nbytes := into.untyped_storage().nbytes()) != self.nbytes:
                raise StoreError(f"{slot} holds {self.nbytes} bytes, not the {nbytes} to fill")
            return into
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.set_(storage, self.storage_offset, self.size, self.stride)


def storage_tensor(tensor: Tensor) -> Tensor:
    """Return a byte tensor over the whole storage of `tensor`, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
