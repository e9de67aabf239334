"""The slots of a store, which lie end to end in one slab."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from autotune.errors import StoreError
from autotune.runtime.stores.slab_file import padded

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Slots(Generic[S]):
    """By key, as long as the store is open: until `finish` has given everything back."""

    name: str
    of: Mapping[int, S]
    finish: "weakref.finalize[..., Any]"

    def __getitem__(self, key: int) -> S:
        if not self.finish.alive:
            raise StoreError(f"{self.name} store is closed; open it again")
        if key not in self.of:
            raise StoreError(f"{self.name} store: no slot {key}; it was opened with {len(self.of)} others")
        return self.of[key]


def end_to_end(slots: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Where each slot (key to bytes) begins, on a page, and where the last one ends."""
    offsets, end = {}, 0
    for key, nbytes in slots.items():
        offsets[key] = end
        end += padded(nbytes)
    return offsets, end
