"""Choose the batch size of a study by measurement: the largest that fits, or the one with the most samples per second."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, ConfigError, InfeasibleError, OutOfTimeError
from autotune.records.budget import format_step_budget
from autotune.records.config import BATCH_OBJECTIVES, Config, load_config
from autotune.records.request import find_difference
from autotune.records.run_dir import RunDir, lock_run_dir, resume_command
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.batch.measurements import SizeMeasurer, config_at_size, plan_path
from autotune.study.batch.race import CaptureSteps, SizeRace
from autotune.study.batch.records import BatchSearch, StepSize, read_batch_search
from autotune.study.batch.sized_steps import SizedSteps, capture_sizes
from autotune.study.captures import OpenRunner
from autotune.study.optuna_space import check_sampler
from autotune.study.outcome import check_plans_directory, suggest_time
from autotune.study.seeds import read_seeds
from autotune.workloads.batch_argument import BatchArgument, find_batch_argument
from autotune.workloads.loop import Loop

SEARCH_SHARE = 0.6
"""Share of the study's time after which no other batch size is measured; the rest is for the study of the chosen one."""
STUDY_SHARE = 0.25
"""Least share of the time for the study of the chosen batch size."""
STUDY_FACTOR = 3
"""Minimum time of the study, as a multiple of the time that the search measured its batch size.

That time contains capture, eager and one plan."""
KERNELS_SHARE, KERNELS_FACTOR = 0.75, 4
"""Batch size at which kernels are compared: share of eager's largest by estimate, and greatest multiple of the workload's own."""
KERNELS_SAMPLES = 16
"""Least number of timed steps of one combination of kernels and memory format: no later measurement corrects the choice."""


@dataclass(frozen=True, slots=True)
class BatchSources:
    """Sources of a search: runners, captures of the workload, and a listener."""

    open_runner: OpenRunner
    """Opens the runner of a config."""
    notify: Callable[[str], None]
    """Receives a line for each size."""
    capture: CaptureSteps = capture_sizes
    """Captures the workload at a few sizes."""
    find_argument: Callable[[str, Mapping[str, Any], str | None], BatchArgument] = find_batch_argument
    """Finds the argument that sets the batch size."""


def choose_batch(config: Config, run_dir: Path, sources: BatchSources) -> Config:
    """Return the config of an ordinary study of the chosen batch size, with the budget in bytes as its enforced limit.

    A config with another objective is returned as it is. Every measured size is written to the run directory as it ends, and
    is not measured again when the run is continued.

    Args:
        config: The config; its time counts for the search and the study together.
        run_dir: Directory of the run.
        sources: Runners, captures and a listener.

    Raises:
        ConfigError: No argument sets the batch size, or the run directory contains another search, one of another graph or
            device, or a run of another objective.
        CaptureError: The workload's step cannot be captured.
        InfeasibleError: No batch size fits the budget.
    """
    study = RunDir(run_dir).config
    if config.objective not in BATCH_OBJECTIVES:
        if not study.exists() and (search := read_batch_search(run_dir)) is not None:
            _refuse_other_request(config, search, run_dir)
        return config
    began = time.monotonic()
    config = _leave_out_missing_seeds(config, run_dir, sources.notify)
    check_request(config)
    with lock_run_dir(run_dir):
        search = read_batch_search(run_dir)
        if search is not None:
            _refuse_other_request(config, search, run_dir)
        elif study.exists():
            raise ConfigError(
                f"{run_dir}: contains a study with objective {load_config(str(study)).objective!r}, not {config.objective!r}; "
                "tune under another --name"
            )
        if search is None or search.chosen is None:
            search = _run_search(config, run_dir, sources, search, began)
    assert search.chosen is not None
    sources.notify(f"tuning {search.argument}={search.chosen}")
    for note in search.notes:
        sources.notify(f"note: {note}")
    return _config_of_study(config, search, run_dir, time.monotonic() - began)


