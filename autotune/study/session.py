"""Search for the fastest plan within a budget, or for a Pareto front of all budgets, and re-measure the best plans."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from autotune.errors import InfeasibleError, NumericsError, PlanError, PlansFailedError, StoreError
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.planners.candidates import Candidate, DevicePlanning, MakePlanning, find_lowest
from autotune.planners.space import space_for_device
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir, lock_run_dir, write_json
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study.events import Disturbed, Finished, Measuring, PhaseStarted, Progress, StudyPhase, ignore_event
from autotune.study.front.budget_levels import BudgetLevels
from autotune.study.front.budget_scale import BudgetScale
from autotune.study.front.front_files import write_front
from autotune.study.interrupts import Interrupts, Stopped
from autotune.study.move_choice import MoveChooser
from autotune.study.outcome import (
    StudyResult,
    explain_failure,
    explain_no_time,
    explain_too_small,
    prove_infeasible,
    remove_plan,
    summarize,
    write_plan,
)
from autotune.study.preparation import StudyTask, check_inputs, note_other_meter, prepare, resolve, wait_for_device
from autotune.study.priors.phase import adapt_seeds, attach_priors
from autotune.study.runner import ParallelRunner, QuietRunner, Runner
from autotune.study.seeds import Seeds
from autotune.study.trial_store import TrialStore, make_identity
from autotune.study.trials.device_pool import DevicePool
from autotune.study.trials.next_trial import Proposal, TrialMaker
from autotune.study.trials.parallel_search import ParallelSearch
from autotune.study.trials.search_end import Patience, RecentSeconds, describe_end, ran_to_end
from autotune.study.verdicts.confirm import MIN_ROUNDS, compare_confirmed, to_table
from autotune.study.verdicts.front import assess_front, extends_front, select_front_run
from autotune.study.verdicts.next_run import reserved_seconds, select_next_run
from autotune.study.verdicts.plan_runs import count_rounds
from autotune.study.verdicts.ranking import (
    NEW_RUNS,
    Rules,
    apply_rules,
    drop_cut_off,
    measured_ratio,
    select_by_layout,
    select_leader,
    select_winner,
)

__all__ = ["Runner", "StudyResult", "tune"]

PLANNED = 6
"""Number of planner-made plans to measure, fastest estimate first."""
PLANNING_SHARE = 0.2
"""Maximum share of the study's time for making the planned candidates."""


