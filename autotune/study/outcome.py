"""Result of a study: the best plan as files, or the error that explains why there is none."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import (
    AutotuneError,
    ConfigError,
    InfeasibleError,
    NumericsError,
    OutOfTimeError,
    PlansFailedError,
    StoreError,
    WorkerError,
)
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.graph_summary import summarize_graph
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.planners.candidates import find_smallest
from autotune.planners.space import space_for_device
from autotune.predict.bounds import peak_lower_bound
from autotune.predict.simulate import Estimate
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir, resume_command
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study.verdicts.confirm import ConfirmedPlan
from autotune.study.verdicts.front import FrontPoint, FrontStatus
from autotune.study.verdicts.plan_runs import group_runs
from autotune.study.verdicts.ranking import Rules, estimate_spread
from autotune.study.verdicts.statistics import Interval
from autotune.units import fmt_bytes

if TYPE_CHECKING:
    from autotune.study.batch.records import BatchSearch

BUDGET_ROOM = 1.02
"""Ratio of a suggested budget to the smallest plan's peak: the charge of a process may exceed the estimate."""
_OTHER_PLANS = "name another directory by plans: in the config"


@dataclass(frozen=True, slots=True)
class StudyResult:
    """Result of a study."""

    baseline: Trial
    best: Trial | None
    """Best trial; None where a signal ended the study before any plan fitted."""
    trials: tuple[Trial, ...]
    budget_bytes: int
    """Maximum charge of the step, without the floor."""
    floor_bytes: int
    plan_path: Path | None
    report_path: Path | None
    interrupted: int = 0
    """Number of the signal that ended the study, or its logging, early; 0 for none."""
    ended: str = ""
    """Reason for which the search ended; empty where a signal ended the study."""
    confirmed: tuple[ConfirmedPlan, ...] = ()
    """Re-measured plans, the best first."""
    run_dir: Path | None = None
    """Directory of the run's records."""
    front_plans: tuple[FrontPoint, ...] = ()
    """Re-measured plans of `objective: pareto` with their status, the smallest first; empty for another objective."""

    @property
    def plan(self) -> planfile.PlanFile | None:
        """Best plan with its provenance, as a training loop reads it; None where no plan was written."""
        return None if self.plan_path is None else planfile.read(self.plan_path)

    @property
    def front(self) -> tuple[FrontPoint, ...]:
        """Verified Pareto front of `objective: pareto`, the smallest plan first; empty for another objective."""
        return tuple(point for point in self.front_plans if point.status is FrontStatus.FRONT)

    @property
    def front_paths(self) -> tuple[Path, ...]:
        """Plan file of each point of the front, in its order."""
        if self.run_dir is None:
            return ()
        return tuple(RunDir(self.run_dir).front_plan(point.number) for point in self.front)

    @property
    def batch_search(self) -> "BatchSearch | None":
        """Search that chose the batch size of the study; None for a study of one size."""
        from autotune.study.batch.records import read_batch_search

        return None if self.run_dir is None else read_batch_search(self.run_dir)

    @property
    def time_ratio(self) -> Interval | None:
        """Step time of the best plan over eager's; None if not re-measured.

        It has a confidence interval, or with fewer than six blocks their range.
        """
        plan = None if self.best is None else self.best.plan
        return next((confirmed.ratio for confirmed in self.confirmed if confirmed.trial.plan == plan), None)


def check_plans_directory(config: Config) -> None:
    """Raise ConfigError where no plan file can be written into `config.plans`."""
    directory = Path(config.plans)
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{directory}: cannot write plans: {existing} is not a directory; {_OTHER_PLANS}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory}: cannot write plans: {existing} is read-only; {_OTHER_PLANS}")


def write_plan(
    config: Config, run_dir: Path, device: Device, rules: Rules, best: Trial, *, graph: TrainGraph, loop: str = ""
) -> Path:
    """Write the best plan into the run directory and into `config.plans`, and return the second path.

    `graph` is the captured step, `loop` the training loop that was measured.

    Raises ConfigError where a file cannot be written.
    """
    place = planfile.refer_to_run(run_dir, Path(config.plans))
    file = build_plan_file(config, device, rules, best, run=place, graph=graph, loop=loop)
    record, path = RunDir(run_dir).plan, Path(config.plans) / f"{run_dir.name}.json"
    planfile.write(record, file, remedy=f"free space there, then: {resume_command(run_dir)}")
    planfile.write(path, file, remedy=f"copy it from {record}")
    return path