def check_request(config: Config) -> None:
    """Raise ConfigError for a batch size search whose study would be refused."""
    if config.objective not in BATCH_OBJECTIVES:
        return
    check_plans_directory(config)
    check_sampler(config.sampler, objective="time")  # of the study of the chosen size
    if config.seed_from is not None:
        read_seeds(Path(config.seed_from), Path(config.runs))


def _leave_out_missing_seeds(config: Config, run_dir: Path, notify: Callable[[str], None]) -> Config:
    """Return the config without the seeds that its search recorded, where they cannot be read any more.

    A note names the reason.
    """
    search = read_batch_search(run_dir)
    if search is None or config.seed_from is None or search.config.get("seed_from") != config.seed_from:
        return config
    try:
        read_seeds(Path(config.seed_from), Path(config.runs))
    except ConfigError as error:
        notify(f"the recorded seeds are left out: {error}")
        return config.model_copy(update={"seed_from": None})
    return config


def config_for_kernels(config: Config, estimate: BatchEstimate) -> Config:
    """Return the config at the batch size at which kernels are compared, with a budget that is the same for all sizes.

    The size is `KERNELS_SHARE` of eager's largest by estimate, at least the workload's own, and at most `KERNELS_FACTOR` times
    that. At a small batch the time to start kernels would hide how they differ. Where the workload refuses sizes, it is a
    multiple of the workload's own.
    """
    size = min(int(KERNELS_SHARE * estimate.eager_largest), KERNELS_FACTOR * estimate.size)
    if estimate.refused:
        size -= size % estimate.size
    budget = config.budget if config.parsed_budget.share is None else format_step_budget(estimate.budget_bytes)
    arguments = {**config.arguments, estimate.argument: max(size, estimate.size)}
    samples = max(config.samples, KERNELS_SAMPLES)
    return config.model_copy(update={"arguments": arguments, "budget": budget, "objective": "time", "samples": samples})


def _refuse_other_request(config: Config, search: BatchSearch, run_dir: Path) -> None:
    """Raise ConfigError where a run directory contains the search of another config; limits of time may differ."""
    key = find_difference(config, search.config)
    if key:
        recorded, requested = search.config.get(key), getattr(config, key, None)
        raise ConfigError(
            f"{run_dir}: contains a search for the batch size with {key} {recorded!r}, not {requested!r}; "
            "tune under another --name"
        )


def _config_of_study(config: Config, search: BatchSearch, run_dir: Path, elapsed_seconds: float) -> Config:
    assert search.chosen is not None
    measured = search.find(search.chosen)
    least = max(STUDY_SHARE * config.time_seconds, STUDY_FACTOR * (measured.seconds if measured is not None else 0.0))
    left = max(config.time_seconds - elapsed_seconds, least)
    loop = Loop.parse(search.loop)
    chosen = config_at_size(
        config, search.argument, search.chosen, loop, budget=search.budget, limit_bytes=search.limit_bytes
    )
    if (recorded := RunDir(run_dir).config).exists():  # a study that goes on keeps its budget
        earlier = load_config(str(recorded))
        kept = {"budget": earlier.budget, "limit": earlier.limit, "seed_from": config.seed_from or earlier.seed_from}
        chosen = chosen.model_copy(update=kept)
    seed = plan_path(run_dir, search.chosen)
    if config.seed_from is None and seed.exists() and not RunDir(run_dir).trials.exists():
        chosen = chosen.model_copy(update={"seed_from": str(seed)})
    return chosen.model_copy(update={"time": f"{left:.0f}s"})


