"""Search for the fastest plan within a budget: baseline, smallest plan, the planners' own answers, then the sampler."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import InfeasibleError, PlanError, StoreError
from autotune.ir.plan import Plan
from autotune.measure.survey import Prepared
from autotune.planners.candidates import Candidate, MakePlanning, planned
from autotune.planners.knobs import Settings
from autotune.planners.space import chosen_space
from autotune.predict.bounds import seconds_lower_bound
from autotune.predict.simulate import Estimate
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import locked, write_json
from autotune.records.trial import Trial, load
from autotune.study import optuna_space as space
from autotune.study import seeds
from autotune.study.events import Finished, Measuring, Phase, Progress, silent
from autotune.study.interrupts import Interrupts, Stopped
from autotune.study.ledger import Ledger, _identity
from autotune.study.outcome import Result, check_plans, impossible, too_small, why_none, withdraw_plan, write_plan
from autotune.study.preparation import Task, prepare, resolve
from autotune.study.runner import Runner
from autotune.study.verdicts.confirm import CONTENDERS, LEAST_ROUNDS, Word, confirmed, document, due
from autotune.study.verdicts.ranking import (
    Rules,
    aim_bytes,
    judge,
    leader,
    measured_ratio,
    not_run,
    pool,
    sure_to_exceed,
    to_beat,
    was_run,
    winner,
)

if TYPE_CHECKING:
    import optuna

__all__ = ["Result", "Runner", "tune"]

PLANNED = 6
"""Of the planners' own answers as many are measured, the fastest by estimate first."""
UNMEASURED = 0.25
"""What a trial that was not run counts of one."""
PLANNING_SHARE = 0.2
"""Of the study's time, that the planners' own answers may take to be made."""
CONFIRMING_SHARE = 0.2
"""Of the study's time, that is kept for the best plans' fresh numbers where they may need so much."""
CONFIRMATIONS = CONTENDERS * LEAST_ROUNDS + 1
"""Trials that fresh numbers take where they tell at once: two of each contender and one of a safe fallback."""


def tune(
    config: Config,
    runner: Runner,
    run_dir: Path,
    *,
    progress: Progress = silent,
    write_report: Callable[[Path], Path] | None = None,
    planning: MakePlanning = planned,
    lasting: bool = True,
) -> Result:
    """Tune `config.workload` into `config.budget`; a run directory with trials in it is gone on with.

    `planning` makes the plans and `runner` measures them: a record may answer for both (`autotune.study.offline.replay`). Optuna's study
    is on disk if it is to be `lasting`. Raises InfeasibleError, NumericsError, LockedError, ConfigError where no plan can be
    written, or what `runner` does; SystemExit(128 + signal) where a signal came before the budget was known. The runner is
    closed in any case.
    """
    with locked(run_dir), Interrupts() as interrupts:
        task = Task(
            config, runner, run_dir, progress, interrupts, time.monotonic() + config.time_seconds, planning, lasting
        )
        begun: _Session | None = None
        plan_path = report_path = None
        trials: list[Trial] = load(run_dir / "trials.jsonl")
        resumed = len(trials)
        try:
            check_plans(config)
            prepared = prepare(task, trials)
            rules = resolve(task, prepared, trials)
            begun = _Session(task, prepared, rules, trials, resumed)
            begun.run()
        except Stopped:
            if begun is None:
                raise SystemExit(128 + interrupts.received) from None
        finally:
            runner.close()
            try:
                if begun is not None:
                    plan_path = begun.finish()
            finally:
                if trials and write_report is not None:
                    report_path = write_report(run_dir)
        best = winner(trials, rules)
        return Result(
            baseline=trials[0],
            best=best,
            trials=tuple(trials),
            budget_bytes=rules.budget_bytes,
            floor_bytes=rules.floor_bytes,
            plan_path=plan_path,
            report_path=report_path,
            interrupted=interrupts.received,
            confirmed=tuple(confirmed(trials, rules)),
        )


