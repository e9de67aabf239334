"""Run one entry's night: verify the champion, measure a pending challenger against it, and search for a faster plan."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.errors import AutotuneError, PlanError
from autotune.fleet.far_end.device_server import DeviceRunner
from autotune.fleet.messages import is_timeout
from autotune.measure.device.conditions import MachineConditions
from autotune.nightly.comparison import (
    HistoryComparison,
    Standing,
    compare_challenger,
    compare_with_history,
    is_decided,
    is_memory_regression,
)
from autotune.nightly.conditions import collect_conditions
from autotune.nightly.config import NightlyConfig, NightlyEntry
from autotune.nightly.diagnosis import Cause, Conditions, diagnose
from autotune.nightly.failures import describe_failure, is_inconclusive
from autotune.nightly.history import (
    EntryDirectory,
    NightRecord,
    NightVerdict,
    good_nights,
    plan_identity,
    recent_medians,
    record_bytes,
    record_ratios,
    undisturbed_nights,
)
from autotune.nightly.rounds import PlanRounds, RoundRunner
from autotune.records import plan_file as planfile
from autotune.records.budget import Budget
from autotune.records.plan_file import PlanFile, match_plan
from autotune.records.run_dir import RunDir
from autotune.study.interrupts import Interrupts, Stopped, expire_after
from autotune.study.outcome import StudyResult
from autotune.study.runner import QueuedRunner, SharedRunner
from autotune.study.verdicts.ranking import Rules, eager_step_bytes
from autotune.study.verdicts.statistics import RatioInterval, compare_ratios, format_percent

Search = Callable[..., StudyResult]
"""`search(config, runner, run_dir)`: `autotune.study.session.tune` with a listener."""

VERIFY_SHARE, DUEL_SHARE = 0.5, 0.3
"""Shares of the entry's remaining time for one measurement of the champion, and for one comparison of two plans."""
SEARCH_SHARE = 0.6
"""Share of the time after these for the search; the comparison with its best plan uses the rest."""