def _run_search(
    config: Config, run_dir: Path, sources: BatchSources, search: BatchSearch | None, began: float
) -> BatchSearch:
    """Measure until a size is chosen, and return the search with the choice."""
    argument = sources.find_argument(config.workload, config.arguments, config.batch_argument)
    sources.notify(f"capturing {config.ref} at a few values of {argument.name}, on fake tensors")
    steps = sources.capture(config, argument.name, argument.size)
    if search is None:
        start = StepSize(argument.size, steps.loop.accumulate)
        described = config.model_dump(mode="json"), argument.name, start, str(steps.loop)
        search = BatchSearch(config.objective, *described, graph_digest=steps.digest)
    elif search.graph_digest not in ("", steps.digest):
        raise ConfigError(
            f"{run_dir}: contains batch sizes of {config.ref} with graph {search.graph_digest[:8]}, which is now "
            f"{steps.digest[:8]}, as the model or torch has changed; tune under another --name"
        )
    race = SizeRace(
        config=config,
        run_dir=run_dir,
        steps=steps,
        measurer=SizeMeasurer(config, argument.name, steps.loop, run_dir, sources.open_runner),
        search=search,
        notify=sources.notify,
        deadline=began + SEARCH_SHARE * config.time_seconds,
        capture=sources.capture,
    )
    race.measure_start(argument)
    chosen = race.find_largest() if config.objective == "batch" else race.find_fastest()
    if chosen is None:
        raise _explain_no_size(config, race, run_dir)
    notes = describe_consequences(config, race.search, steps, chosen)
    if race.unfinished:
        notes = (race.unfinished, *notes)
    unit = max(race.search.unit, steps.unit)
    race.record(replace(race.search, chosen=chosen, notes=notes, unit=unit))
    return race.search


def describe_consequences(config: Config, search: BatchSearch, steps: SizedSteps, chosen: StepSize) -> tuple[str, ...]:
    """Return a sentence for each consequence of a chosen size for the training."""
    start, notes = search.start, []
    if chosen.samples != start.samples:
        notes.append(
            f"an update uses {chosen.samples} samples instead of {start.samples}: training dynamics change; choose the learning "
            "rate again"
        )
    if chosen.accumulate not in (1, start.accumulate):
        notes.append(
            f"the gradients of {chosen.accumulate} micro-batches are summed: divide a mean loss by {chosen.accumulate}"
        )
    if steps.normalizes_over_batch:
        if chosen.batch != start.batch:
            notes.append(
                f"batch norm computes its statistics of {chosen.batch} samples instead of {start.batch}: results of the "
                "training change"
            )
        if search.objective == "throughput" and config.micro_batches == "auto":
            notes.append(
                "micro-batches were not tried: batch norm's statistics would be those of a micro-batch; "
                "micro_batches: always tries them"
            )
    return tuple(notes)


def _explain_no_size(config: Config, race: SizeRace, run_dir: Path) -> AutotuneError:
    """Return the error of a search in which no plan kept the budget."""
    search = race.search
    measured = [each for each in search.measured if each.plan is not None]
    smallest = min(measured, key=lambda each: each.size.batch)
    assert smallest.plan is not None
    reason = smallest.plan.detail or smallest.plan.outcome.value.replace("_", " ")
    is_rough = bool(config.stores or config.kernels)  # the estimate counts neither stores nor compiled regions
    smaller = race.accept(smallest.size.batch // 2) or race.accept(smallest.size.batch - 1)
    if search.estimate is not None and (search.estimate.largest > 0 or is_rough) and smaller:
        too_large = (
            f"{config.ref}: the smallest size that was measured, {search.argument}={smallest.size}, does not fit "
            f"{config.budget}: {reason}"
        )
        if race.is_full:
            return InfeasibleError(
                f"{too_large}; {race.count} sizes were measured, the maximum; tune under another --name with "
                f"--set {search.argument}={smaller} --budget {search.budget}"
            )
        return OutOfTimeError(f"{too_large}; continue with: {resume_command(run_dir)} --time {suggest_time(config)}")
    return InfeasibleError(
        f"{config.ref}: no batch size fits {config.budget}: {search.argument}={smallest.size}: {reason}; "
        "raise --budget under another --name"
    )
