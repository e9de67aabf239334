"""Bytes of memory that the stores' files hold: tmpfs pages and page cache, resident in no process."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from autotune.measure.meters.sampling import Highest


class HeldMeter:
    """What `held()` tells, sampled; usually `SwapStore.held_bytes`."""

    name = "held"
    unsure_bytes = 0

    def __init__(self, held: Callable[[], int]) -> None:
        self._held = held
        self._sampled = Highest(held)

    def why_not(self) -> str:
        return ""

    def now_bytes(self) -> int:
        return self._held()

    @property
    def peak_bytes(self) -> int:
        return self._sampled.highest

    def __enter__(self) -> Self:
        self._sampled.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampled.stop()
