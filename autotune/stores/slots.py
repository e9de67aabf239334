"""What every store of slots in one slab does alike."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from autotune.errors import StoreError
from autotune.stores.slab import padded

S = TypeVar("S")


class Slotted(ABC, Generic[S]):
    """Open until it is closed, and knows its slots by their keys. `_finish` gives everything back, once."""

    name: str
    _slots: dict[int, S]
    _finish: "weakref.finalize[..., Any]"

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Twice is once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slot(self, key: int) -> S:
        if not self._finish.alive:
            raise StoreError(f"{self.name} store is closed; open it again")
        if key not in self._slots:
            raise StoreError(f"{self.name} store: no slot {key}; it was opened with {len(self._slots)} others")
        return self._slots[key]


def end_to_end(slots: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Where each slot (key to bytes) begins, on a page, and where the last one ends."""
    offsets, end = {}, 0
    for key, nbytes in slots.items():
        offsets[key] = end
        end += padded(nbytes)
    return offsets, end