def build_plan_file(
    config: Config, device: Device, rules: Rules, trial: Trial, *, run: str, graph: TrainGraph, loop: str
) -> planfile.PlanFile:
    """Return the plan file of a trial; `run` is the run directory, relative to the file's.

    It names the device that measured the trial, which may be another one than the session's `device`.
    """
    assert trial.plan is not None
    assert trial.estimate is not None
    return planfile.PlanFile(
        workload=config.ref,
        graph_digest=trial.graph_digest,
        budget=config.budget,
        budget_bytes=rules.budget_bytes,
        floor_bytes=rules.floor_bytes,
        settings=trial.settings,
        plan=config.captured(trial.plan),
        estimate=trial.estimate,
        device=(trial.measurement.device if trial.measurement else None) or device,
        measurement=trial.measurement,
        verified=(trial.measurement.verified if trial.measurement else "") or planfile.NOT_VERIFIED,
        run=run,
        loop=loop,
        target_bytes=trial.target_bytes,
        move=trial.move,
        summary=summarize_graph(graph),
    )


def remove_plan(config: Config, run_dir: Path, trials: Sequence[Trial]) -> None:
    """Delete the files of a plan that failed after it was written; a file of its name with other contents stays.

    They stay where a plan never failed by its records: then the rules are others, and no plan became worse.
    """
    runs = group_runs(trials).values()
    if {Outcome.OK} in [{run.measurement.outcome for run in same if run.measurement is not None} for same in runs]:
        return
    record, path = RunDir(run_dir).plan, Path(config.plans) / f"{run_dir.name}.json"
    if record.exists():
        if path.exists() and path.read_bytes() == record.read_bytes():
            path.unlink()
        record.unlink()


def summarize(
    best: Trial | None,
    rules: Rules,
    prepared: PreparedWorkload,
    trials: Sequence[Trial],
    interrupted: int | None,
    *,
    files: RunDir,
) -> dict[str, Any]:
    """Return the document of `study.json`; `interrupted` is the number of the signal that ended the session, None for an error.

    It counts all trials on record: a resumed session may have dropped some of `trials`.
    """
    return {
        "best": None if best is None else best.number,
        "trials": len(load_trials(files.trials)),
        "budget_bytes": rules.budget_bytes,
        "budget_tolerance": rules.budget_tolerance,
        "charge_spread": estimate_spread(trials),
        "floor_bytes": rules.floor_bytes,
        "baseline_fits": prepared.baseline_fits,
        "capture_error": prepared.capture_error,
        "interrupted": interrupted,
        "disturbed": describe_disturbance(trials),
    }


def describe_disturbance(trials: Sequence[Trial]) -> str:
    """Return the share of measurements that other work disturbed, with one reason; empty if none was disturbed.

    >>> describe_disturbance([])
    ''
    """
    timed = [
        trial.measurement
        for trial in trials
        if trial.measurement is not None and trial.measurement.step_seconds and trial.kind != TrialKind.REPEAT
    ]
    reasons = [measurement.disturbed for measurement in timed if measurement.disturbed]
    return f"{len(reasons)} of {len(timed)} measurements, such as: {reasons[-1]}" if reasons else ""


def prove_infeasible(
    config: Config,
    rules: Rules,
    graph: TrainGraph,
    costs: Costs,
    lowest_bytes: int | None = None,
    *,
    is_recorded: bool = False,
) -> InfeasibleError | None:
    """Return the error for a budget below the lower bound of the peak, with the op that needs it; None where it is above.

    It suggests a budget that the smallest plan keeps; `lowest_bytes` is the peak of that plan where it is known.
    Where a run is recorded, its budget cannot change.
    """
    low, op = peak_lower_bound(graph, costs)
    if low <= rules.budget_bytes:
        return None
    place = f"{graph.ops[op].name} alone, with any recomputation" if op >= 0 else "the start of the step"
    if lowest_bytes is None:
        space = space_for_device(config.planners.model_dump(), costs.device_kind, costs.stores)
        lowest_bytes = find_smallest(graph, costs, space).estimate.peak_bytes
    needed, left = _fmt_apart(low, rules.budget_bytes)
    remedy = _suggest_remedy(config, lowest_bytes, stores=bool(costs.stores), is_recorded=is_recorded)
    return InfeasibleError(
        f"{config.ref} needs {needed} at {place}: no plan fits; {_describe_budget(config, left)}. {remedy}"
    )


def explain_too_small(
    config: Config, rules: Rules, lowest_bytes: int, op: str, *, stores: bool, is_recorded: bool = False
) -> InfeasibleError:
    """Return the error for a budget that no plan fits, with the lowest peak reached and the op that needs it."""
    needed, left = _fmt_apart(lowest_bytes, rules.budget_bytes)
    return InfeasibleError(
        f"{config.ref} needs {needed} at {op or 'the start of the step'} with the smallest plan; "
        f"{_describe_budget(config, left)}. "
        f"{_suggest_remedy(config, lowest_bytes, stores=stores, is_recorded=is_recorded)}"
    )


