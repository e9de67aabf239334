"""Memory of the stores' files: tmpfs pages and page cache, which are resident in no process."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from autotune.measure.meters.sampling import SampledPeak


class StoreBytesMeter:
    """A meter that samples a function; usually `SwapStore.held_bytes`."""

    name = "held"
    unsure_bytes = 0

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._sampled = SampledPeak(read)

    def unavailable_reason(self) -> str:
        return ""

    def now_bytes(self) -> int:
        return self._read()

    @property
    def peak_bytes(self) -> int:
        return self._sampled.peak

    def __enter__(self) -> Self:
        self._sampled.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampled.stop()
