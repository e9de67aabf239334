"""Resident memory of this process, where no cgroup is available, plus the memory of the stores' files."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from autotune.measure.meters.sampling import SampledPeak

_ROOT = Path("/")
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


class RssMeter:
    """The kernel's high-water mark of resident pages, reset on entry, plus the bytes of the stores.

    Written files and tmpfs are resident in no process, so without `store_bytes` offloading to a RAM disk would look free.
    Where the mark cannot be reset, a thread samples psutil instead, and the name contains `(sampled)`.
    """

    unsure_bytes = 0

    def __init__(
        self,
        store_bytes: Callable[[], int] = lambda: 0,
        root: Path = _ROOT,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._store_bytes = store_bytes
        self._proc = root / "proc/self"
        self._resident = resident
        self._sampled: SampledPeak | None = None
        self._store_bytes_at_entry = 0
        self._peak: int | None = None
        self.name = "rss" if self._can_reset() else "rss (sampled)"

    def unavailable_reason(self) -> str:
        return ""

    def now_bytes(self) -> int:
        return self._resident() + self._store_bytes()

    @property
    def peak_bytes(self) -> int:
        if self._peak is not None:
            return self._peak
        if self._sampled is not None:
            return self._sampled.peak
        return self._mark() + max(self._store_bytes_at_entry, self._store_bytes())

    def __enter__(self) -> Self:
        self._peak = None
        self._store_bytes_at_entry = self._store_bytes()
        if self.name == "rss":
            (self._proc / "clear_refs").write_text(_RESET_PEAK, encoding="utf-8")
        else:
            self._sampled = SampledPeak(self.now_bytes)
            self._sampled.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampled is not None:
            self._sampled.stop()
        self._peak = self.peak_bytes
        self._sampled = None

    def _mark(self) -> int:
        for line in (self._proc / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return self._resident()

    def _can_reset(self) -> bool:
        try:
            (self._proc / "clear_refs").write_text(_RESET_PEAK, encoding="utf-8")
        except OSError:
            return False
        return True
