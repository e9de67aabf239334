"""Start a study or a measurement from a config: directories, child processes, and MLflow as a listener."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.run_name import choose_run_dir
from autotune.errors import ConfigError, DeviceLostError, PlanError, StoreError, StudyInterruptedError, WorkerError
from autotune.fleet.local import open_harness
from autotune.fleet.open_runner import apply_class, open_parallel_devices, open_runner, refuse_fleet
from autotune.records import plan_file as planfile
from autotune.records.config import BATCH_OBJECTIVES, Config, load_config
from autotune.records.device import Device
from autotune.records.json_codec import from_json
from autotune.records.measurement import Measurement
from autotune.records.plan_file import PlanFile, match_plan
from autotune.records.request import keep_stores
from autotune.records.run_dir import RunDir, find_runs_dir, log_command, remove_empty_run, resume_command
from autotune.records.trial import load_trials
from autotune.study.events import Event, Logged, Preparing, Progress, Ready
from autotune.study.interrupts import Interrupts, Stopped, interrupt_on_signals
from autotune.workloads.reference import LIVE_SUFFIX, lies_here

if TYPE_CHECKING:
    from autotune.measure.survey import WorkloadSurvey
    from autotune.report.mlflow_log import Tracker
    from autotune.study.batch.estimate import BatchEstimate
    from autotune.study.outcome import StudyResult
    from autotune.study.runner import Runner
    from autotune.workloads.batch_argument import BatchArgument

# optuna and mlflow are imported by the functions that need them: `autotune --help` must not wait for them


SHARE_SECONDS = 300.0
"""Limit on copying a study to a shared database, which may stop answering at any moment."""


def ignore_note(text: str) -> None:
    """Ignore a line about the progress of a measurement."""
    del text


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """A plan and the baseline, measured interleaved on this machine."""

    file: PlanFile
    measurement: Measurement
    baseline: Measurement


def start_study(config: Config, name: str | None, progress: Progress) -> "StudyResult":
    """Run a config's study in the run directory of that name; a new directory without a record is removed in the end.

    An existing run keeps its stores, and gets the other options.

    Raises ConfigError for a name that is a path, and what `run_study` raises.
    """
    from autotune.study.batch.choice import check_request

    check_request(config)  # before kernels are chosen by measuring
    run_dir = choose_run_dir(config, name)
    is_new, requested_time = name is None or not run_dir.exists(), config.time
    is_named = False
    if (recorded := RunDir(run_dir).config).exists():
        config = keep_stores(config, load_config(str(recorded)))
    try:
        with _explain_interrupt(run_dir, "kernels were chosen"):
            config = choose_kernels(config, run_dir, progress)
        return run_study(choose_batch_size(config, run_dir, progress), run_dir, progress, requested_time)
    except WorkerError:  # its message may name a log in the directory
        is_named = True
        raise
    finally:
        if is_new and run_dir.exists() and not is_named:
            remove_empty_run(run_dir)


def run_study(config: Config, run_dir: Path, progress: Progress, requested_time: str = "") -> "StudyResult":
    """Run a config's study in child processes, log it to MLflow and write its report.

    `requested_time` is that of `autotune.study.session.tune`.

    Raises StudyInterruptedError where a signal came before the budget was known, and what
    `autotune.study.session.tune` raises.
    """
    config = apply_class(config)
    try:
        with open_runner(config, RunDir(run_dir).logs) as runner:
            if (recorded := read_baseline(run_dir)) is not None:
                runner.reuse_baseline(*recorded)
            runner.listen(lambda work: progress(Preparing(work)))
            return run_tracked(config, runner, run_dir, progress, requested_time=requested_time)
    except DeviceLostError as error:
        is_recorded = RunDir(run_dir).trials.exists()
        go_on = f"continue with {resume_command(run_dir)}" if is_recorded else "run the command again"
        raise DeviceLostError(f"{error}, then {go_on}") from None
    except SystemExit as stopped:
        received = int(stopped.code or 130) - 128
        if RunDir(run_dir).trials.exists() or RunDir(run_dir).batch_search.exists():
            raise StudyInterruptedError(f"interrupted; continue with: {resume_command(run_dir)}", received) from None
        message = f"{run_dir}: interrupted before the baseline was measured; nothing is kept"
        raise StudyInterruptedError(message, received) from None


def choose_kernels(config: Config, run_dir: Path, progress: Progress) -> Config:
    """Choose kernels and memory format by measuring on the config's device, where the config leaves them open.

    Where the objective chooses the batch size, they are compared at the size of `config_for_kernels`. A fleet has no
    estimates, so they are compared at the workload's own size there.
    """
    from autotune.ir.plan import Plan
    from autotune.study.batch.choice import config_for_kernels
    from autotune.study.captures import CaptureRunner, choose_capture

    @contextmanager
    def open_combination(combination: Config) -> Iterator[CaptureRunner]:
        with open_runner(combination, RunDir(run_dir).logs) as runner:
            name = combination.captured(Plan(())).capture_name
            runner.listen(lambda work: progress(Preparing(f"{name}: {work}")))
            yield runner

    def notify(text: str) -> None:
        progress(Logged(text, "kernels"))

    def config_of_race(config: Config) -> Config:
        if config.objective not in BATCH_OBJECTIVES or config.on is not None:
            return config
        raced = config_for_kernels(config, estimate_batch_size(config, notify))
        notify(f"comparing kernels on {raced.ref}")
        return raced

    try:
        return choose_capture(config, run_dir, open_combination, notify, config_of_race)
    except DeviceLostError as error:  # no study has begun that could be resumed
        raise DeviceLostError(f"{error}, then run the command again") from None


def choose_batch_size(config: Config, run_dir: Path, progress: Progress) -> Config:
    """Choose the batch size by measuring on the config's device, where the config's objective asks for it.

    Raises StudyInterruptedError where a signal ended the search, whose records are kept.
    """
    from autotune.study.batch.choice import BatchSources, choose_batch
    from autotune.study.captures import CaptureRunner

    @contextmanager
    def open_size(sized: Config) -> Iterator[CaptureRunner]:
        with open_runner(sized, RunDir(run_dir).logs) as runner:
            runner.listen(lambda work: progress(Preparing(work)))
            yield runner

    config = apply_class(config)
    try:
        with _explain_interrupt(run_dir, "a batch size was measured"):
            return choose_batch(config, run_dir, BatchSources(open_size, lambda text: progress(Logged(text, "size"))))
    except DeviceLostError as error:
        is_recorded = RunDir(run_dir).batch_search.exists()
        go_on = f"continue with: {resume_command(run_dir)}" if is_recorded else "run the command again"
        raise DeviceLostError(f"{error}, then {go_on}") from None


@contextmanager
def _explain_interrupt(run_dir: Path, result: str) -> Iterator[None]:
    """Raise StudyInterruptedError where Ctrl-C, SIGTERM or SIGHUP ends a `with` block before its `result`."""
    try:
        with interrupt_on_signals():
            yield
    except KeyboardInterrupt as interrupt:
        message = f"interrupted; continue with: {resume_command(run_dir)}"
        if not RunDir(run_dir).is_recorded and not RunDir(run_dir).batch_search.exists():
            message = f"{run_dir}: interrupted before {result}; nothing is kept"
        received = interrupt.args[0] if interrupt.args else signal.SIGINT
        raise StudyInterruptedError(message, received) from None


def estimate_batch_size(config: Config, notify: Callable[[str], None] = ignore_note) -> "BatchEstimate":
    """Estimate the largest batch size within a config's budget; only a budget in bytes starts a child process.

    The child measures an idle process at a small batch size; `notify` receives a line before that. With `kernels: any`
    the estimate is of eager's kernels.

    Raises ConfigError where no argument of the factory sets the batch size, and CaptureError where the step cannot be captured.
    """
    from autotune.study.batch.estimate import estimate_batch

    refuse_fleet(config, "an estimate")

    notify(f"capturing {config.ref} on fake tensors at a few batch sizes, and planning; nothing is trained")
    if config.kernels == "any":
        config = config.model_copy(update={"kernels": ""})

    def measure_floor(argument: "BatchArgument") -> int:
        small = {**config.arguments, argument.name: argument.size}
        return survey(config.model_copy(update={"arguments": small, "limit": None, "stores": {}}), notify).floor_bytes

    return estimate_batch(config, measure_floor)


def plan_batch_size(config: Config, notify: Callable[[str], None] = ignore_note) -> "tuple[PlanFile, WorkloadSurvey]":
    """Make a plan file for the largest batch size that fits by estimate; return it with the survey of that size.

    Raises ConfigError for the objective `throughput`, which needs measured seconds, and InfeasibleError where no size fits.
    """
    from autotune.study.batch.plan_largest import plan_largest

    if config.objective == "throughput":
        raise ConfigError("objective throughput needs measured seconds; run tune, or plan with --objective batch")
    estimate = estimate_batch_size(config, notify)

    def survey_size(sized: Config) -> "WorkloadSurvey":
        notify(f"planning for {estimate.argument}={sized.arguments[estimate.argument]}")
        return survey(sized, notify)

    return plan_largest(config, estimate, survey_size)


def read_baseline(run_dir: Path) -> tuple[Measurement, Device] | None:
    """Return the baseline that a run recorded and its device; None for a new run, or where either cannot be read."""
    files = RunDir(run_dir)
    try:
        device = from_json(Device, json.loads(files.device.read_text(encoding="utf-8")), where=str(files.device))
        measurement = next((trial.measurement for trial in load_trials(files.trials)), None)
    except (OSError, ValueError, ConfigError):
        return None  # the study reads the trials again, and names what is wrong with them
    if measurement is None:
        return None
    return measurement, measurement.device or device  # the file has the device of the latest session


def run_tracked(
    config: Config,
    runner: "Runner",
    run_dir: Path,
    progress: Progress,
    tracker: "Tracker | None" = None,
    *,
    requested_time: str = "",
) -> "StudyResult":
    """Run a study on a runner; MLflow receives its events as well, and the last events state where the run was logged.

    Nothing is logged of a study that is refused. A signal ends the logging alone: the result names it as `interrupted`.

    `tracker` is the connection to MLflow, by default a new one. `requested_time` is that of `autotune.study.session.tune`.
    """
    from autotune.report.html import write_report
    from autotune.report.mlflow_log import Tracker
    from autotune.study import session as study
    from autotune.study.recorded_run import read_session_end

    tracker = tracker or Tracker(config, run_dir)
    result: StudyResult | None = None
    received: int | None = None
    is_ready, stopped_by = False, 0

    def notify(event: Event) -> None:
        nonlocal is_ready
        is_ready = is_ready or isinstance(event, Ready)
        progress(event)
        tracker(event)

    try:
        with open_parallel_devices(config, runner, RunDir(run_dir).logs) as devices:
            result = study.tune(
                config, runner, run_dir, progress=notify, write_report=write_report, devices=devices,
                requested_time=requested_time,
            )  # fmt: skip
        received = result.interrupted
    except SystemExit as stopped:
        received = int(stopped.code or 130) - 128
        raise
    finally:
        # before that the study may be refused, and the records may be of another study, or of one that another process runs
        if is_ready:
            if RunDir(run_dir).study.exists():  # an error may have ended the search, too
                received = read_session_end(run_dir, len(load_trials(RunDir(run_dir).trials))).get("interrupted")
            stopped_by = _log_end(config, run_dir, progress, tracker, interrupted=received)
            if stopped_by and result is None:  # nothing would be lost, and a night has to end
                signal.raise_signal(stopped_by)
    assert result is not None
    return replace(result, interrupted=result.interrupted or stopped_by)


def _log_end(config: Config, run_dir: Path, progress: Progress, tracker: "Tracker", *, interrupted: int | None) -> int:
    """Log the end of a study and copy its Optuna study; return the number of a signal that ended this, 0 for none.

    The study itself has ended, so a signal must not cost its result. `interrupted` is that of `Tracker.finish`.
    """
    store, remedy = "mlflow", f"{log_command(run_dir)} adds it"
    with Interrupts() as interrupts:
        try:
            with interrupts.breakable(patient=False):
                if message := tracker.finish(interrupted=interrupted):
                    progress(Logged(message))
                if config.optuna_storage is not None and RunDir(run_dir).trials.exists():
                    store, remedy = "optuna", "the next session copies what is missing"
                    progress(Logged(_share_within(SHARE_SECONDS, config.optuna_storage, run_dir), store))
        except Stopped:
            progress(Logged(f"interrupted; {remedy}", store))
    return interrupts.received


def _share_within(seconds: float, address: str, run_dir: Path) -> str:
    """Copy the Optuna study as `share_study` does; a database that stops answering must not keep the study from its end."""
    from autotune.records.tracking_address import mask_secrets
    from autotune.report.tracking.deadline import UnansweredError, call_within
    from autotune.study.shared_study import share_study

    try:
        return call_within(seconds, share_study, address, run_dir)
    except UnansweredError as error:
        return f"not copied to {mask_secrets(address)}: {error}; the next session copies what is missing"


def survey(config: Config, notify: Callable[[str], None] = ignore_note) -> "WorkloadSurvey":
    """Capture a config's step and profile its ops, without running the step; `notify` receives a line before that."""
    refuse_fleet(config, "this command")
    with open_harness(config) as runner:
        notify(f"capturing {config.ref} and profiling its ops; nothing is trained")
        return runner.survey()


