"""Store each entry's history: one JSON line per night, and two plan files that follow from the history."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from autotune.errors import ConfigError, PlanError
from autotune.nightly.diagnosis import Cause, Conditions
from autotune.records import plan_file as planfile
from autotune.records.json_codec import append_line, read_lines
from autotune.records.plan_file import PlanFile
from autotune.study.verdicts.ranking import plan_hash
from autotune.study.verdicts.statistics import Interval, RatioInterval, median_interval

RECORD_NIGHTS = 5
"""Number of a champion's first good nights that form its record; a moving record would follow a slow decline."""
RECENT_NIGHTS = 30
"""Number of past nights that the spread is estimated from."""


class NightVerdict(StrEnum):
    """Result of an entry's night."""

    SAME = "same"
    NEW = "new"
    """A first champion, or the first night of a champion."""
    PROMOTED = "promoted"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    """An error in an entry without a champion that could run."""


@dataclass(frozen=True, slots=True)
class NightRecord:
    """Result of one entry in one night."""

    night: str
    entry: str
    verdict: NightVerdict
    detail: str = ""
    causes: tuple[Cause, ...] = ()
    """Causes of a regression, the likeliest first."""
    champion: str = ""
    """Verified plan, by its `plan_identity`."""
    turns: tuple[float, ...] = ()
    """Time of the champion over the interleaved eager time, one ratio per block; seconds where eager does not fit."""
    charged_bytes: int | None = None
    """Bytes charged for the champion's step."""
    change: RatioInterval | None = None
    """Champion's time over its record."""
    rerun: RatioInterval | None = None
    """Ratio to the record, re-measured before the night was called a regression."""
    challenger: str = ""
    """Plan that was measured against the champion."""
    gain: RatioInterval | None = None
    """Challenger's time over the champion's."""
    pending: str = ""
    """Plan that was faster in this night and needs a second one."""
    promoted: str = ""
    """New champion, if this night made one."""
    conditions: Conditions = field(default_factory=Conditions)
    started: float = 0.0
    """Start, in seconds since the epoch."""
    seconds: float = 0.0
    """Duration."""
    exit_code: int = 0
    """Exit code of the entry alone."""

    @property
    def has_eager(self) -> bool:
        """True if eager fits: `turns`, `ratio` and `interval` are ratios to it, else seconds."""
        return self.conditions.baseline_seconds is not None

    @property
    def ratio(self) -> float | None:
        """Median of `turns`, the champion's time over eager's or its seconds; None where it did not run."""
        return statistics.median(self.turns) if self.turns else None

    @property
    def interval(self) -> Interval | None:
        """Interval of that median; None with fewer than two blocks."""
        return median_interval(self.turns) if len(self.turns) > 1 else None


@dataclass(frozen=True, slots=True)
class EntryDirectory:
    """Files of one entry: history, champion, pending challenger and plans."""

    directory: Path

    @property
    def champion(self) -> Path:
        """Plan file of the champion."""
        return self.directory / "champion.json"

    @property
    def challenger(self) -> Path:
        """Plan file of a plan that needs a second faster night."""
        return self.directory / "challenger.json"

    @property
    def plans(self) -> Path:
        return self.directory / "plans"

    @property
    def history_file(self) -> Path:
        """One JSON line per night."""
        return self.directory / "history.jsonl"

    def history(self) -> list[NightRecord]:
        """Return all nights; a repeated night counts once, with its last result."""
        remedy = "restore the file, or move it away to begin a new history"
        records = read_lines(NightRecord, self.history_file, remedy=remedy)
        return list({record.night: record for record in records}.values())

    def record(self, night: NightRecord) -> None:
        """Append a night and sync it to disk, then update the plan files."""
        append_line(self.history_file, night)
        self.reconcile()

    def reconcile(self) -> str:
        """Make the plan files agree with the history, whose last night may have ended before it updated them.

        Returns a note where the challenger cannot be read: it is moved aside, so that later nights do without it.
        """
        if not self.challenger.exists():
            return ""
        history = self.history()
        try:
            challenger = plan_identity(planfile.read(self.challenger))
        except (ConfigError, PlanError) as error:
            damaged = self.challenger.with_suffix(".json.damaged")
            self.challenger.replace(damaged)
            return f"the challenger is moved to {damaged.name}: {error}"
        if history and history[-1].promoted == challenger:
            self.challenger.replace(self.champion)
        elif not history or history[-1].pending != challenger:
            self.challenger.unlink()
        return ""

    def read(self, path: Path) -> PlanFile | None:
        """Return a plan file, or None if it does not exist."""
        return planfile.read(path) if path.exists() else None


def plan_identity(file: PlanFile) -> str:
    """Return a plan's name in the history; it includes the graph, whose op ids the plan uses."""
    return f"{plan_hash(file.plan)[:8]}-{file.graph_digest[:8]}"


def good_nights(history: Sequence[NightRecord], champion: str) -> list[NightRecord]:
    """Return this champion's nights without a regression or an error."""
    good = (NightVerdict.SAME, NightVerdict.NEW, NightVerdict.PROMOTED)
    return [night for night in history if night.champion == champion and night.verdict in good and len(night.turns) > 1]


def undisturbed_nights(nights: Sequence[NightRecord]) -> list[NightRecord]:
    """Return the nights whose times other work did not disturb; only these are evidence of the champion's time."""
    return [night for night in nights if not night.conditions.disturbed]


def record_bytes(nights: Sequence[NightRecord]) -> list[int]:
    """Return the charged bytes of the nights that form a champion's record; like times, they would follow a slow rise."""
    return [night.charged_bytes for night in nights if night.charged_bytes is not None][:RECORD_NIGHTS]


def record_ratios(nights: Sequence[NightRecord]) -> list[float]:
    """Return the ratios of the nights that form a champion's record."""
    return [ratio for night in nights[:RECORD_NIGHTS] for ratio in night.turns]


def recent_medians(nights: Sequence[NightRecord]) -> list[float]:
    """Return the median ratio of each recent night."""
    return [night.ratio for night in nights[-RECENT_NIGHTS:] if night.ratio is not None]
