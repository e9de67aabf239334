"""Plans measured in turns, each time in fresh processes, until enough is known or the time is up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.ir.plan import Plan
from autotune.measure.survey import Prepared
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.study.interrupts import Interrupts
from autotune.study.runner import Runner
from autotune.study.verdicts.ranking import Rules, judge
from autotune.study.verdicts.statistics import turns

ROUNDS = 2
"""Fresh processes that a verdict comes from, at least."""
SILENT = frozenset({Outcome.DISK_FULL, Outcome.STOPPED_EARLY})
"""Outcomes that say nothing of the plan."""


@dataclass(slots=True)
class Seen:
    """All rounds of one plan tonight."""

    turns: list[float] = field(default_factory=list)
    charged: list[int] = field(default_factory=list)
    failed: Measurement | None = None
    """The round that did not run to its end, if one did not: it was the last."""

    @property
    def charged_bytes(self) -> int | None:
        """The least of all rounds: by accident a step is charged more, never less."""
        return min(self.charged, default=None)

    @property
    def fault(self) -> str:
        """What went wrong, where that says something of the plan."""
        return self.trouble if self.failed is not None and self.failed.outcome not in SILENT else ""

    @property
    def trouble(self) -> str:
        """What went wrong, for whatever reason."""
        return f"{self.failed.outcome.value.replace('_', ' ')}: {self.failed.detail}" if self.failed is not None else ""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What measures, until when."""

    runner: Runner
    interrupts: Interrupts
    deadline: float
    """On the monotonic clock."""

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def of(
        self, plans: Sequence[PlanFile], prepared: Prepared, share: float, enough: Callable[[list[Seen]], bool]
    ) -> list[Seen]:
        """Two rounds, then more until it is enough, or the share of the time that is left is used; the last where one failed."""
        until = time.monotonic() + share * self.left
        seen = [Seen() for _ in plans]
        longest, number = 0.0, 0
        while number < ROUNDS or time.monotonic() + longest < until:
            began = time.monotonic()
            for file, one in zip(plans, seen, strict=True):
                self._measure(file, prepared, one)
            number += 1
            longest = max(longest, time.monotonic() - began)
            if any(one.failed is not None for one in seen) or (number >= ROUNDS and enough(seen)):
                break
        return seen

    def _measure(self, file: PlanFile, prepared: Prepared, seen: Seen) -> None:
        """Once more, held to what a study holds it to."""
        self.interrupts.check()
        self.runner.renew()
        with self.interrupts.breakable():
            found = self.runner.measure(file.plan, budget_bytes=file.budget_bytes)
        found = judge(found, rules(file, prepared))
        if found.outcome is not Outcome.OK:
            seen.failed = found
            return
        seen.turns += turns(found)
        if found.step_charged_bytes is not None:
            seen.charged.append(found.step_charged_bytes)


def rules(file: PlanFile, prepared: Prepared) -> Rules:
    """What the plan was held to when it was found."""
    return Rules(file.budget_bytes, prepared.floor_bytes, prepared.tolerance, 0.0)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A runner that a study may close: the night goes on with it, in fresh processes."""

    runner: Runner

    def prepare(self) -> Prepared:
        return self.runner.prepare()

    def baseline(self) -> Measurement:
        return self.runner.baseline()

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        return self.runner.measure(plan, budget_bytes=budget_bytes, beat=beat)

    def renew(self) -> None:
        self.runner.renew()

    def close(self) -> None:
        self.runner.renew()