class _Session:
    """One session of a study whose budget is known."""

    def __init__(self, task: Task, prepared: Prepared, rules: Rules, trials: list[Trial], resumed: int) -> None:
        self.config, self.runner, self.run_dir = task.config, task.runner, task.run_dir
        self.progress, self.interrupts = task.progress, task.interrupts
        self.prepared, self.rules, self.trials, self.resumed = prepared, rules, trials, resumed
        self.graph, self.costs = prepared.graph, prepared.costs
        self.deadline = task.deadline
        self.longest_seconds = 0.0
        self.best_plan: Plan | None = None
        self.since_gain = 0.0
        stores = prepared.costs.stores
        self.space = chosen_space(self.config.planners.model_dump(), prepared.device.kind, stores)
        self.planning = task.planning(self.graph, self.costs, self.space)
        self.ledger = Ledger(
            self.run_dir,
            replace(_identity(self.config, prepared, rules, self.space, trials), lasting=task.lasting),
            self.space,
            rules,
            trials,
        )

    def run(self) -> None:
        """Every phase in turn; Stopped where a signal ends it."""
        for done in range(1, len(self.trials) + 1):
            self.announce(self.trials[:done], resumed=done <= self.resumed)
        self.smallest()
        self.seeds()
        self.planners()
        self.search()
        self.confirm()
        if winner(self.trials, self.rules) is None:
            raise why_none(self.config, self.rules, self.trials, self.lowest.estimate, self.run_dir)

    def smallest(self) -> None:
        """Trial 1: if even this is estimated over the budget, nothing fits."""
        self.progress(Phase("smallest"))
        if (error := impossible(self.config, self.rules, self.graph, self.costs)) is not None:
            raise error
        with self.interrupts.breakable(patient=False):
            self.lowest = self.planning.smallest()
        if self.lowest.estimate.peak_bytes > self.rules.budget_bytes:
            low = self.lowest.estimate
            raise too_small(self.config, self.rules, low.peak_bytes, low.peak_op, stores=bool(self.costs.stores))
        if not any(trial.kind == "smallest" for trial in self.trials):
            self.evaluate("smallest", self.lowest.settings, made=self.lowest)

    def seeds(self) -> None:
        """Settings that served elsewhere: planned for this budget and measured like any other, never believed."""
        if self.config.seed_from is None or any(trial.kind in ("planner", "search") for trial in self.trials):
            return
        self.progress(Phase("seeds"))
        done = [trial.settings for trial in self.trials if trial.kind != "smallest"]
        found = seeds.read(Path(self.config.seed_from), Path(self.config.runs))
        for settings in found.here(self.costs.stores, self.space):
            if settings not in done and not self.spent():
                self.ask("seed", settings)

    def planners(self) -> None:
        """The planners' own answers for the budget; lower ones while all were charged more than they were to take."""
        self.progress(Phase("planners"))
        done = [trial.settings for trial in self.trials if trial.kind != "smallest"]
        aimed = self.aim_bytes
        self.measure_answers(lambda answer: answer.settings not in done)
        while self.aim_bytes < aimed and not self.spent() and not self.answered():
            aimed = self.aim_bytes
            self.measure_answers(lambda answer: answer.plan not in [trial.plan for trial in self.trials], most=1)

    def answered(self) -> bool:
        """Whether a plan of the planners' own held."""
        seen = [trial.measurement for trial in self.trials if trial.kind == "planner"]
        return any(one is not None and one.outcome is Outcome.OK for one in seen)

    def measure_answers(self, wanted: Callable[[Candidate], bool], most: int = PLANNED) -> None:
        """What planners answer now, the fastest by estimate first."""
        until = time.monotonic() + PLANNING_SHARE * self.config.time_seconds
        made: list[Candidate] = []
        with self.interrupts.breakable(patient=False):
            for answer in self.planning.answers(self.aim_bytes):
                made.append(answer)
                if time.monotonic() > until:
                    break
        fitting = [answer for answer in made if answer.estimate.peak_bytes <= self.rules.budget_bytes]
        # the smallest plan was measured already: whoever answers with it comes last
        fitting.sort(key=lambda answer: (answer.plan == self.lowest.plan, answer.estimate.seconds))
        for answer in self.laid_out(fitting, most):
            # one of them is measured even where capture and profile took all of the time
            first = not any(trial.kind == "planner" for trial in self.trials)
            if wanted(answer) and (first or not self.spent()):
                self.ask("planner", answer.settings, answer)

    def laid_out(self, fitting: Sequence[Candidate], most: int) -> Sequence[Candidate]:
        """The first that can be laid out within the budget; where none can the very first: what it is charged tells the
        next ones where to aim.
        """
        found: list[Candidate] = []
        for answer in fitting[: 2 * most]:
            if len(found) < most and not sure_to_exceed(self.planning.laid_out(answer), self.rules):
                found.append(answer)
        return found or fitting[:1]

    def search(self) -> None:
        """Ask the sampler until time, trials or hope run out."""
        self.progress(Phase("search"))
        while not self.spent():
            self.ask("search")

    def confirm(self) -> None:
        """Measure the best plans afresh, in turns, until it is told which wins or the time is up; one is in any case."""
        self.progress(Phase("confirm"))
        while (best := due(self.trials, self.rules)) is not None:
            self.interrupts.check()
            fresh = sum(trial.kind == "confirm" and was_run(trial) for trial in self.trials)
            told = any(one.word is Word.BEST for one in confirmed(self.trials, self.rules))
            if (told or fresh >= CONTENDERS) and self.left <= self.longest_seconds:
                return
            assert best.plan is not None
            assert best.estimate is not None
            self.runner.renew()
            self.evaluate("confirm", best.settings, made=Candidate(best.settings, best.plan, best.estimate))

    def spent(self) -> bool:
        """Whether the search ends here: keeps the time that one more trial and the confirmation need."""
        self.interrupts.check()
        searched = sum(trial.kind != "confirm" for trial in self.trials)
        enough = self.config.trials is not None and searched >= self.config.trials
        share = min(CONFIRMATIONS * self.longest_seconds, CONFIRMING_SHARE * self.config.time_seconds)
        kept = self.longest_seconds + max(self.longest_seconds, share)
        return enough or self.left <= kept or self.since_gain >= self.config.patience

    @property
    def left(self) -> float:
        """Seconds until the study's time is up."""
        return self.deadline - time.monotonic()

    @property
    def aim_bytes(self) -> int:
        """What planners are told to meet now."""
        return aim_bytes(self.rules.budget_bytes, self.ledger.wastes)

    def ask(self, kind: str, at: Settings | None = None, answer: Candidate | None = None) -> None:
        """One trial of Optuna's, at these settings if they are given; `answer` is the plan that they made already."""
        fixed, _ = space.parameters(at, self.space) if at else ({}, {})
        asked = self.ledger.ask(fixed)
        settings = space.suggest(asked, self.space)
        # a retry may have come before the answer; and a wasteful allocator may have left it too little room
        keep = answer is not None and answer.settings == settings and answer.estimate.peak_bytes <= self.aim_bytes
        self.evaluate(kind, settings, made=answer if keep else None, asked=asked)

    def evaluate(
        self, kind: str, settings: Settings, *, made: Candidate | None = None, asked: "optuna.Trial | None" = None
    ) -> None:
        """Plan, estimate, run what is new and may fit, and record it."""
        number = self.ledger.next_number() if asked is None else asked.number
        trial = Trial(number, kind, str(self.config.ref), self.graph.digest, settings, started=time.time())
        began = time.monotonic()
        try:
            with self.interrupts.breakable():
                made = made or self.planning.made(settings, self.aim_bytes)
            # planners aim below the budget: what is proved for their aim is not proved for the budget
            proved = seconds_lower_bound(self.graph, self.costs, self.rules.budget_bytes)
            expected = replace(self.planning.laid_out(made), lower_bound_seconds=proved)
            trial = replace(trial, plan=made.plan, estimate=expected)
            screened: Estimate | None
            if kind == "confirm":  # it kept the budget once, whatever is predicted
                screened, beat = None, None
            else:
                # of the planners' own what its layout is charged is to be seen: the next ones aim by it
                screened, beat = expected if kind == "search" else made.estimate, self.beat
            trial = self.repeated(trial) or replace(trial, measurement=self.measure(trial, made.plan, screened, beat))
        except (PlanError, InfeasibleError, StoreError) as error:
            trial = replace(trial, measurement=Measurement(Outcome.CRASHED, str(error)))
        except Stopped:
            if asked is not None:
                self.ledger.retry(asked)
            raise
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        self.ledger.record(trial, asked)
        self.announce(self.trials)

    def repeated(self, trial: Trial) -> Trial | None:
        """The trial with what its plan was seen to do before, if it was run before."""
        same = [old for old in self.trials if old.plan == trial.plan and was_run(old) and old.kind != "repeat"]
        pooled = pool(same).measurement if same and trial.kind != "confirm" else None
        if pooled is None:
            return None
        note = f"same plan as trial {same[-1].number}: not run again"
        return replace(trial, kind="repeat", measurement=replace(pooled, detail=note))

    def measure(self, trial: Trial, plan: Plan, expected: Estimate | None, beat: float | None) -> Measurement:
        """Run the trial's plan, unless the simulator already finds it too large; no longer than it takes to see it cannot win."""
        if expected is not None and sure_to_exceed(expected, self.rules):
            return not_run(expected, self.rules)
        self.progress(Measuring(trial))
        with self.interrupts.breakable():
            seen = self.runner.measure(plan, budget_bytes=self.rules.budget_bytes, beat=beat)
        return judge(seen, self.rules)

    @property
    def beat(self) -> float | None:
        """The ratio from which on a plan is hopeless; None where slower plans are wanted too."""
        return to_beat(leader(self.trials, self.rules)) if self.config.objective == "time" else None

    def announce(self, known: Sequence[Trial], *, resumed: bool = False) -> None:
        """Tell of the last of these trials, and whether its plan leads now."""
        trial, best = known[-1], leader(known, self.rules)
        leads = best is not None and best.plan == trial.plan and best.plan != self.best_plan
        self.best_plan = None if best is None else best.plan
        if trial.kind in ("search", "repeat"):
            self.since_gain += 1 if trial.kind == "search" and was_run(trial) else UNMEASURED
        if leads:
            self.since_gain = 0.0
        ratio = measured_ratio(trial.measurement, self.rules) if trial.measurement else None
        self.progress(Finished(trial, ratio, leads, resumed))

    def finish(self) -> Path | None:
        """Write the best plan, or take back one that failed since, and what the records do not say."""
        best = winner(self.trials, self.rules)
        write_json(
            self.run_dir / "study.json",
            {
                "best": None if best is None else best.number,
                "budget_bytes": self.rules.budget_bytes,
                "floor_bytes": self.rules.floor_bytes,
                "baseline_fits": self.prepared.baseline_fits,
                "capture_error": self.prepared.capture_error,
                "interrupted": self.interrupts.received,
            },
        )
        write_json(self.run_dir / "confirmed.json", document(confirmed(self.trials, self.rules)))
        if best is None:
            withdraw_plan(self.config, self.run_dir)
            return None
        return write_plan(self.config, self.run_dir, self.prepared.device, self.rules, best)