def tune(
    config: Config,
    runner: Runner,
    run_dir: Path,
    *,
    progress: Progress = ignore_event,
    write_report: Callable[[Path], Path] | None = None,
    planning: MakePlanning = DevicePlanning,
    lasting: bool = True,
    devices: Sequence[ParallelRunner] = (),
    requested_time: str = "",
) -> StudyResult:
    """Tune `config.workload` into `config.budget`, and return the best plan with all trials.

    A run directory that contains trials is resumed. The runner is closed in any case.

    Args:
        config: the study to run; `config.time` counts from the device's first answer.
        runner: measures the plans.
        run_dir: directory of the records; it is locked for the time of the call.
        progress: receives every event, between measurements.
        write_report: writes the report of a run directory and returns its path.
        planning: makes the plans. `autotune.study.offline.replay` answers for planner and runner from a record.
        lasting: whether the Optuna study is kept on disk.
        devices: `runner`, then runners of equal devices. With two or more, the search measures on all of them.
        requested_time: time to record with the config where a run is requested anew; see `StudyTask`.

    Raises:
        InfeasibleError: no plan fits the budget, or none ran to its end.
        NumericsError: no plan computed the right results.
        LockedError: another process works in the run directory.
        ConfigError: a plan cannot be written, or the run directory contains another study.
        SystemExit: a signal arrived before the budget was known; the code is 128 plus the signal.
    """
    with lock_run_dir(run_dir), Interrupts() as interrupts:
        deadline = time.monotonic() + config.time_seconds
        task = StudyTask(config, runner, run_dir, progress, interrupts, deadline, planning, lasting, requested_time)
        session: _Session | None = None
        plan_path = report_path = None
        ended, is_over, trials = "", False, list[Trial]()
        try:
            trials += load_trials(RunDir(run_dir).trials)
            resumed = len(trials)
            seeds = check_inputs(task, trials)
            task = wait_for_device(task)
            prepared = prepare(task, trials)
            rules = resolve(task, prepared, trials)
            resumed -= drop_cut_off(trials, rules)
            session = _Session(task, prepared, rules, trials, resumed=resumed, seeds=seeds, devices=devices)
            ended, is_over = session.run(), True
        except (InfeasibleError, NumericsError, PlansFailedError):
            is_over = True
            raise
        except Stopped:
            if session is None:
                raise SystemExit(128 + interrupts.received) from None
        finally:
            with closing(runner):  # last: an error of a device must not cost the plan
                try:
                    if session is not None:
                        plan_path = session.finish(is_over=is_over)
                finally:
                    if trials and write_report is not None:
                        report_path = write_report(run_dir)
        return StudyResult(
            baseline=trials[0], best=select_winner(trials, rules), trials=tuple(trials), budget_bytes=rules.budget_bytes,
            floor_bytes=rules.floor_bytes, plan_path=plan_path, report_path=report_path, interrupted=interrupts.received,
            confirmed=tuple(compare_confirmed(trials, rules)), run_dir=run_dir, ended=ended,
            front_plans=tuple(assess_front(trials, rules)) if config.objective == "pareto" else (),
        )  # fmt: skip