def measure_plan(
    path: Path,
    *,
    arguments: Mapping[str, Any],
    stores: Mapping[str, str],
    limit: str | None,
    notify: Callable[[str], None] = ignore_note,
    allow_reference: bool = False,
    from_command_line: bool = False,
) -> PlanMeasurement:
    """Measure a plan file on this machine, interleaved with the baseline; `notify` receives a line before that.

    `arguments` override those that the plan was made with. A plan file names the code that is run; code outside of the zoo
    and the working directory needs `allow_reference`, else ConfigError is raised. `from_command_line` is that of `load_config`.
    Raises StoreError where the plan's store has no directory, and PlanError where the plan belongs to another graph or another
    kind of device.
    """
    file = planfile.read(path)
    if file.workload.reference.endswith(LIVE_SUFFIX):
        raise ConfigError(
            f"{path}: AutoPlan made it for objects of a training process; to measure it, tune a factory for the step"
        )
    if not allow_reference and not lies_here(file.workload.reference):
        raise ConfigError(
            f"{path}: its workload {file.workload} lies outside of {Path.cwd()}, and measuring runs it; "
            "check that code, then add --allow-reference"
        )
    if file.plan.offload and file.plan.store not in stores:
        raise StoreError(f"{path}: the plan offloads to {file.plan.store}; add --store {file.plan.store}=DIR")
    notify(f"{path} names the workload {file.workload}")
    overrides = {
        "arguments": {**file.workload.arguments, **arguments},
        "device": file.device.kind if file.device else None,
        "stores": stores or None,
        "limit": limit,
        "memory_format": file.plan.memory_format or None,
        "loop": file.loop or None,
        "kernels": file.plan.kernels or None,
        "rebuild_price": file.plan.rebuild_price if file.plan.kernels else None,
        "threads": file.plan.threads or None,
    }
    config = load_config(file.workload.reference, overrides=overrides, from_command_line=from_command_line)
    with open_harness(config) as runner:
        notify(f"measuring {config.ref}: the baseline, then the plan")
        try:
            surveyed = runner.survey()
        except ConfigError as error:
            if file.device is None or file.device.kind == "cpu":
                raise
            raise PlanError(f"{path}: made on {file.device.kind}: {error}") from error
        match_plan(path, file, surveyed)
        baseline = runner.baseline()
        return PlanMeasurement(file, runner.measure(file.plan, budget_bytes=file.accepted_bytes), baseline)


def load_run_config(run_dir: Path, overrides: Mapping[str, Any], *, from_command_line: bool = False) -> Config:
    """Return the config that a run recorded, with `overrides`, for the `runs` directory where it lies now.

    `from_command_line` is that of `load_config`.

    Raises ConfigError where no run is recorded.
    """
    from autotune.study.batch.records import read_request

    path, options = RunDir(run_dir).config, {**overrides, "runs": find_runs_dir(run_dir)}
    if path.exists():
        return load_config(str(path), overrides=options, from_command_line=from_command_line)
    request = read_request(run_dir)  # its search for the batch size has not ended
    if request is None:
        raise ConfigError(f"{run_dir}: no run is recorded here; give a directory that autotune tune made")
    return load_config(request, overrides=options, from_command_line=from_command_line)
