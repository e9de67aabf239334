"""One entry's night: its champion verified, a challenger that waits measured beside it, and a search around it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.errors import AutotuneError, PlanError, StoreError
from autotune.nightly.conditions import busy_share, conditions
from autotune.nightly.config import Entry, Nightly
from autotune.nightly.diagnosis import Cause, Conditions, cause
from autotune.nightly.history import Home, Night, Verdict, good_nights, identity, medians, on_record
from autotune.nightly.rounds import Borrowed, Rounds, Seen
from autotune.nightly.verdict import Finding, Standing, better, decided, look, more_bytes
from autotune.records import plan_file as planfile
from autotune.records.plan_file import PlanFile, match_plan
from autotune.study.interrupts import Interrupts, Stopped
from autotune.study.outcome import Result
from autotune.study.runner import Runner
from autotune.study.verdicts.statistics import Change, change, percent

Search = Callable[..., Result]
"""`search(config, runner, run_dir)`: `autotune.study.session.tune` with somebody who listens."""

VERIFY, DUEL = 0.5, 0.3
"""Of the entry's time that is left, for one look at the champion, and for one comparison."""
SEARCH = 0.6
"""Of what is left after those, for the search; a comparison of what it finds takes the rest."""


@dataclass
class EntryNight:
    """One session; `run` ends with what the history gets."""

    entry: Entry
    options: Nightly
    home: Home
    night: str
    runner: Runner
    search: Search
    interrupts: Interrupts
    deadline: float
    """On the monotonic clock."""

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.home.directory.mkdir(parents=True, exist_ok=True)
        self.home.settle()
        self.champion = self.home.read(self.home.champion)
        self.waiting = self.home.read(self.home.challenger)
        self.nights = good_nights(self.home.history(), _name(self.champion))
        self.conditions = Conditions()
        waiting, champion = _name(self.waiting), _name(self.champion)
        self.result = Night(
            self.night, self.entry.key, Verdict.SAME, champion=champion, pending=waiting, started=time.time()
        )
        self.notes: list[str] = []
        self.rounds = Rounds(self.runner, self.interrupts, self.deadline)
        self.stale = False
        """Whether the champion cannot run on this graph."""

    def run(self) -> Night:
        """Everything; an error of the workload is an answer too. Stopped where a signal ended it."""
        busy = busy_share()
        try:
            with self.interrupts.breakable(patient=False):
                self.prepared = self.runner.prepare()
                baseline = self.runner.baseline() if self.prepared.baseline_fits else None
            seconds = baseline.median_seconds if baseline is not None else None
            device, digest = self.prepared.device, self.prepared.graph.digest
            self.conditions = conditions(device, digest, baseline_seconds=seconds, busy=busy)
            if self.champion is not None:
                self.judge(self.champion)
            self.challenge()
        except AutotuneError as error:
            if not self.conditions.code:
                self.conditions = conditions(None, "", baseline_seconds=None, busy=busy)
            self.failed(error)
        return replace(
            self.result,
            detail="; ".join(filter(None, [self.result.detail, *self.notes])),
            conditions=self.conditions,
            seconds=time.monotonic() - self.began,
        )

    def failed(self, error: AutotuneError) -> None:
        """What ran before and does not now is a regression; what never ran is a fault of the config or the model."""
        if isinstance(error, StoreError):
            self.result = replace(self.result, verdict=Verdict.INCONCLUSIVE, detail=f"{error}")
        elif self.champion is None:
            self.result = replace(self.result, verdict=Verdict.FAILED, detail=f"{error}", exit_code=error.exit_code)
        else:
            self.regression(f"{error}", Cause.STALE if isinstance(error, PlanError) else None)

    # the champion

    def judge(self, champion: PlanFile) -> None:
        """Same, regression, inconclusive, or new. What looks like a regression is measured once more."""
        try:
            match_plan(self.home.champion, champion, self.prepared)
        except PlanError as error:
            self.stale = True
            self.regression(f"{error}", Cause.STALE)
            return
        seen = self.verify(champion)
        if not (reason := self.fault(seen)):
            self.stands(seen)
            return
        again = self.verify(champion)
        if still := self.fault(again):
            self.tell(seen)
            self.result = replace(self.result, rerun=self.changed(again))
            self.regression(f"{reason}; once more: {still}")
        else:
            self.notes.append(f"suspicious: {reason}, and not in the re-run")
            self.stands(again)

    def verify(self, champion: PlanFile) -> Seen:
        """Rounds until the record is clearly kept or broken, or the time is up."""

        def clear(seen: list[Seen]) -> bool:
            return not self.nights or self.look(seen[0]).standing is not Standing.UNCLEAR

        return self.rounds.of([champion], self.prepared, VERIFY, clear)[0]

    def look(self, seen: Seen) -> Finding:
        return look(seen.turns, on_record(self.nights), medians(self.nights), self.options.slower)

    def changed(self, seen: Seen) -> Change | None:
        """Beside the record, if there is one and something ran."""
        return self.look(seen).change if self.nights and len(seen.turns) > 1 else None

    def tell(self, seen: Seen) -> None:
        """What was measured, into the result."""
        charged = seen.charged_bytes
        self.result = replace(
            self.result, turns=tuple(seen.turns), charged_bytes=charged, change=self.changed(seen)
        )  # fmt: skip

    def fault(self, seen: Seen) -> str:
        """What would make it a regression, in words; empty for nothing."""
        if seen.fault:
            return seen.fault
        before = [night.charged_bytes for night in self.nights if night.charged_bytes is not None]
        if seen.charged_bytes is not None and more_bytes(seen.charged_bytes, before):
            return f"charged {percent(seen.charged_bytes / max(before))} beside its record"
        if self.changed(seen) is None or (found := self.look(seen)).standing is not Standing.WORSE:
            return ""
        return f"time {found.change} beside its record"

    def stands(self, seen: Seen) -> None:
        """No regression: what it is then."""
        self.tell(seen)
        verdict, detail = Verdict.SAME, ""
        if seen.failed is not None:
            verdict, detail = Verdict.INCONCLUSIVE, seen.trouble
        elif not self.nights:
            verdict, detail = Verdict.NEW, "the first night of this champion"
        elif (found := self.look(seen)).standing is not Standing.SAME:
            limit = percent(1 + self.options.slower)
            detail = f"time {found.change} beside its record: {limit} cannot be excluded, with more time it may be"
            verdict = Verdict.INCONCLUSIVE
        self.result = replace(self.result, verdict=verdict, detail=detail)

    def regression(self, detail: str, first: Cause | None = None) -> None:
        """With what changed since the last good night."""
        causes, why = cause(self.conditions, self.nights[-1].conditions if self.nights else None)
        if first is not None:
            causes = [first, *(one for one in causes if one is not Cause.DEVICE)]
        self.result = replace(
            self.result, verdict=Verdict.REGRESSION, detail=f"{detail} ({why})", causes=tuple(causes)
        )  # fmt: skip

    # its challengers

    def challenge(self) -> None:
        """The plan that waits has its second night; else a search, whose best waits for its own."""
        try:
            won = self.duel(self.waiting) if self.waiting is not None else False
            if won:
                self.promote()
                return
            if won is not None and self.waiting is not None:
                self.result = replace(self.result, pending="")
                self.notes.append("the plan that waited was not faster again")
            if self.champion is None or (self.entry.refine and self.rounds.left > 0 and not self.result.pending):
                self.refine()
        except AutotuneError as error:
            if self.champion is None:
                raise
            self.notes.append(f"no challenger: {error}")

    def promote(self) -> None:
        """Better in two nights."""
        self.result = replace(self.result, promoted=self.result.challenger, pending="")
        self.notes.append("a faster plan was promoted after its second night")
        if self.result.verdict is not Verdict.REGRESSION:
            self.result = replace(self.result, verdict=Verdict.PROMOTED)

    def refine(self) -> None:
        """Search, and keep what it finds if that is faster."""
        found = self.searched()
        if found is None:
            return
        if self.champion is None:
            self.adopt(found)
        elif self.duel(found):
            planfile.write(self.home.challenger, found)
            self.result = replace(self.result, pending=_name(found))
            self.notes.append("a faster plan waits for its second night")

    def adopt(self, found: PlanFile) -> None:
        """A first champion has nobody to beat; tonight begins its record."""
        name = _name(found)
        (seen,) = self.rounds.of([found], self.prepared, VERIFY, self.decided)
        self.result = replace(self.result, turns=tuple(seen.turns), charged_bytes=seen.charged_bytes)
        if seen.failed is not None:
            self.result = replace(self.result, verdict=Verdict.INCONCLUSIVE, detail=seen.trouble)
            return
        planfile.write(self.home.challenger, found)
        self.result = replace(
            self.result, verdict=Verdict.NEW, champion=name, promoted=name, detail="a first champion"
        )  # fmt: skip

    def duel(self, challenger: PlanFile) -> bool | None:
        """Whether the challenger beats the champion, in turns; one that runs beats one that cannot. None: not to be told."""
        try:
            match_plan(self.home.challenger, challenger, self.prepared)
        except PlanError as error:
            self.notes.append(f"a challenger cannot run: {error}")
            return False
        plans = [challenger] if self.champion is None or self.stale else [challenger, self.champion]
        mine, *others = self.rounds.of(plans, self.prepared, DUEL, self.decided)
        self.result = replace(self.result, challenger=_name(challenger))
        if mine.failed is not None:
            return False if mine.fault else None
        if not others or others[0].fault:
            return True
        if others[0].failed is not None:
            return None
        won, gain = better(mine.turns, others[0].turns, self.options.gain)
        self.result = replace(self.result, gain=gain)
        return won

    def decided(self, seen: list[Seen]) -> bool:
        """Whether more rounds would not change who is faster."""
        return len(seen) < 2 or decided(change(seen[0].turns, seen[1].turns), self.options.gain)

    def searched(self) -> PlanFile | None:
        """Search around the champion; None where that found nothing faster."""
        config = self.entry.study(
            SEARCH * self.rounds.left, self.home.plans, self.home.champion if self.champion else None
        )
        run_dir = self.home.directory / f"{self.night}_{self.entry.key}"
        found = self.search(config, Borrowed(self.runner), run_dir)
        if found.interrupted:
            self.interrupts.received = found.interrupted
            raise Stopped
        best = found.best
        if best is None or best.plan is None or best.measurement is None:
            return None
        ratio = best.measurement.time_ratio or best.measurement.median_seconds
        if self.result.ratio is not None and ratio is not None and ratio >= self.result.ratio:
            return None
        file = planfile.read(run_dir / "plan.json")
        return None if identity(file) == self.result.champion else file


def _name(file: PlanFile | None) -> str:
    return "" if file is None else identity(file)