class _Session:
    """One session of a study whose budget in bytes is known."""

    def __init__(
        self,
        task: StudyTask,
        prepared: PreparedWorkload,
        rules: Rules,
        trials: list[Trial],
        *,
        resumed: int,
        seeds: Seeds | None,
        devices: Sequence[ParallelRunner],
    ) -> None:
        self.config, self.run_dir, self.devices = task.config, task.run_dir, devices
        self.runner = QuietRunner(task.runner, self.has_time, lambda reason: self.progress(Disturbed(reason)))
        self.progress, self.interrupts = task.progress, task.interrupts
        self.prepared, self.rules, self.trials, self.resumed, self.seeds = prepared, rules, trials, resumed, seeds
        self.graph, self.costs, self.deadline = prepared.graph, prepared.costs, task.deadline
        self.trial_seconds, self.run_seconds = RecentSeconds(), RecentSeconds()  # of a trial with its planning
        self.best_plan: Plan | None = None
        self.patience, self.ended = Patience(self.config.patience), ""
        self.space = space_for_device(self.config.planners.model_dump(), prepared.device.kind, prepared.costs.stores)
        self.planning = task.planning(self.graph, self.costs, self.space)
        self.levels: BudgetLevels | None = None
        self.moves = MoveChooser(self.planning, rules, is_on=self.config.moves and self.config.objective == "time")
        identity = replace(make_identity(self.config, prepared, rules, self.space, trials), lasting=task.lasting)
        self.store = TrialStore(self.run_dir, identity, self.space, rules, trials)
        self.maker = TrialMaker(self.config, prepared, rules, self.planning, self.store)

    def run(self) -> str:
        """Run every phase in turn, and return why the search ended; Stopped where a signal ends the study."""
        for count in range(1, len(self.trials) + 1):
            self.announce(self.trials[:count], resumed=count <= self.resumed)
        self.measure_smallest()
        self.measure_seeds()
        self.measure_planned()
        self.search()
        self.confirm()
        while self.config.objective == "pareto" and not self.is_spent():  # a front reserves more time than it needs
            self.measure_planned()
            self.search()
            self.confirm()
        if select_winner(self.trials, self.rules) is None:
            raise explain_failure(
                self.config, self.rules, self.trials, self.lowest.estimate, self.run_dir, is_late=self.seconds_left <= 0
            )
        return self.ended

    def measure_smallest(self) -> None:
        """Measure the smallest plan as trial 1; InfeasibleError if even its estimate exceeds the budget."""
        self.progress(PhaseStarted(StudyPhase.SMALLEST))
        if (error := prove_infeasible(self.config, self.rules, self.graph, self.costs, is_recorded=True)) is not None:
            raise error
        with self.interrupts.breakable(patient=False):
            self.lowest = find_lowest(self.planning, self.rules.budget_bytes)
        low = self.lowest.estimate
        if low.peak_bytes > self.rules.budget_bytes:
            raise explain_too_small(
                self.config, self.rules, low.peak_bytes, low.peak_op, stores=bool(self.costs.stores), is_recorded=True
            )
        if not any(trial.kind == TrialKind.SMALLEST for trial in self.trials):
            if self.seconds_left <= 0:
                raise explain_no_time(self.config, self.run_dir)
            self.evaluate(Proposal(TrialKind.SMALLEST, self.lowest.settings, self.lowest))

    def measure_seeds(self) -> None:
        """Measure plans made from the settings of another run: planned for this budget, like any other trial."""
        if self.seeds is None:
            return
        self.progress(PhaseStarted(StudyPhase.SEEDS))
        for settings in adapt_seeds(
            self.seeds, self.prepared, self.space, self.rules, run_dir=self.run_dir, progress=self.progress
        ):
            if settings not in self.store.measured_settings and not self.is_spent():
                self.evaluate(self.maker.suggest(TrialKind.SEED, settings))

    def measure_planned(self) -> None:
        """Measure what the planners propose for the budget, and for lower targets while no plan kept the budget."""
        self.progress(PhaseStarted(StudyPhase.PLANNERS))
        if (scale := self.store.budget_scale) is not None:
            self.measure_levels(scale)
            return
        measured = self.store.measured_settings
        planned = [trial for trial in self.trials if trial.kind == TrialKind.PLANNER]
        target = max([self.target_bytes, *(trial.target_bytes or 0 for trial in planned)])  # of the first session
        self.measure_proposals(lambda proposal: proposal.settings not in measured)
        while self.target_bytes < target and not self.is_spent() and not self.store.planned_plan_fits:
            target = self.target_bytes
            self.measure_proposals(lambda proposal: proposal.plan not in [trial.plan for trial in self.trials], most=1)

    def measure_levels(self, scale: BudgetScale) -> None:
        """Measure the planners' fastest plan for each of several budgets, from the smallest plan's bytes to the limit."""
        self.levels = self.levels or BudgetLevels(self.planning, self.trials, scale, self.config.time_seconds)
        while self.may_measure_planned():
            with self.interrupts.breakable(patient=False):
                proposal = self.levels.propose_next(self.target_bytes)
            if proposal is None:
                return
            self.evaluate(self.maker.suggest(TrialKind.PLANNER, proposal.settings, proposal))
            self.levels.add(self.trials[-1])

    def measure_proposals(self, is_new: Callable[[Candidate], bool], most: int = PLANNED) -> None:
        """Measure at most `most` of the planners' proposals for the present target, fastest estimate first."""
        until = time.monotonic() + min(PLANNING_SHARE * self.config.time_seconds, self.seconds_left)
        proposals: list[Candidate] = []
        with self.interrupts.breakable(patient=False):
            for proposal in self.planning.propose(self.target_bytes, until - time.monotonic()):
                proposals.append(proposal)
                if time.monotonic() > until:
                    break
        fitting = [proposal for proposal in proposals if proposal.estimate.peak_bytes <= self.rules.budget_bytes]
        # the smallest plan was measured already, so a planner that proposes it again comes last
        fitting.sort(key=lambda proposal: (proposal.plan == self.lowest.plan, proposal.estimate.seconds))
        for proposal in select_by_layout(fitting, self.planning.estimate_layout, self.rules, most):
            if is_new(proposal) and self.may_measure_planned():
                self.evaluate(self.maker.suggest(TrialKind.PLANNER, proposal.settings, proposal))

    def may_measure_planned(self) -> bool:
        """Return True if a plan of the planners may be measured; the first may use the time reserved for the confirmation."""
        return not self.is_spent() or (
            self.seconds_left > 0 and not any(trial.kind == TrialKind.PLANNER for trial in self.trials)
        )

    def search(self) -> None:
        """Measure moves and the sampler's suggestions until time or trials run out, or no gain is left to expect."""
        if not self.is_spent():
            with self.interrupts.breakable(patient=False):
                attach_priors(self.store, self.planning, self.config, self.target_bytes, self.progress)
        self.progress(PhaseStarted(StudyPhase.SEARCH))
        if len(self.devices) > 1 and not self.is_spent() and self.may_search():
            pool = DevicePool(self.devices, self.graph.digest, self.has_time)
            steps = (lambda pending: not self.may_search(pending)), self.is_used_up, self.propose, self.record
            ParallelSearch(self.maker, pool, self.interrupts, self.progress, *steps).run()
        while not self.is_spent() and self.may_search():
            self.evaluate(began=time.monotonic(), proposal=self.propose())  # choosing a move takes seconds
        self.ended = describe_end(self.config, self.trials, self.patience, self.config.time_seconds - self.seconds_left)

    def propose(self, pending: Sequence[Trial] = ()) -> Proposal:
        """Propose the next trial of the search: a move, or the sampler's suggestion. `pending` are planned, unrecorded trials."""
        with self.interrupts.breakable():
            move = self.moves.choose([*self.trials, *pending], self.deadline - 2 * self.trial_seconds.longest)
        return self.maker.suggest(TrialKind.SEARCH) if move is None else Proposal(TrialKind.MOVE, move.settings, move)

    def confirm(self) -> None:
        """Re-measure the best plans in new processes until all comparisons are conclusive or the time is up.

        Plans of a front share processes, none twice in the same ones. Uncertain ones run again while no search goes on.
        """
        self.progress(PhaseStarted(StudyPhase.CONFIRM))
        shares, ran = self.config.objective == "pareto", set[Plan | None]()
        while self.seconds_left > 0:
            self.interrupts.check()
            late = self.seconds_left <= (self.run_seconds.longest or self.trial_seconds.longest)
            if (run := select_next_run(self.config.objective, self.trials, self.rules, is_late=late)) is None:
                return
            began, plan = time.monotonic(), None if run.candidate is None else run.candidate.plan
            if shares and count_rounds(self.trials)[plan] >= MIN_ROUNDS and self.may_search():
                return
            if not (shares and ran) or plan in ran:
                self.runner.renew()
                ran.clear()
            ran.add(plan)
            self.evaluate(Proposal(run.kind, run.settings, run.candidate, target_bytes=run.target_bytes))
            self.run_seconds.add(time.monotonic() - began)

    def is_spent(self) -> bool:
        """Return True if no further trial of the search may start. Raises Stopped if a signal ends the study."""
        self.interrupts.check()
        return self.has_enough()

    def may_search(self, pending: int = 0) -> bool:
        """Return True if a further trial of the search may start now; uncertain plans of a front may come before it."""
        is_paused = self.config.objective == "pareto" and self.patience.is_waning
        return not self.has_enough(pending) and not (is_paused and select_front_run(self.trials, self.rules))

    def has_enough(self, pending: int = 0) -> bool:
        """Return True if trials, time or patience are used up. `pending` is the number of planned, unrecorded trials."""
        return self.is_used_up(pending) or self.patience.is_used_up

    def is_used_up(self, pending: int = 0) -> bool:
        """Return True if trials or time are used up. The time of one more trial and of the confirmation is reserved."""
        searched = pending + sum(trial.kind not in NEW_RUNS for trial in self.trials)
        enough = self.config.trials is not None and searched >= self.config.trials
        one = self.trial_seconds.longest
        confirming = reserved_seconds(
            self.config.objective, self.trials, self.rules,
            run_seconds=self.run_seconds.longest or one, time_seconds=self.config.time_seconds,
        )  # fmt: skip
        return enough or self.seconds_left <= one + max(one, confirming)

    @property
    def seconds_left(self) -> float:
        """Seconds until the study's time is up."""
        return self.deadline - time.monotonic()

    def has_time(self, seconds: float) -> bool:
        """Return True if a repeat of so many seconds leaves time for another trial, and no signal arrived."""
        return not self.interrupts.received and self.seconds_left > self.trial_seconds.longest + seconds

    @property
    def target_bytes(self) -> int:
        """Peak bytes that planners have to meet now."""
        return self.maker.target_bytes

    def evaluate(self, proposal: Proposal, began: float | None = None) -> None:
        """Plan, estimate, measure and record one trial, chosen from `began` on; a known or too large plan is not run."""
        began, trial = time.monotonic() if began is None else began, self.maker.begin(proposal)
        try:
            with self.interrupts.breakable():
                candidate = self.maker.make_candidate(proposal)
            trial = self.maker.add_candidate(trial, candidate)
            trial = self.maker.decide_unmeasured(trial, candidate, self.trials) or self.measure(trial, candidate)
        except (PlanError, InfeasibleError, StoreError) as error:
            trial = replace(trial, measurement=Measurement(Outcome.CRASHED, str(error)))
        except Stopped:
            if proposal.request is not None:
                self.store.retry(proposal.request)
            raise
        self.record(trial, proposal, began)

    def measure(self, trial: Trial, candidate: Candidate) -> Trial:
        """Return the trial with its measurement; it stops early once the plan cannot win."""
        self.progress(Measuring(trial))
        with self.interrupts.breakable():
            result = self.runner.measure(
                candidate.plan, budget_bytes=self.rules.accepted_bytes, beat=self.maker.stop_ratio(trial)
            )
        return replace(trial, measurement=apply_rules(result, self.rules))

    def record(self, trial: Trial, proposal: Proposal, began: float) -> None:
        """Record and report a trial. `began` is its start in seconds of the monotonic clock."""
        self.trial_seconds.add(time.monotonic() - began, is_whole=ran_to_end(trial))
        note_other_meter(trial, self.trials, self.progress)
        self.store.record(trial, proposal.request)
        self.announce(self.trials)

    def announce(self, trials: Sequence[Trial], *, resumed: bool = False) -> None:
        """Report the last of these trials, and whether its plan leads now."""
        trial, best = trials[-1], select_leader(trials, self.rules)
        leads = best is not None and best.plan == trial.plan != self.best_plan
        self.best_plan = None if best is None else best.plan
        if not resumed:
            is_gain = leads or (self.config.objective == "pareto" and extends_front(trials, self.rules))
            self.patience.count(trial, is_gain=is_gain)
        ratio = None if trial.measurement is None else measured_ratio(trial.measurement, self.rules)
        self.progress(Finished(trial, ratio, leads, resumed))

    def finish(self, *, is_over: bool) -> Path | None:
        """Write the summary and the best plan; remove an earlier plan file whose plan failed since."""
        best, files = select_winner(self.trials, self.rules), RunDir(self.run_dir)
        received = 0 if is_over else self.interrupts.received or None  # None: ended by an error
        write_json(files.study, summarize(best, self.rules, self.prepared, self.trials, received, files=files))
        write_json(files.confirmed, to_table(compare_confirmed(self.trials, self.rules)))
        if self.config.objective == "pareto":
            write_front(self.config, files, self.prepared, self.rules, self.trials)
        path, (device, loop) = None, (self.prepared.device, self.prepared.loop)
        if best is None:
            remove_plan(self.config, self.run_dir, self.trials)
        else:
            path = write_plan(self.config, self.run_dir, device, self.rules, best, graph=self.graph, loop=loop)
        self.store.record_winner(best)  # last: a database that fails must not cost the plan
        return path
