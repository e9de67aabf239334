"""Measure plans interleaved, in new processes each round, until the result is clear or the time is up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.study.interrupts import Interrupts
from autotune.study.runner import Runner
from autotune.study.verdicts.ranking import Rules, apply_rules
from autotune.study.verdicts.statistics import block_ratios

MIN_ROUNDS = 2
"""Minimum rounds, each in new processes, behind a verdict."""
UNINFORMATIVE = frozenset({Outcome.DISK_FULL, Outcome.STOPPED_EARLY})
"""Failures that are no evidence against the plan."""


@dataclass(slots=True)
class PlanRounds:
    """All rounds of one plan in this night."""

    turns: list[float] = field(default_factory=list)
    """Time over the interleaved eager time, one ratio per block."""
    charged: list[int] = field(default_factory=list)
    """Bytes charged for the step, one figure per round."""
    disturbed: list[str] = field(default_factory=list)
    """Reason of each round that other work disturbed."""
    failed: Measurement | None = None
    """The last round, if it failed."""

    @property
    def charged_bytes(self) -> int | None:
        """Minimum over all rounds: accidents raise the charge of a step and never lower it."""
        return min(self.charged, default=None)

    @property
    def plan_error(self) -> str:
        """Failure that is evidence against the plan. Empty without a failure, and if a signal from outside ended the process."""
        failed = self.failed
        return "" if failed is None or failed.outcome in UNINFORMATIVE or failed.was_killed else self.error

    @property
    def error(self) -> str:
        """Failure for any reason; empty for none."""
        return f"{self.failed.outcome.value.replace('_', ' ')}: {self.failed.detail}" if self.failed is not None else ""


@dataclass(frozen=True, slots=True)
class RoundRunner:
    """Runner of rounds until a deadline."""

    runner: Runner
    interrupts: Interrupts
    deadline: float
    """End of the entry's time, on the monotonic clock."""

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def measure(
        self,
        plans: Sequence[PlanFile],
        rules_of: Callable[[PlanFile], Rules],
        share: float,
        is_enough: Callable[[list[PlanRounds]], bool],
    ) -> list[PlanRounds]:
        """Measure plans interleaved: at least two rounds, then more until `is_enough`.

        `rules_of` gives the rules that a study applied to a plan. Ends as well when `share` of the remaining time is used, or after a round in which a plan failed.
        """
        until = time.monotonic() + share * self.seconds_left
        rounds = [PlanRounds() for _ in plans]
        longest, number = 0.0, 0
        while number < MIN_ROUNDS or time.monotonic() + longest < until:
            began = time.monotonic()
            for file, plan_rounds in zip(plans, rounds, strict=True):
                self._measure_once(file, rules_of(file), plan_rounds)
            number += 1
            longest = max(longest, time.monotonic() - began)
            any_failed = any(plan_rounds.failed is not None for plan_rounds in rounds)
            if any_failed or (number >= MIN_ROUNDS and is_enough(rounds)):
                break
        return rounds

    def _measure_once(self, file: PlanFile, rules: Rules, rounds: PlanRounds) -> None:
        """Measure one round under the same rules as a study."""
        self.interrupts.check()
        self.runner.renew()
        with self.interrupts.breakable():
            measurement = self.runner.measure(file.plan, budget_bytes=file.accepted_bytes)
        measurement = apply_rules(measurement, rules)
        if measurement.outcome is not Outcome.OK:
            rounds.failed = measurement
            return
        if measurement.disturbed:
            rounds.disturbed.append(measurement.disturbed)
        rounds.turns += block_ratios(measurement)
        if measurement.step_charged_bytes is not None:
            rounds.charged.append(measurement.step_charged_bytes)
