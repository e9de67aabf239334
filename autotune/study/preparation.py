"""Run the first two phases of a study: capture and profile the step, then measure the baseline and resolve the budget."""

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import BaselineChangedError, ConfigError
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.survey import PreparedWorkload, explain_eager_failure
from autotune.planners.candidates import DevicePlanning, MakePlanning
from autotune.predict.simulate import simulate
from autotune.records.config import Config, Section, dump_config, load_config
from autotune.records.device import Device
from autotune.records.json_codec import read_optional, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.request import find_difference
from autotune.records.run_dir import RunDir, write_json, write_text
from autotune.records.speed_environment import list_changes
from autotune.records.trial import Trial, TrialKind, append_trial
from autotune.study.batch.records import read_request
from autotune.study.events import Logged, PhaseStarted, Progress, Ready, Resolved, StudyPhase
from autotune.study.interrupts import Interrupts
from autotune.study.optuna_space import check_sampler
from autotune.study.outcome import check_plans_directory
from autotune.study.recorded_run import read_judged_floor
from autotune.study.runner import QueuedRunner, Runner
from autotune.study.seeds import Seeds, read_seeds
from autotune.study.verdicts.ranking import NOTABLE_SHARE, Rules, baseline_step_bytes
from autotune.units import fmt_bytes


@dataclass(frozen=True, slots=True)
class StudyTask:
    """Inputs of one session: config, runner, run directory, listener, signal handlers and planners."""

    config: Config
    runner: Runner
    run_dir: Path
    progress: Progress
    interrupts: Interrupts
    deadline: float
    """End of the study's time, on the monotonic clock."""
    planning: MakePlanning = DevicePlanning
    lasting: bool = True
    """True if the Optuna study is kept on disk."""
    requested_time: str = ""
    """Time that `tune` was called with, to record in the run's config; empty where a run is resumed, whose config stays."""


def check_inputs(task: StudyTask, trials: Sequence[Trial]) -> Seeds | None:
    """Read the seeds, and refuse a config that cannot be carried out, before anything is measured.

    Returns None where the config names no seeds, or where a resumed study measured them already. Recorded seeds of a
    resumed study that cannot be read any more are noted. Raises ConfigError where no plan could be written, where the
    sampler cannot be used, or where other seeds cannot be read.
    """
    config = task.config
    check_plans_directory(config)
    check_sampler(config.sampler, config.objective)
    if config.seed_from is None or _are_seeds_over(trials):
        return None
    try:
        return read_seeds(_locate_seeds(config.seed_from, task.run_dir), Path(config.runs))
    except ConfigError as error:
        earlier = _read_earlier(task.run_dir)
        if not trials or earlier is None or earlier.seed_from != config.seed_from:
            raise
        task.progress(Logged(f"the recorded seeds are left out: {error}", "seeds"))
        return None


def _locate_seeds(seed_from: str, run_dir: Path) -> Path:
    """Return the path of a seed; a plan of this run's search for the batch size moves with the run."""
    recorded, plans = Path(seed_from), RunDir(run_dir).batch_plans
    present = plans / recorded.name
    is_moved = recorded.parent.name == plans.name and not recorded.exists() and present.exists()
    return present if is_moved else recorded


def _read_earlier(run_dir: Path) -> Config | None:
    """Return the config that a run recorded; None for a new run."""
    path = RunDir(run_dir).config
    return load_config(str(path)) if path.exists() else None


def _are_seeds_over(trials: Sequence[Trial]) -> bool:
    """Return whether a study is past its seeds: planners or the sampler have chosen plans already."""
    return any(trial.kind in (TrialKind.PLANNER, TrialKind.SEARCH) for trial in trials)


def wait_for_device(task: StudyTask) -> StudyTask:
    """Wait until the device answers; return the task with a deadline that counts from then on.

    A later wait for the replacement of a lost device ends at that deadline.
    """
    if not isinstance(task.runner, QueuedRunner):
        return task
    with task.interrupts.breakable(patient=False):
        task.runner.wait_for_device()
    deadline = time.monotonic() + task.config.time_seconds
    task.runner.limit_waits(deadline)
    return replace(task, deadline=deadline)


