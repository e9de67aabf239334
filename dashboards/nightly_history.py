"""Prepare nightly histories for a page: rows, regressions with their causes, and points for a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.nightly.history import EntryDirectory, NightRecord, NightVerdict
from autotune.nightly.result_files import COLUMNS, build_row

HEAD = ("night", *COLUMNS)


@dataclass(frozen=True, slots=True)
class NightPoint:
    """One night of one entry in a chart."""

    entry: str
    night: str
    started: datetime
    """Start in local time."""
    ratio: float
    """Champion's step time over eager's."""
    charged_mib: float | None
    verdict: str
    champion: str


def load_history(directory: Path) -> list[NightRecord]:
    """Return all nights of an entry, the first night first."""
    return sorted(EntryDirectory(directory).history(), key=lambda night: night.started)


def latest_nights(histories: Mapping[str, Sequence[NightRecord]]) -> list[NightRecord]:
    """Return every entry's latest night."""
    return [nights[-1] for nights in histories.values() if nights]


def list_regressions(histories: Mapping[str, Sequence[NightRecord]]) -> list[NightRecord]:
    """Return the regressions of all entries, the latest first."""
    nights = [night for history in histories.values() for night in history]
    regressions = [night for night in nights if night.verdict is NightVerdict.REGRESSION]
    return sorted(regressions, key=lambda night: night.started, reverse=True)


def history_rows(nights: Sequence[NightRecord]) -> list[tuple[str, ...]]:
    """Return rows of text under `HEAD`, the latest night first."""
    return [(night.night, *build_row(night)) for night in reversed(nights)]


def night_points(histories: Mapping[str, Sequence[NightRecord]]) -> list[NightPoint]:
    """Return a point for every night in which a champion ran."""
    return [
        NightPoint(
            night.entry,
            night.night,
            datetime.fromtimestamp(night.started),
            night.ratio,
            None if night.charged_bytes is None else night.charged_bytes / 2**20,
            night.verdict.value,
            night.champion,
        )
        for nights in histories.values()
        for night in nights
        if night.ratio is not None
    ]