@dataclass
class EntrySession:
    """One entry's session in one night; `run` returns the record for its history."""

    entry: NightlyEntry
    options: NightlyConfig
    home: EntryDirectory
    night: str
    runner: DeviceRunner
    search: Search
    interrupts: Interrupts
    deadline: float
    """End of the entry's time, on the monotonic clock."""
    latest: float = math.inf
    """End of the night, which a wait for the device cannot move."""

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.home.directory.mkdir(parents=True, exist_ok=True)
        damaged = self.home.reconcile()
        self.champion = self.home.read(self.home.champion)
        self.pending = self.home.read(self.home.challenger)
        self.nights = self.recorded_nights = good_nights(self.home.history(), _identity(self.champion))
        self.conditions = Conditions()
        pending, champion = _identity(self.pending), _identity(self.champion)
        self.result = NightRecord(
            self.night, self.entry.key, NightVerdict.SAME, champion=champion, pending=pending, started=time.time()
        )
        self.notes = [damaged] if damaged else []
        self.rounds = RoundRunner(self.runner, self.interrupts, self.deadline)
        self.is_up = False
        """True if the device answered."""
        self.is_stale = False
        """True if the champion cannot run on this graph."""

    def run(self) -> NightRecord:
        """Run the entry and return its record; an error of the workload becomes a verdict.

        Raises Stopped after a signal, and Expired where the night ended before the device was free.
        """
        machine = MachineConditions()
        try:
            with self.interrupts.breakable(patient=False):
                with expire_after(self.latest - time.monotonic()):  # the device may be in use for longer than the night
                    machine = self.runner.conditions()
                self.start_clock()
                self.prepared = self.runner.prepare()
                baseline = self.runner.baseline() if self.prepared.baseline_fits else None
            seconds = baseline.median_seconds if baseline is not None else None
            device, digest = self.prepared.device, self.prepared.graph.digest
            self.conditions = collect_conditions(machine, device, digest, baseline_seconds=seconds)
            self.compare_alike(has_eager=baseline is not None)
            self.use_budget(eager_step_bytes(baseline))
            if self.champion is not None:
                self.verify_champion(self.champion)
            self.evaluate_challengers()
        except AutotuneError as error:
            if not self.conditions.code:
                self.conditions = collect_conditions(machine, None, "", baseline_seconds=None)
            self.report_error(error)
        return replace(
            self.result,
            detail="; ".join(filter(None, [self.result.detail, *self.notes])),
            conditions=self.conditions,
            seconds=time.monotonic() - self.began,
        )

    def start_clock(self) -> None:
        """Begin the entry's time now: until its device answered, it waited for others."""
        self.is_up = True
        self.deadline = min(self.deadline + time.monotonic() - self.began, self.latest)
        self.rounds = RoundRunner(self.runner, self.interrupts, self.deadline)
        if isinstance(self.runner, QueuedRunner):
            self.runner.limit_waits(self.deadline)

    def compare_alike(self, *, has_eager: bool) -> None:
        """Leave out the nights that cannot be compared with this one: seconds where eager does not fit, else ratios to eager."""
        alike = [night for night in self.nights if (night.conditions.baseline_seconds is not None) is has_eager]
        if count := len(self.nights) - len(alike):
            other = "without" if has_eager else "with"
            self.notes.append(f"{count} nights {other} a measurement of eager are not compared")
        self.nights = alike

    def use_budget(self, eager_bytes: int | None) -> None:
        """Hold champion and challenger to the entry's present budget; they may have been found for another one.

        A share of eager's bytes needs `eager_bytes`; where they are unknown, the plans keep their budgets.
        """
        text, budget = self.entry.budget, Budget.parse(self.entry.budget)
        if budget.share is not None and eager_bytes is None:
            return
        floor = self.prepared.floor_bytes
        nbytes = budget.step_bytes(floor_bytes=floor, baseline_step_bytes=eager_bytes or 0)
        champion, pending = (
            file if file is None or file.budget == text else replace(file, budget=text, budget_bytes=nbytes)
            for file in (self.champion, self.pending)
        )
        if champion is not None and self.champion is not None and champion.budget != self.champion.budget:
            self.notes.append(f"the budget is {text}, and the champion was found for {self.champion.budget}")
        self.champion, self.pending = champion, pending

    def report_error(self, error: AutotuneError) -> None:
        """Record an error: a regression if the entry has a champion, else a failure of the config or the model.

        An error of a store or of a device is inconclusive, and so is a process that another one killed: it is no evidence
        against the champion. For an entry with a champion, so is every error before its device answered, and a preparation
        that takes too long, as on a busy machine.
        """
        has_champion = self.champion is not None
        if is_inconclusive(error) or (has_champion and (not self.is_up or is_timeout(error))):
            self.result = replace(self.result, verdict=NightVerdict.INCONCLUSIVE, detail=f"{error}")
        elif self.champion is None:
            failed = NightVerdict.FAILED
            self.result = replace(self.result, verdict=failed, detail=f"{error}", exit_code=error.exit_code)
        else:
            self.report_regression(f"{error}", Cause.STALE if isinstance(error, PlanError) else None)

    # the champion

    def verify_champion(self, champion: PlanFile) -> None:
        """Measure the champion and record its verdict; a suspected regression is re-measured first.

        Times that other work disturbed are no evidence against the champion; its bytes and its errors are.
        """
        try:
            match_plan(self.home.champion, champion, self.prepared)
        except PlanError as error:
            self.is_stale = True
            self.report_regression(f"{error}", Cause.STALE)
            return
        rounds = self.measure_champion(champion)
        if not (reason := self.find_regression(rounds)):
            self.accept_champion(rounds)
            return
        repeated = self.measure_champion(champion)
        # the re-measurement decides, so what disturbed the first rounds alone is no cause
        self.conditions = replace(self.conditions, disturbed=repeated.disturbed[-1] if repeated.disturbed else "")
        repeated_reason = self.find_regression(repeated)
        if not repeated_reason:
            self.notes.append(f"suspicious: {reason}, not confirmed when re-measured")
            self.accept_champion(repeated)
            return
        self.record_rounds(repeated if rounds.disturbed and not repeated.disturbed else rounds)
        self.result = replace(self.result, rerun=self.change_from_record(repeated))
        detail = f"{reason}; re-measured: {repeated_reason}"
        if repeated.disturbed and not self.find_error(repeated):
            detail = f"{detail}; other work disturbed it: {repeated.disturbed[-1]}"
            self.result = replace(self.result, verdict=NightVerdict.INCONCLUSIVE, detail=detail)
        else:
            self.report_regression(detail)

    def measure_champion(self, champion: PlanFile) -> PlanRounds:
        """Measure until the champion clearly keeps or misses its record, or the time is up."""

        def is_clear(rounds: list[PlanRounds]) -> bool:
            return not self.timed_nights or self.compare(rounds[0]).standing is not Standing.UNCLEAR

        measured = self.rounds.measure([champion], self.rules_of, VERIFY_SHARE, is_clear)[0]
        self.note_disturbance(measured)
        return measured

    def note_disturbance(self, rounds: PlanRounds) -> None:
        """Record that other work disturbed these times, which then form no part of the champion's record."""
        if rounds.disturbed:
            self.conditions = replace(self.conditions, disturbed=rounds.disturbed[-1])
            self.notes.append(f"disturbed: {rounds.disturbed[-1]}")

    @property
    def timed_nights(self) -> list[NightRecord]:
        """Past nights whose times this night's are compared with."""
        return undisturbed_nights(self.nights)

    def rules_of(self, file: PlanFile) -> Rules:
        """Return the rules that a study applied to a plan, on this machine."""
        tolerance = Budget.parse(file.budget).tolerance
        return Rules(file.budget_bytes, self.prepared.floor_bytes, self.prepared.tolerance, 0.0, tolerance)

    def compare(self, rounds: PlanRounds) -> HistoryComparison:
        """Compare the champion's rounds with its history."""
        record, medians = record_ratios(self.timed_nights), recent_medians(self.timed_nights)
        return compare_with_history(rounds.turns, record, medians, self.options.slower)

    def change_from_record(self, rounds: PlanRounds) -> RatioInterval | None:
        """Return the champion's time over its record; None without a record or without samples."""
        return self.compare(rounds).change if self.timed_nights and len(rounds.turns) > 1 else None

    def record_rounds(self, rounds: PlanRounds) -> None:
        """Copy the champion's measurements to the result."""
        self.result = replace(
            self.result,
            turns=tuple(rounds.turns),
            charged_bytes=rounds.charged_bytes,
            change=self.change_from_record(rounds),
        )

    def find_regression(self, rounds: PlanRounds) -> str:
        """Return the reason that these rounds show a regression; empty for none."""
        if error := self.find_error(rounds):
            return error
        if self.change_from_record(rounds) is None:
            return ""
        comparison = self.compare(rounds)
        return f"time {comparison.change} vs. its record" if comparison.standing is Standing.WORSE else ""

    def find_error(self, rounds: PlanRounds) -> str:
        """Return the failure or the bytes that speak against the plan, however busy the machine was; empty for none."""
        if rounds.plan_error:
            return rounds.plan_error
        before = record_bytes(self.recorded_nights)
        if rounds.charged_bytes is not None and is_memory_regression(rounds.charged_bytes, before):
            return f"charged {format_percent(rounds.charged_bytes / max(before))} vs. its record"
        return ""

    def accept_champion(self, rounds: PlanRounds) -> None:
        """Record the verdict of a champion without a regression: same, new or inconclusive."""
        self.record_rounds(rounds)
        verdict, detail = NightVerdict.SAME, ""
        if rounds.failed is not None:
            verdict, detail = NightVerdict.INCONCLUSIVE, rounds.error
        elif not self.recorded_nights:
            verdict, detail = NightVerdict.NEW, "first night of this champion"
        elif not self.timed_nights:
            cause = "was undisturbed" if self.nights else "is alike, with a measurement of eager or without one"
            detail = f"no night before {cause}: its times are compared with none"
            # on a machine that is always busy a slower champion would pass for a new one every night
            verdict = NightVerdict.INCONCLUSIVE if self.conditions.disturbed else NightVerdict.NEW
        elif (comparison := self.compare(rounds)).standing is not Standing.SAME:
            limit = format_percent(1 + self.options.slower)
            detail = f"time {comparison.change} vs. its record: {limit} cannot be excluded in the time of this entry"
            verdict = NightVerdict.INCONCLUSIVE
        self.result = replace(self.result, verdict=verdict, detail=detail)

    def report_regression(self, detail: str, first: Cause | None = None) -> None:
        """Record a regression with its causes, `first` before those that the changed conditions suggest."""
        causes, explanation = diagnose(
            self.conditions, self.recorded_nights[-1].conditions if self.recorded_nights else None
        )
        if first is not None:
            causes = [first, *(cause for cause in causes if cause is not Cause.DEVICE)]
        self.result = replace(
            self.result, verdict=NightVerdict.REGRESSION, detail=f"{detail} ({explanation})", causes=tuple(causes)
        )  # fmt: skip

    # its challengers

    def evaluate_challengers(self) -> None:
        """Give the pending challenger its second night; without one, search for a new challenger."""
        try:
            won = self.duel(self.pending) if self.pending is not None else False
            if won:
                self.promote()
                return
            if won is not None and self.pending is not None:
                self.result = replace(self.result, pending="")
                self.notes.append("the pending plan was not faster again")
            if self.champion is None or (
                self.entry.refine and self.rounds.seconds_left > 0 and not self.result.pending
            ):
                self.refine()
        except Exception as error:  # an internal error of a search must not cost the champion its verdict
            if self.champion is None:
                raise
            self.notes.append(f"no challenger: {describe_failure(error)}")

    def promote(self) -> None:
        """Make the challenger the champion, after it was faster in two nights."""
        self.result = replace(self.result, promoted=self.result.challenger, pending="")
        self.notes.append("a faster plan was promoted after its second night")
        if self.result.verdict is not NightVerdict.REGRESSION:
            self.result = replace(self.result, verdict=NightVerdict.PROMOTED)

    def refine(self) -> None:
        """Search, and keep the best plan as a pending challenger if it is faster than the champion."""
        candidate = self.search_candidate()
        if candidate is None:
            return
        if self.champion is None:
            self.adopt(candidate)
        elif self.duel(candidate):
            planfile.write(self.home.challenger, candidate)
            self.result = replace(self.result, pending=_identity(candidate))
            self.notes.append("a faster plan is pending until its second night")

    def adopt(self, candidate: PlanFile) -> None:
        """Make a plan the first champion; this night begins its record."""
        name = _identity(candidate)
        (rounds,) = self.rounds.measure([candidate], self.rules_of, VERIFY_SHARE, self.is_duel_decided)
        self.note_disturbance(rounds)
        self.result = replace(self.result, turns=tuple(rounds.turns), charged_bytes=rounds.charged_bytes)
        if rounds.failed is not None:
            self.result = replace(self.result, verdict=NightVerdict.INCONCLUSIVE, detail=rounds.error)
            return
        planfile.write(self.home.challenger, candidate)
        self.result = replace(
            self.result, verdict=NightVerdict.NEW, champion=name, promoted=name, detail="first champion"
        )  # fmt: skip

    def duel(self, challenger: PlanFile) -> bool | None:
        """Measure challenger and champion interleaved; return true if the challenger wins, None if that is unclear.

        A plan that runs wins against a plan that cannot run.
        """
        try:
            match_plan(self.home.challenger, challenger, self.prepared)
        except PlanError as error:
            self.notes.append(f"a challenger cannot run: {error}")
            return False
        plans = [challenger] if self.champion is None or self.is_stale else [challenger, self.champion]
        ours, *champion = self.rounds.measure(plans, self.rules_of, DUEL_SHARE, self.is_duel_decided)
        self.result = replace(self.result, challenger=_identity(challenger))
        if ours.failed is not None:
            return False if ours.plan_error else None
        if not champion or champion[0].plan_error:
            return True
        if champion[0].failed is not None:
            return None
        won, gain = compare_challenger(ours.turns, champion[0].turns, self.options.gain)
        self.result = replace(self.result, gain=gain)
        return won

    def is_duel_decided(self, rounds: list[PlanRounds]) -> bool:
        """Return true if more rounds would not change the faster plan."""
        return len(rounds) < 2 or is_decided(compare_ratios(rounds[0].turns, rounds[1].turns), self.options.gain)

    def search_candidate(self) -> PlanFile | None:
        """Search from the champion's settings; return the best plan, or None if it was no faster."""
        champion = self.home.champion if self.champion else None
        seconds = SEARCH_SHARE * self.rounds.seconds_left
        config = self.entry.search_config(seconds, self.home.plans, champion, night=self.night)
        run_dir = self.home.directory / f"{self.night}_{self.entry.key}"
        result = self.search(config, SharedRunner(self.runner), run_dir)
        if result.interrupted:
            self.interrupts.received = result.interrupted
            raise Stopped
        best = result.best
        if best is None or best.plan is None or best.measurement is None:
            return None
        ratio = best.time_cost
        if self.result.ratio is not None and ratio is not None and ratio >= self.result.ratio:
            return None
        file = replace(planfile.read(RunDir(run_dir).plan), run=run_dir.name)  # seen from the champion's place
        return None if plan_identity(file) == self.result.champion else file


def _identity(file: PlanFile | None) -> str:
    return "" if file is None else plan_identity(file)
