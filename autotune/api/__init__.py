"""The public functions of autotune, for notebooks, schedulers and the command line.

`import autotune` exports them: `tune`, `resume`, `plan`, `estimate`, `estimate_batch`, `load_plan` and `load_run`.

In: a workload by name, by file or as a function, and a budget.
Out: plans, estimates and recorded runs.
Read first: this file.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.file_place import check_out
from autotune.api.launch import (
    choose_batch_size,
    estimate_batch_size,
    load_run_config,
    plan_batch_size,
    run_study,
    start_study,
    survey,
)
from autotune.errors import ConfigError
from autotune.records import plan_file as planfile
from autotune.records.config import BATCH_OBJECTIVES, Config, load_config
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import with_name
from autotune.study.events import Progress, ignore_event
from autotune.workloads.loop import Loop

if TYPE_CHECKING:
    from autotune.study.batch.estimate import BatchEstimate
    from autotune.study.offline.memory_estimate import MemoryEstimate
    from autotune.study.outcome import StudyResult
    from autotune.study.recorded_run import RecordedRun

# torch, optuna and mlflow are imported by the functions that need them: `autotune --help` must not wait for them

WorkloadSource = str | Path | Config | Callable[..., Any]
"""A zoo name, `file.py:factory`, `package.module:factory`, a config file, a `Config`, or a factory function."""
_WORKER = "autotune.measure.worker.main"


def tune(
    workload: WorkloadSource,
    *,
    budget: str | int | None = None,
    time: str | float | None = None,
    trials: int | None = None,
    stores: Mapping[str, str | Path] | None = None,
    arguments: Mapping[str, Any] | None = None,
    device: str | None = None,
    planners: Mapping[str, Sequence[str]] | None = None,
    objective: str | None = None,
    batch_argument: str | None = None,
    micro_batches: str | None = None,
    limit: str | int | None = None,
    loop: str | Loop | None = None,
    memory_format: str | None = None,
    kernels: str | None = None,
    threads: int | None = None,
    exact: bool | None = None,
    seed_from: str | Path | None = None,
    tracking_uri: str | None = None,
    runs: str | Path | None = None,
    plans: str | Path | None = None,
    name: str | None = None,
    progress: Progress = ignore_event,
) -> "StudyResult":
    """Search for the fastest plan of a training step within a memory budget, and measure it in child processes.

    Options that are None keep the value of the config, or its default. Relative paths start at the working directory.

    Args:
        workload: Zoo name, `file.py:factory`, `package.module:factory`, config file, `Config`, or factory function, which child processes import by its name.
        budget: Bytes of the process (6 * 2**30 or "6GiB") or of the step ("step:6GiB"), or a share of the baseline's step bytes ("65%").
        time: Time limit of the search in seconds, or as "10m". No trial begins after it; capture, baseline and the running
            trial end first.
        trials: Maximum number of trials.
        stores: Directories for offloaded bytes, by the name of the store: "ssd", "ramdisk" or "host".
        arguments: Arguments of the factory.
        device: "cpu" or "cuda".
        planners: Names of the planners to choose from, by kind of decision.
        objective: "time"; "pareto" to search plans for all budgets up to `budget`: the result's `front` has the verified
            points, and `front_paths` their plan files; "batch" for the largest batch that fits; "throughput" for the most
            samples per second. The last two choose the batch size first.
        batch_argument: Argument of the factory that sets the batch size; by default the first usual name that it takes.
        micro_batches: "never" or "always" to try micro-batches for "throughput"; by default only without batch norm.
        limit: Memory limit in bytes, or as "900MiB", enforced on every process that runs the step.
        loop: What the training loop does before the update, as a `Loop` or as text: "clip,accumulate=4".
        memory_format: "channels_last" to run plans of a convolution net in that format.
        kernels: "inductor" to run plans on compiled regions, whose results differ from eager's by rounding; "any" to
            measure both, in each memory format, then fewer threads, and tune the fastest.
        threads: Number of threads that torch's CPU ops use during a step; 0, the default, for those that the process has.
        exact: True to accept eager's bits only: refuse other kernels, memory format or threads, and a step that rounds differently.
        seed_from: Run directory or plan file. Its fastest settings are measured after the smallest plan. The samplers `gp` and `tpe`
            also read its trials, moves excepted; the objective "pareto" does not.
        tracking_uri: MLflow tracking server or database; by default `$MLFLOW_TRACKING_URI`, else a SQLite file in `runs`.
        runs: Directory of all runs.
        plans: Directory of the finished plans.
        name: Name of the run's directory in `runs`; a run of that name is continued.
        progress: Function that receives every event of the study, between measurements.

    Returns:
        The best plan, its paths and its re-measured time ratio, the baseline and all trials; for "pareto" the front, too.

    Raises:
        ConfigError: An option, the workload or a file cannot be used.
        CaptureError: The training step cannot be captured as one graph.
        InfeasibleError: No plan fits the budget.
        NumericsError: No plan gives the results of the reference.
        OutOfTimeError: The time limit ended before a plan was measured; or PlansFailedError: every plan crashed or hung.
        WorkerError: A measuring process was killed from outside.
        LockedError: Another process works in the run directory.
        StoreError: A directory of a store is missing, read-only or full.
        DeviceLostError: No device of a class is left.
        StudyInterruptedError: A signal came before the baseline was measured.

    Examples:
        >>> import autotune
        >>> result = autotune.tune("tiny.py:make", budget="90%", trials=4, time="2m", name="first")
        >>> str(result.run_dir), result.best.measurement.outcome.value
        ('runs/first', 'ok')
        >>> result.plan == autotune.load_plan("plans/first.json")
        True
    """
    _refuse_worker()
    config = _resolve_config(
        workload, budget=_with_unit(budget, "B"), time=_with_unit(time, "s"), trials=trials, stores=stores,
        arguments=arguments, device=device, planners=planners, objective=objective, batch_argument=batch_argument,
        micro_batches=micro_batches, limit=_with_unit(limit, "B"), loop=loop, memory_format=memory_format, kernels=kernels,
        threads=threads, exact=exact, seed_from=seed_from, tracking_uri=tracking_uri, runs=runs, plans=plans,
    )  # fmt: skip
    return start_study(config, name, progress)


def resume(
    run_dir: str | Path,
    *,
    time: str | float | None = None,
    trials: int | None = None,
    tracking_uri: str | None = None,
    progress: Progress = ignore_event,
) -> "StudyResult":
    """Continue a recorded run with its own config, in the directory where it lies now.

    Args:
        run_dir: Directory that `tune` made.
        time: Time limit of this session in seconds, or as "10m".
        trials: Maximum number of trials of the whole run.
        tracking_uri: MLflow tracking server or database.
        progress: Function that receives every event of the study, between measurements.

    Returns:
        The result of the whole run, as from `tune`.

    Raises:
        ConfigError: The directory has no recorded run, or the workload has changed since.
        CaptureError: The training step cannot be captured as one graph.
        InfeasibleError: No plan fits the budget.
        NumericsError: No plan gives the results of the reference.
        OutOfTimeError: The time limit ended before a plan was measured; or PlansFailedError: every plan crashed or hung.
        WorkerError: A measuring process was killed from outside.
        LockedError: Another process works in the run directory.
        StoreError: A directory of a store is missing, read-only or full.
        DeviceLostError: No device of a class is left.
        StudyInterruptedError: A signal came before the baseline was measured.

    Examples:
        >>> import autotune
        >>> first = autotune.tune("tiny.py:make", budget="90%", trials=4, name="second")
        >>> len(autotune.resume("runs/second", trials=6).trials) >= len(first.trials)
        True
    """
    _refuse_worker()
    limits = {"time": _with_unit(time, "s"), "trials": trials, "tracking_uri": tracking_uri}
    directory = with_name(Path(run_dir))
    config = choose_batch_size(load_run_config(directory, limits), directory, progress)
    return run_study(config, directory, progress)


def plan(
    workload: WorkloadSource,
    *,
    budget: str | int | None = None,
    stores: Mapping[str, str | Path] | None = None,
    arguments: Mapping[str, Any] | None = None,
    device: str | None = None,
    planners: Mapping[str, Sequence[str]] | None = None,
    objective: str | None = None,
    batch_argument: str | None = None,
    loop: str | Loop | None = None,
    memory_format: str | None = None,
    kernels: str | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
) -> PlanFile:
    """Make one plan for a budget from estimates alone: ops are profiled one by one, and the step never runs.

    Args:
        workload: Training step, as in `tune`.
        budget: Bytes of the process (6 * 2**30 or "6GiB") or of the step ("step:6GiB"), or a share of the traced step's bytes ("65%").
        stores: Directories for offloaded bytes, by the name of the store.
        arguments: Arguments of the factory.
        device: "cpu" or "cuda".
        planners: Names of the planners to choose from, by kind of decision.
        objective: "batch" to plan for the largest batch size that fits by estimate; it goes into the plan's workload.
        batch_argument: Argument of the factory that sets the batch size; by default the first usual name that it takes.
        loop: What the training loop does before the update, as a `Loop` or as text: "clip,accumulate=4".
        memory_format: "channels_last" to plan for that format.
        kernels: "inductor" to plan for compiled regions.
        threads: Number of threads that torch's CPU ops use during a step; 0, the default, for those that the process has.
        out: File for the plan; none is written by default.

    Returns:
        The plan with its estimate and provenance, not verified.

    Raises:
        ConfigError: An option, the workload or a file cannot be used.
        CaptureError: The training step cannot be captured as one graph.
        InfeasibleError: No plan fits the budget.
        StoreError: A directory of a store is missing or read-only; or WorkerError: the capturing process was killed from outside.

    Examples:
        >>> import autotune
        >>> file = autotune.plan("tiny.py:make", budget="90%", out="tiny.json")
        >>> file.estimate.peak_bytes <= file.budget_bytes
        True
        >>> file.verified
        'not verified'
    """
    from autotune.study.plan_by_estimate import make_plan_file, refuse_front

    _refuse_worker()
    config = _resolve_config(
        workload, budget=_with_unit(budget, "B"), stores=stores, arguments=arguments, device=device, planners=planners,
        objective=objective, batch_argument=batch_argument, loop=loop, memory_format=memory_format, kernels=kernels,
        threads=threads,
    )  # fmt: skip
    refuse_front(config)
    check_out(out)
    is_sized = config.objective in BATCH_OBJECTIVES
    file = plan_batch_size(config)[0] if is_sized else make_plan_file(config, survey(config))
    if out is not None:
        planfile.write(Path(out), file, remedy="name another file by out=")
    return file


def estimate(
    workload: WorkloadSource,
    *,
    arguments: Mapping[str, Any] | None = None,
    planners: Mapping[str, Sequence[str]] | None = None,
    loop: str | Loop | None = None,
) -> "MemoryEstimate":
    """Count the bytes of a training step on fake tensors: no weight is allocated and nothing is trained.

    The step is captured for the CPU, in this process. Costs of its ops are modelled, so only bytes are returned.

    Args:
        workload: Training step, as in `tune`.
        arguments: Arguments of the factory.
        planners: Names of the planners to choose from for the smallest plan, by kind of decision.
        loop: What the training loop does before the update, as a `Loop` or as text: "clip,accumulate=4".

    Returns:
        Peak bytes of plain eager, of the captured step and of the smallest plan; each field documents what it counts.

    Raises:
        ConfigError: The workload cannot be made, or its eager step cannot run on fake tensors.
        CaptureError: The training step cannot be captured as one graph.

    Examples:
        >>> import autotune
        >>> counted = autotune.estimate("tiny.py:make", arguments={"rows": 1024})
        >>> counted.lower_bound_bytes <= counted.lowest_bytes < counted.traced_bytes
        True
    """
    from autotune.study.offline.memory_estimate import estimate_memory

    return estimate_memory(_resolve_config(workload, arguments=arguments, planners=planners, loop=loop))


def estimate_batch(
    workload: WorkloadSource,
    *,
    budget: str | int | None = None,
    batch_argument: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    planners: Mapping[str, Sequence[str]] | None = None,
    loop: str | Loop | None = None,
) -> "BatchEstimate":
    """Estimate the largest batch size that fits a memory budget: for plain eager, and for the smallest plan.

    The step is captured on fake tensors at a few sizes. Nothing is trained. For a budget in bytes of the process, one
    child process measures the bytes of an idle process first.

    Args:
        workload: Training step, as in `tune`.
        budget: Bytes of the process (6 * 2**30 or "6GiB") or of the step ("step:6GiB"), or a share of eager's peak at the workload's own batch ("65%").
        batch_argument: Argument of the factory that sets the batch size; by default the first usual name that it takes.
        arguments: Arguments of the factory.
        planners: Names of the planners to choose from for the smallest plan, by kind of decision.
        loop: What the training loop does before the update, as a `Loop` or as text: "clip,accumulate=4".

    Returns:
        Largest batch sizes and their bytes; each field documents what it counts.

    Raises:
        ConfigError: No argument of the factory sets the batch size, or the workload cannot be made.
        CaptureError: The training step cannot be captured as one graph.
        WorkerError: The process that measures an idle process was killed from outside.

    Examples:
        >>> import autotune
        >>> answer = autotune.estimate_batch("tiny.py:make", budget="90%", batch_argument="rows")
        >>> answer.largest > answer.eager_largest
        True
    """
    _refuse_worker()
    config = _resolve_config(
        workload, budget=_with_unit(budget, "B"), batch_argument=batch_argument, arguments=arguments, planners=planners,
        loop=loop,
    )  # fmt: skip
    return estimate_batch_size(config)


def load_plan(path: str | Path) -> PlanFile:
    """Read a plan file with its provenance.

    Args:
        path: File that `tune` or `plan` wrote.

    Returns:
        The plan, its estimate, and its measurement if it has one.

    Raises:
        ConfigError: The file is missing, or is not a plan file.

    Examples:
        >>> import autotune
        >>> file = autotune.plan("tiny.py:make", budget="90%", out="small.json")
        >>> autotune.load_plan("small.json") == file
        True
    """
    return planfile.read(Path(path))


def load_run(directory: str | Path) -> "RecordedRun":
    """Read what a run recorded; runs of earlier versions stay readable.

    Args:
        directory: Directory that `tune` made.

    Returns:
        Config, baseline, trials, best and re-measured plans, and the path of the plan. Attributes that the run had not
        written yet are None.

    Raises:
        ConfigError: The directory has no recorded run, or a file in it is damaged.

    Examples:
        >>> import autotune
        >>> result = autotune.tune("tiny.py:make", budget="90%", trials=4, name="third")
        >>> run = autotune.load_run("runs/third")
        >>> run.config["budget"], run.best.number == result.best.number, str(run.plan_path)
        ('90%', True, 'runs/third/plan.json')
    """
    from autotune.study.recorded_run import RecordedRun

    return RecordedRun.load(Path(directory))


def _resolve_config(workload: WorkloadSource, **fields: Any) -> Config:
    """Return the config of a workload with all fields that are not None laid over it."""
    overrides: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    for key in ("seed_from", "runs", "plans", "loop"):
        if key in overrides:
            overrides[key] = str(overrides[key])
    if "stores" in overrides:
        overrides["stores"] = {store: str(directory) for store, directory in overrides["stores"].items()}
    if "planners" in overrides:
        overrides["planners"] = {kind: list(names) for kind, names in overrides["planners"].items()}
    return load_config(str(workload) if isinstance(workload, Path) else workload, overrides=overrides)


def _with_unit(value: str | float | None, unit: str) -> str | None:
    return f"{value}{unit}" if isinstance(value, (int, float)) else value


def _refuse_worker() -> None:
    """Raise ConfigError in a child process, which imports a script to call its factory and would start a study of its own."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == _WORKER:
        raise ConfigError(
            "the file calls autotune while a child process imports it for its factory; "
            "put the call under: if __name__ == '__main__':"
        )