def prepare(task: StudyTask, trials: list[Trial]) -> PreparedWorkload:
    """Capture and profile the step, and write the first records.

    Where `tune` continues a run, its options replace those of the run's config.

    Raises ConfigError where the run directory contains a study whose trials cannot be compared with new ones: with other
    options, of another graph, of another GPU or device of a fleet, or with a store that is gone.
    """
    config, run_dir, files = task.config, task.run_dir, RunDir(task.run_dir)
    earlier = _read_earlier(run_dir)
    if earlier is not None:
        check_request(run_dir, earlier, config)
        if config.seed_from not in (None, earlier.seed_from) and _are_seeds_over(trials):
            unread = f"{config.seed_from} is not read: {run_dir.name} chose its first plans already; tune under another --name"
            task.progress(Logged(unread, "seeds"))
            task = replace(task, config=config.model_copy(update={"seed_from": earlier.seed_from}))
    task.progress(PhaseStarted(StudyPhase.PREPARE))
    with task.interrupts.breakable(patient=False):
        prepared = task.runner.prepare()
    for trial in trials:
        if trial.graph_digest != prepared.graph.digest:
            raise ConfigError(
                f"{run_dir}: contains trials of {trial.workload} with graph {trial.graph_digest[:8]}; {config.ref} is now "
                f"{prepared.graph.digest[:8]}; tune under another --name"
            )
    is_on_fleet = earlier is not None and (config.on is not None or earlier.on is not None)
    if is_on_fleet or prepared.device.kind == "cuda":
        check_device(run_dir, trials, prepared.device)
    check_stores(run_dir, trials, prepared.costs)
    if changes := _list_device_changes(find_recorded_device(run_dir, trials), prepared.device):
        advice = f"to keep their times apart, tune under another --name with --seed-from {shlex.quote(str(run_dir))}"
        task.progress(Logged(f"the earlier trials ran with other settings: {'; '.join(changes)}; {advice}", "device"))
    write_json(files.graph, to_json(prepared.graph))
    write_json(files.costs, to_json(prepared.costs))
    write_json(files.device, to_json(prepared.device))
    if earlier is None or task.requested_time:
        write_text(files.config, dump_config(config_to_record(task)))
    elif config.tracking_uri not in (None, earlier.tracking_uri):  # `report --log` uses the recorded one
        write_text(files.config, dump_config(earlier.model_copy(update={"tracking_uri": config.tracking_uri})))
    task.progress(Ready(prepared.graph, prepared.costs, prepared.device))
    return prepared


def config_to_record(task: StudyTask) -> Config:
    """Return the config of a run, with the time that was asked for: a search for the batch size uses a part of it."""
    request = read_request(task.run_dir)
    requested_time = task.requested_time or (task.config if request is None else request).time
    return task.config.model_copy(update={"time": requested_time})


def check_request(run_dir: Path, earlier: Config, config: Config) -> None:
    """Raise ConfigError where a run was recorded with other options than a config has; stores may be added.

    The workload's path may differ: its graph is compared. On a fleet, a class sets `device`, `limit` and `stores`.
    """
    allowed = earlier.model_copy(update={"stores": {**config.stores, **earlier.stores}})
    free = ("workload", "device", "limit", "stores") if config.on or earlier.on else ("workload",)
    key = find_difference(config, allowed.model_dump(mode="json"), free=free)
    if key:
        recorded, requested = (_describe_value(getattr(each, key)) for each in (earlier, config))
        raise ConfigError(
            f"{run_dir}: contains a study for {key} {recorded}, not {requested}; tune under another --name"
        )


def _describe_value(value: object) -> str:
    named = value.model_dump(exclude_none=True) if isinstance(value, Section) else value
    return "none" if named in ("", None, {}) else str(named)


def check_device(run_dir: Path, trials: Sequence[Trial], device: Device) -> None:
    """Raise ConfigError where the trials of a run were measured on another chip, or with other cores.

    Only GPUs and runs on a fleet are checked: the same class may lead to another device. Elsewhere a virtual CPU may change
    its name when its machine restarts; a note names the change.
    """
    recorded = find_recorded_device(run_dir, trials)
    if recorded is None or recorded.key == device.key:
        return
    raise ConfigError(
        f"{run_dir}: its trials ran on {recorded.silicon} ({recorded.cores} cores), this device is {device.silicon} "
        f"({device.cores} cores); resume on the former, or tune under another --name with --seed-from {shlex.quote(str(run_dir))}"
    )


def check_stores(run_dir: Path, trials: Sequence[Trial], costs: Costs) -> None:
    """Raise ConfigError where recorded plans offload to a store that the device lacks: they cannot be simulated.

    Another class of a fleet may have other stores.
    """
    used = {trial.plan.store for trial in trials if trial.plan is not None and trial.plan.offload}
    if missing := sorted(used - set(costs.stores)):
        present = ", ".join(costs.stores) or "none"
        raise ConfigError(
            f"{run_dir}: its plans offload to {', '.join(missing)}, the stores of this device are {present}; "
            "resume on a class with that store, or tune under another --name"
        )


def _list_device_changes(recorded: Device | None, present: Device) -> list[str]:
    """Return the differences that change how fast a step runs; empty without a recorded device."""
    if recorded is None:
        return []
    titles = {"device": recorded.title}, {"device": present.title}
    renamed = [] if recorded.key == present.key else list_changes(*titles)
    versions = {"torch": recorded.torch}, {"torch": present.torch}
    return [*renamed, *list_changes(*versions), *list_changes(recorded.environment, present.environment)]


def find_recorded_device(run_dir: Path, trials: Sequence[Trial]) -> Device | None:
    """Return the device that measured the trials; None where no trial is recorded, or no record names the device."""
    for trial in trials:
        if trial.measurement is not None and trial.measurement.device is not None:
            return trial.measurement.device
    if not trials:
        return None
    # baselines of earlier versions name no device; a damaged file is written again
    with contextlib.suppress(ConfigError):
        return read_optional(Device, RunDir(run_dir).device, remedy="resume the study to write it again")
    return None


