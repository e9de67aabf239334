"""What a tensor looks like without its memory, so that it can be made again."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from autotune.errors import StoreError


@dataclass(frozen=True, slots=True)
class Form:
    """Of a tensor that owns its whole storage."""

    nbytes: int
    """Of the storage."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """What this one looks like."""
        nbytes = tensor.untyped_storage().nbytes()
        return cls(nbytes, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.device)

    def memory(self, into: Tensor | None, where: str) -> Tensor:
        """Fresh memory of exactly as many bytes, seen as the tensor was; or a tensor that has as many, else a StoreError."""
        if into is not None:
            if (there := into.untyped_storage().nbytes()) != self.nbytes:
                raise StoreError(f"{where} holds {self.nbytes} bytes, not the {there} to fill")
            return into
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(storage, self.storage_offset, self.size, self.stride)


def storage_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's whole storage, as a tensor over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
