"""Lay the slots of a store end to end in one slab, and look them up while the store is open."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from autotune.errors import SlotError, StoreError
from autotune.runtime.stores.slab_file import padded

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Slots(Generic[S]):
    """The slots of one store by key. They are valid until `finish`, which releases everything, has run."""

    store_name: str
    by_key: Mapping[int, S]
    finish: "weakref.finalize[..., Any]"

    def __getitem__(self, key: int) -> S:
        if not self.finish.alive:
            raise StoreError(f"{self.store_name} store is closed; open it again")
        if key not in self.by_key:
            raise SlotError(f"{self.store_name} store: no slot {key}; it was opened with {len(self.by_key)} others")
        return self.by_key[key]


def slot_offsets(sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Return the page-aligned offset of each slot by key, and the bytes of all slots; `sizes` has each slot's bytes."""
    offsets, end = {}, 0
    for key, nbytes in sizes.items():
        offsets[key] = end
        end += padded(nbytes)
    return offsets, end