def explain_no_time(config: Config, run_dir: Path, plan: str = "a plan") -> OutOfTimeError:
    """Return the error for a study whose time was over before `plan` could be measured."""
    return OutOfTimeError(
        f"{config.ref}: the time limit of {config.time} was over before {plan} was measured; "
        f"continue with a longer one: {resume_command(run_dir)} --time {suggest_time(config)}"
    )


def suggest_time(config: Config) -> str:
    """Return a time limit for another try: twice the one that did not suffice, at least ten minutes.

    >>> suggest_time(Config(workload="resnet18", time="20m")), suggest_time(Config(workload="resnet18", time="2m"))
    ('40m', '10m')
    """
    return f"{max(10, math.ceil(2 * config.time_seconds / 60))}m"


def _fmt_apart(needed_bytes: int, budget_bytes: int) -> tuple[str, str]:
    """Return the bytes that are needed and those that a budget leaves as texts: exact bytes where both would read the same."""
    left_bytes = max(budget_bytes, 0)
    needed, left = fmt_bytes(needed_bytes), fmt_bytes(left_bytes)
    return (needed, left) if needed != left else (f"{needed_bytes} B", f"{left_bytes} B")


def _describe_budget(config: Config, left: str) -> str:
    if config.parsed_budget.is_of_process:
        return (
            f"the budget {config.budget} is of the whole process and leaves the step {left}; "
            f"step:{config.budget} is one of the step alone"
        )
    return f"the budget {config.budget} leaves the step {left}"


def _suggest_remedy(config: Config, lowest_bytes: int, *, stores: bool, is_recorded: bool) -> str:
    name = " under another --name" if is_recorded else ""
    budget = f"Raise --budget to step:{math.ceil(BUDGET_ROOM * lowest_bytes / 2**20)}MiB or more{name}"
    store = "host" if config.device == "cuda" else "ssd"
    return budget if stores else f"{budget}, or allow --store {store}=DIR"


def explain_failure(
    config: Config, rules: Rules, trials: Sequence[Trial], lowest: Estimate, run_dir: Path, *, is_late: bool = False
) -> AutotuneError:
    """Return the error that explains why no trial of a study won; `is_late` is true if the study's time is up."""
    planned = [trial for trial in trials if trial.plan is not None]
    results = [trial.measurement for trial in planned if trial.measurement is not None]
    wrong = [result.detail for result in results if result.outcome is Outcome.WRONG_RESULT]
    numerics = (
        NumericsError(f"{config.ref}: no plan passed: {wrong[0]}. See {RunDir(run_dir).trials}") if wrong else None
    )
    if numerics is not None and len(wrong) == sum(trial.was_run for trial in planned):
        return numerics
    killed = [result.detail for result in results if result.was_killed]
    if killed:  # their plans may fit, so nothing is known of the budget
        signal = killed[-1].partition(":")[0]
        return WorkerError(
            f"{config.ref}: the process of a plan was {signal}; continue with: {resume_command(run_dir)}"
        )
    if is_late and not any(trial.kind == TrialKind.PLANNER and trial.was_run for trial in trials):
        return explain_no_time(config, run_dir, "a plan of the planners")  # a smaller one may fit
    charged: dict[Plan, int] = {}
    for trial in trials:
        nbytes = trial.step_charged_bytes
        if trial.plan is not None and nbytes is not None:
            charged[trial.plan] = max(nbytes, charged.get(trial.plan, nbytes))
    if charged and min(charged.values()) > rules.accepted_bytes:
        lowest_bytes, stores = min(charged.values()), bool(config.stores)
        return explain_too_small(config, rules, lowest_bytes, lowest.peak_op, stores=stores, is_recorded=True)
    if numerics is not None:
        return numerics
    # some plan fitted, so the reason is not the budget alone
    failed = [result for result in results if result.outcome.is_failure]
    reason = next((result.detail for result in failed or results if result.detail), "none was run")
    message = f"{config.ref}: no plan ran to its end: {reason}. See {RunDir(run_dir).trials}"
    outcomes = {result.outcome for result in results}
    is_of_the_budget = not failed or outcomes & {Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET}
    if Outcome.DISK_FULL in outcomes and not is_of_the_budget:
        return StoreError(message)
    return InfeasibleError(message) if is_of_the_budget else PlansFailedError(message)
