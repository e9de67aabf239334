"""Prepare nightly histories for a page: rows, regressions with their causes, and points for a chart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from autotune.nightly.history import EntryDirectory, NightRecord, NightVerdict
from autotune.nightly.result_files import COLUMNS, build_row
from dashboards.discovery import relative_name

HEAD = ("night", *COLUMNS)
MAX_NIGHTS = 14
"""Maximum number of nights in the overview."""


@dataclass(frozen=True, slots=True)
class NightPoint:
    """One night of one entry in a chart."""

    entry: str
    night: str
    started: datetime
    """Start in local time."""
    time: float
    """Champion's step time over eager's; seconds where eager does not fit."""
    has_eager: bool
    charged_mib: float | None
    verdict: str
    champion: str


def name_entries(directories: Sequence[Path], root: Path) -> dict[str, Path]:
    """Return the directories of entries by name; entries of one name in several places are named by their path below `root`."""
    counts = Counter(path.name for path in directories)
    return {path.name if counts[path.name] == 1 else relative_name(path, root): path for path in directories}


def load_history(directory: Path, name: str | None = None) -> list[NightRecord]:
    """Return all nights of an entry, the first night first; `name` replaces the recorded name of the entry."""
    nights = sorted(EntryDirectory(directory).history(), key=lambda night: night.started)
    return nights if name is None else [replace(night, entry=name) for night in nights]


def latest_nights(histories: Mapping[str, Sequence[NightRecord]]) -> list[NightRecord]:
    """Return every entry's latest night."""
    return [nights[-1] for nights in histories.values() if nights]


def build_overview(histories: Mapping[str, Sequence[NightRecord]]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) with a row for each entry and a column for each of the latest nights, the last one first.

    A cell is the verdict, with the champion's time over eager's where it ran, or its seconds where eager does not fit; empty
    where the entry had no turn.
    """
    started: dict[str, float] = {}
    for nights in histories.values():
        for night in nights:
            started[night.night] = max(night.started, started.get(night.night, 0.0))
    shown = sorted(started, key=lambda name: started[name], reverse=True)[:MAX_NIGHTS]
    rows = []
    for entry, nights in histories.items():
        by_night = {night.night: night for night in nights}
        rows.append([entry, *(_summarize(by_night.get(name)) for name in shown)])
    return ["entry", *shown], rows


def _summarize(night: NightRecord | None) -> str:
    if night is None:
        return ""
    unit = "x" if night.has_eager else " s"
    return night.verdict.value if night.ratio is None else f"{night.verdict.value} {night.ratio:.2f}{unit}"


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
            night.has_eager,
            None if night.charged_bytes is None else night.charged_bytes / 2**20,
            night.verdict.value,
            night.champion,
        )
        for nights in histories.values()
        for night in nights
        if night.ratio is not None
    ]
