"""Layout problems, buffers of known size and life, and their solutions, layouts of the buffers in one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from autotune.errors import ConfigError

ALIGNMENT = 64
"""Default alignment in bytes, the same as torch's for CPU tensors."""
WIDE, WIDE_ALIGNMENT = 2**16, 512
"""Size in bytes from which buffers are aligned to 512 bytes: most disks transfer whole sectors directly."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Buffers:
    """Sizes, lives and alignments of buffers, as one array each of shape (count,).

    Lives are half-open: a buffer that dies at 5 may share bytes with one born at 5.
    """

    sizes: Numbers
    """Bytes, each a multiple of its alignment."""
    born: Numbers
    """Start of each life."""
    died: Numbers
    """End of each life, exclusive."""
    aligned: Numbers
    """Alignment of each offset in bytes."""

    @classmethod
    def from_lives(
        cls,
        sizes: Sequence[int],
        born: Sequence[int],
        died: Sequence[int],
        *,
        alignment: int = ALIGNMENT,
        wide_alignment: int = WIDE_ALIGNMENT,
    ) -> Self:
        """Return buffers of the requested sizes and lives, with sizes rounded up to their alignment.

        Buffers of `WIDE` bytes or more have at least the `wide_alignment`, which is that of sectors, unless the alignment is 1.

        Raises:
            ConfigError: A size is negative, or a life ends before it begins.
        """
        requested, first, last = (np.array(numbers, np.int64) for numbers in (sizes, born, died))
        backwards = np.flatnonzero((last <= first) | (requested < 0))
        if len(backwards):
            index = int(backwards[0])
            raise ConfigError(
                f"buffer {index} of {requested[index]} bytes lives from {first[index]} to {last[index]}; "
                f"sizes must not be negative and lives not end before they begin"
            )
        wide = max(alignment, wide_alignment) if alignment > 1 else 1
        aligned = np.where(requested < WIDE, alignment, wide)
        return cls(-(-requested // aligned) * aligned, first, last, aligned)

    def __len__(self) -> int:
        return len(self.sizes)

    def select(self, mask: npt.NDArray[np.bool_]) -> Self:
        """Return the buffers at which the mask is true."""
        return type(self)(self.sizes[mask], self.born[mask], self.died[mask], self.aligned[mask])

    @cached_property
    def profile(self) -> tuple[Numbers, Numbers]:
        """Moments in rising order, deaths before births, and the live bytes from each moment on."""
        moments, changes = np.concatenate((self.born, self.died)), np.concatenate((self.sizes, -self.sizes))
        order = np.lexsort((changes, moments))
        return moments[order], np.cumsum(changes[order])

    @cached_property
    def max_live(self) -> int:
        """Highest sum of live bytes: no layout is smaller."""
        return int(self.profile[1].max(initial=0))

    @cached_property
    def peak_during(self) -> Numbers:
        """Highest sum of live bytes during each buffer's life."""
        moments, live = self.profile
        spans = np.stack((np.searchsorted(moments, self.born), np.searchsorted(moments, self.died)), axis=1)
        return np.asarray(np.maximum.reduceat(np.append(live, 0), spans.ravel())[::2])


@dataclass(frozen=True, slots=True)
class Layout:
    """Offset of each buffer, and the bytes of the whole block."""

    offsets: tuple[int, ...]
    bytes: int
    max_live: int
    """Highest sum of live bytes: no layout is smaller."""
    bound: int = 0
    """Lower bound that a search proved beyond `max_live`; 0 if none did."""

    @property
    def gap(self) -> float:
        """Excess of the block over the highest sum of live bytes, as a share of the latter."""
        return self.bytes / self.max_live - 1 if self.max_live else 0.0
