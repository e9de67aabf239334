"""Buffers of known size and life, the problem of a layout; and a layout of them in one block, its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from autotune.errors import ConfigError

ALIGNMENT = 64
"""Bytes; what torch gives its CPU tensors."""
WIDE, WIDE_ALIGNMENT = 2**16, 512
"""Buffers of so many bytes lie where a disk can read and write them itself: a sector is what most of them ask for."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Buffers:
    """Sizes, lives and alignments, an array each. Lives are half-open: one that dies at 5 may share with one born at 5."""

    sizes: Numbers
    """Bytes, each a multiple of its alignment."""
    born: Numbers
    died: Numbers
    aligned: Numbers
    """What each offset is a multiple of."""

    @classmethod
    def of(cls, sizes: Sequence[int], born: Sequence[int], died: Sequence[int], *, alignment: int = ALIGNMENT) -> Self:
        """Buffers as they were asked for: sizes are rounded up, wide ones lie on sectors where anything is aligned."""
        asked, first, last = (np.array(numbers, np.int64) for numbers in (sizes, born, died))
        backwards = np.flatnonzero((last <= first) | (asked < 0))
        if len(backwards):
            at = int(backwards[0])
            raise ConfigError(
                f"buffer {at} of {asked[at]} bytes lives from {first[at]} to {last[at]}; "
                f"sizes must not be negative and lives not end before they begin"
            )
        wide = max(alignment, WIDE_ALIGNMENT) if alignment > 1 else 1
        aligned = np.where(asked < WIDE, alignment, wide)
        return cls(-(-asked // aligned) * aligned, first, last, aligned)

    def __len__(self) -> int:
        return len(self.sizes)

    def only(self, wanted: npt.NDArray[np.bool_]) -> Self:
        """Those buffers alone."""
        return type(self)(self.sizes[wanted], self.born[wanted], self.died[wanted], self.aligned[wanted])

    @cached_property
    def profile(self) -> tuple[Numbers, Numbers]:
        """Moments in rising order, deaths before births, and the bytes alive from each on."""
        moments, changes = np.concatenate((self.born, self.died)), np.concatenate((self.sizes, -self.sizes))
        order = np.lexsort((changes, moments))
        return moments[order], np.cumsum(changes[order])

    @cached_property
    def max_live(self) -> int:
        """The highest sum of bytes alive at once: no layout is smaller."""
        return int(self.profile[1].max(initial=0))

    @cached_property
    def crowd(self) -> Numbers:
        """Per buffer the highest sum of live bytes during its life."""
        moments, live = self.profile
        spans = np.stack((np.searchsorted(moments, self.born), np.searchsorted(moments, self.died)), axis=1)
        return np.asarray(np.maximum.reduceat(np.append(live, 0), spans.ravel())[::2])


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each buffer begins, and what all of them take."""

    offsets: tuple[int, ...]
    bytes: int
    max_live: int
    """The highest sum of bytes alive at once: no layout is smaller."""
    bound: int = 0
    """No layout is smaller than this either, where a search proved more than `max_live`."""

    @property
    def gap(self) -> float:
        """How far the layout lies above the highest sum of live bytes, relative to that."""
        return self.bytes / self.max_live - 1 if self.max_live else 0.0
