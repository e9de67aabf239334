"""Nights in a row: what every entry came to, its regressions with their causes, and its figures over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.nightly.history import Home, Night, Verdict
from autotune.nightly.pages import COLUMNS, row

HEAD = ("night", *COLUMNS)


@dataclass(frozen=True, slots=True)
class Point:
    """One night of one entry, for a chart."""

    entry: str
    night: str
    at: datetime
    """By this machine's clock."""
    ratio: float
    """The champion's time over plain eager's."""
    charged_mib: float | None
    verdict: str
    champion: str


def history(directory: Path) -> list[Night]:
    """All nights of an entry, the first one first."""
    return sorted(Home(directory).history(), key=lambda night: night.started)


def latest(histories: Mapping[str, Sequence[Night]]) -> list[Night]:
    """Every entry's last night."""
    return [nights[-1] for nights in histories.values() if nights]


def regressions(histories: Mapping[str, Sequence[Night]]) -> list[Night]:
    """Of all entries, the last one first."""
    red = [night for nights in histories.values() for night in nights if night.verdict is Verdict.REGRESSION]
    return sorted(red, key=lambda night: night.started, reverse=True)


def rows(nights: Sequence[Night]) -> list[tuple[str, ...]]:
    """Words under `HEAD`, the last night first."""
    return [(night.night, *row(night)) for night in reversed(nights)]


def points(histories: Mapping[str, Sequence[Night]]) -> list[Point]:
    """Nights in which a champion ran."""
    return [
        Point(
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