def resolve(task: StudyTask, prepared: PreparedWorkload, trials: list[Trial]) -> Rules:
    """Measure plain eager as trial 0, unless `trials` contains it, and return the rules with the budget in bytes.

    Raises BaselineChangedError where plain eager fitted when the trials were recorded and does not now, or the other way round.
    """
    config, floor_bytes = task.config, _choose_floor(task, prepared, trials)
    if trials:
        check_baseline(task.run_dir, trials[0], prepared)
    task.progress(PhaseStarted(StudyPhase.BASELINE))
    if not trials:
        trial = Trial(0, TrialKind.BASELINE, str(config.ref), prepared.graph.digest, started=time.time())
        result = Measurement(Outcome.OUT_OF_MEMORY, "the plain step does not fit", device=prepared.device)
        if prepared.baseline_fits:
            with task.interrupts.breakable(patient=False):
                result = replace(task.runner.baseline(), device=prepared.device)
        if result.outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY):
            raise explain_eager_failure(config.ref, result)
        append_trial(RunDir(task.run_dir).trials, replace(trial, measurement=result))
        trials.append(replace(trial, measurement=result))
    first = trials[0].measurement or Measurement(Outcome.OUT_OF_MEMORY)
    traced = simulate(prepared.graph, lower(prepared.graph, Plan.traced(prepared.graph)), prepared.costs)
    baseline_bytes = reference_step_bytes(first, traced.peak_bytes)
    budget_bytes = config.parsed_budget.step_bytes(floor_bytes=floor_bytes, baseline_step_bytes=baseline_bytes)
    plain = first.median_seconds
    task.progress(Resolved(budget_bytes, floor_bytes, traced.seconds / plain if plain else None))
    return Rules(budget_bytes, floor_bytes, prepared.tolerance, traced.seconds, config.parsed_budget.tolerance)


def _choose_floor(task: StudyTask, prepared: PreparedWorkload, trials: Sequence[Trial]) -> int:
    """Return the bytes of the idle process, by which a budget of the whole process is reduced.

    They are those of the first session, which its plans were judged with: with others a recorded winner might not fit.
    A note names a notable difference.
    """
    budget = task.config.parsed_budget
    recorded = read_judged_floor(task.run_dir) if trials else None
    if recorded is None or budget.nbytes is None:
        return prepared.floor_bytes
    if abs(prepared.floor_bytes - recorded) > NOTABLE_SHARE * budget.nbytes:
        floors = f"takes {fmt_bytes(prepared.floor_bytes)} now, {fmt_bytes(recorded)} when earlier plans were judged"
        step = f"the step keeps {fmt_bytes(max(budget.nbytes - recorded, 0))} of {budget.text}, as for these"
        advice = "to divide the budget again, tune under another --name"
        task.progress(Logged(f"the idle process {floors}; {step}; {advice}", "device"))
    return recorded


def note_other_meter(trial: Trial, trials: Sequence[Trial], progress: Progress) -> None:
    """Report a trial whose bytes were measured by another meter than those of all earlier `trials`."""
    new, earlier = _list_meters([trial]), _list_meters(trials)
    if earlier and new - earlier:
        meters = f"by {', '.join(sorted(new))}, those of earlier plans by {', '.join(sorted(earlier))}"
        advice = "they may differ by more than the plans do; tune under another --name"
        progress(Logged(f"the bytes of trial {trial.number} were measured {meters}; {advice}", "device"))


def _list_meters(trials: Sequence[Trial]) -> set[str]:
    """Return the meters of plans whose steps were timed: the others have the meter of their peak, not of the charge."""
    results = [trial.measurement for trial in trials if trial.plan is not None and trial.measurement is not None]
    return {result.meter for result in results if result.step_seconds and result.meter}


def check_baseline(run_dir: Path, baseline: Trial, prepared: PreparedWorkload) -> None:
    """Raise BaselineChangedError where plain eager fits now but did not in the recorded trials, or the other way round.

    Times of plans are ratios to eager's where it fits, and else ratios to a prediction: they cannot be compared.
    """
    fitted = baseline.measurement is not None and baseline.measurement.outcome is Outcome.OK
    if fitted == prepared.baseline_fits:
        return
    change = "fitted in memory, now it does not" if fitted else "did not fit in memory, now it does"
    remedy = "free memory, or tune under another --name" if fitted else "tune under another --name"
    raise BaselineChangedError(f"{run_dir}: plain eager {change}, so times cannot be compared; {remedy}")


def reference_step_bytes(baseline: Measurement | None, traced_bytes: int) -> int:
    """Return the bytes that a budget in percent refers to: eager's peak, or the traced step's where eager did not fit."""
    fits = baseline is not None and baseline.outcome is not Outcome.OUT_OF_MEMORY
    measured = baseline_step_bytes(baseline) if fits and baseline is not None else None
    return traced_bytes if measured is None else measured
