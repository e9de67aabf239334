"""What nights left behind: a history of JSON lines and two plan files for each entry. The history is the truth."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from autotune.nightly.diagnosis import Cause, Conditions
from autotune.records import plan_file as planfile
from autotune.records.json_codec import append_line, read_lines
from autotune.records.plan_file import PlanFile
from autotune.study.verdicts.ranking import plan_hash
from autotune.study.verdicts.statistics import Change

RECORD = 5
"""A champion's first good nights, which later ones are held to: a record that moved on would follow a slow decline."""
MEMORY = 30
"""Past nights that tell how far nights lie apart."""


class Verdict(StrEnum):
    """What an entry's night came to."""

    SAME = "same"
    NEW = "new"
    """A first champion, or the first night of one."""
    PROMOTED = "promoted"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    """Without a champion that could have run."""


@dataclass(frozen=True, slots=True)
class Night:
    """One entry's night."""

    night: str
    entry: str
    verdict: Verdict
    detail: str = ""
    causes: tuple[Cause, ...] = ()
    """Of a regression, the likeliest first."""
    champion: str = ""
    """The plan that was verified, by its `identity`."""
    turns: tuple[float, ...] = ()
    """Its time over plain eager's beside it, block by block; in seconds where eager does not fit."""
    charged_bytes: int | None = None
    """For its step."""
    change: Change | None = None
    """Beside its record."""
    rerun: Change | None = None
    """The same measured once more, before it was called a regression."""
    challenger: str = ""
    """A plan that ran beside the champion."""
    gain: Change | None = None
    """Its time over the champion's."""
    pending: str = ""
    """The plan that was better tonight and has to be so once more."""
    promoted: str = ""
    """The champion from now on, where tonight made it one."""
    conditions: Conditions = field(default_factory=Conditions)
    started: float = 0.0
    """Seconds since the epoch."""
    seconds: float = 0.0
    exit_code: int = 0
    """What the entry alone would end with."""

    @property
    def ratio(self) -> float | None:
        """The champion's time over plain eager's."""
        return statistics.median(self.turns) if self.turns else None


@dataclass(frozen=True, slots=True)
class Home:
    """One entry's directory."""

    directory: Path

    @property
    def champion(self) -> Path:
        return self.directory / "champion.json"

    @property
    def challenger(self) -> Path:
        """Of a plan that is to win once more."""
        return self.directory / "challenger.json"

    @property
    def plans(self) -> Path:
        return self.directory / "plans"

    def history(self) -> list[Night]:
        """All nights; of one that was begun twice the last."""
        cure = "restore the file, or take it away to begin a new history"
        found = read_lines(Night, self.directory / "history.jsonl", cure=cure)
        return list({night.night: night for night in found}.values())

    def record(self, night: Night) -> None:
        """Sync the night to disk; then the plan files follow it."""
        append_line(self.directory / "history.jsonl", night)
        self.settle()

    def settle(self) -> None:
        """Finish what a night that was cut off had recorded but not done: the plan files say what the history says."""
        if not self.challenger.exists():
            return
        history = self.history()
        waiting = identity(planfile.read(self.challenger))
        if history and history[-1].promoted == waiting:
            self.challenger.replace(self.champion)
        elif not history or history[-1].pending != waiting:
            self.challenger.unlink()

    def read(self, path: Path) -> PlanFile | None:
        return planfile.read(path) if path.exists() else None


def identity(file: PlanFile) -> str:
    """A plan's name in the history. Ids are positions: the same plan of another graph is another."""
    return f"{plan_hash(file.plan)[:8]}-{file.graph_digest[:8]}"


def good_nights(history: Sequence[Night], champion: str) -> list[Night]:
    """Nights of this champion that nothing was wrong with."""
    good = (Verdict.SAME, Verdict.NEW, Verdict.PROMOTED)
    return [one for one in history if one.champion == champion and one.verdict in good and len(one.turns) > 1]


def on_record(nights: Sequence[Night]) -> list[float]:
    """The turns that tonight's are held to."""
    return [turn for night in nights[:RECORD] for turn in night.turns]


def medians(nights: Sequence[Night]) -> list[float]:
    """One ratio a night."""
    return [night.ratio for night in nights[-MEMORY:] if night.ratio is not None]
