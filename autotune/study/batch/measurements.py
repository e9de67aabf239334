"""Measure plans and plain eager at a batch size, each in a process of its own under the enforced limit."""

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from autotune.errors import CaptureError, ConfigError, InfeasibleError, NumericsError, PlanError, StoreError
from autotune.ir.graph_summary import summarize_graph
from autotune.measure.survey import PreparedWorkload
from autotune.planners.candidates import Candidate
from autotune.records import plan_file as planfile
from autotune.records.budget import Budget, format_step_budget, tolerated_bytes
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.records.run_dir import RunDir, resume_command
from autotune.study.batch.records import BatchSearch, MeasuredSize, SideResult, StepSize
from autotune.study.captures import (
    AIM,
    CaptureRunner,
    OpenRunner,
    measure_undisturbed,
    plan_within_budget,
    refuse_cut_off,
)
from autotune.study.verdicts.ranking import estimate_overhead
from autotune.workloads.loop import Loop

CACHE_BYTES, CACHE_SHARE = 64 * 2**20, 0.02
"""Bytes of page cache that the enforced limit admits beyond the budget: at least so many, or this share of it."""
KILLED_AIM = 0.95
"""Factor on the bytes to plan for after the limit ended the process of a plan that should have fitted."""
_FAILURES = (CaptureError, ConfigError, InfeasibleError, NumericsError, PlanError, StoreError)
"""Errors that are recorded as the result of a batch size; at the workload's own size they are raised.

A StoreError is recorded only once a plan's measurement has begun. Before that it is raised: the disk is too small for
eager's results, or a directory is missing.
"""


class OtherDeviceError(ConfigError):
    """Raised where a resumed search would mix batch sizes of two devices, or of two versions of torch. Exit code 2."""


def config_at_size(
    config: Config, argument: str, size: StepSize, loop: Loop, *, budget: str, limit_bytes: int | None
) -> Config:
    """Return the config of a study of one batch size, with a budget that does not depend on the size.

    Args:
        config: Config of the search.
        argument: Argument of the factory that sets the batch size.
        size: Batch size and micro-batches.
        loop: Training loop of the workload, whose number of micro-batches is replaced.
        budget: Budget of the study, such as `6GiB` or `step:6GiB`; at the workload's own size the config's budget.
        limit_bytes: Bytes of the process, before the margin of `enforce_beyond`. None keeps the config's limit.
    """
    words = config.loop
    if size.accumulate != loop.accumulate:
        words = str(replace(loop, accumulate=size.accumulate))
    changes: dict[str, object] = {
        "arguments": {**config.arguments, argument: size.batch},
        "batch_argument": argument,
        "loop": words,
        "objective": "time",
        "budget": budget,
    }
    if limit_bytes is not None:
        is_of_process = Budget.parse(budget).is_of_process
        enforced_bytes = enforce_beyond(limit_bytes, config.device, is_of_process=is_of_process)
        lowest = min(enforced_bytes, config.limit_bytes or enforced_bytes)
        changes["limit"] = f"{lowest}B"
    return config.model_copy(update=changes)


def enforce_beyond(budget_bytes: int, device_kind: str, *, is_of_process: bool = True) -> int:
    """Return the limit to enforce for a budget of the process.

    On a CPU a limit also counts page cache, of libraries and of recorded results, which is no charge of the step. At a limit
    without room for it the kernel drops and reads those pages again and again. A budget of the step has the same margin on
    every device, because the idle process may be larger in the process that measures a step.

    >>> enforce_beyond(2**30, "cpu") - 2**30 == 2**26, enforce_beyond(2**30, "cuda") == 2**30
    (True, True)
    """
    if device_kind != "cpu" and is_of_process:
        return budget_bytes
    return budget_bytes + max(CACHE_BYTES, int(CACHE_SHARE * budget_bytes))


def plan_path(run_dir: Path, size: StepSize) -> Path:
    """Return the path of the plan file of a measured size."""
    return RunDir(run_dir).batch_plans / f"{size.batch}x{size.accumulate}.json"


class SizeMeasurer:
    """Measures sizes of one search; a size that cannot run is a result, not an error.

    Every measurement raises StoreError for a full disk, and WorkerError for a process that a signal from outside ended:
    neither is recorded as the result of a size, so a later session measures it again. The first measurement of a
    resumed search raises OtherDeviceError where the device, or torch, is not that of the recorded sizes.
    """

    def __init__(self, config: Config, argument: str, loop: Loop, run_dir: Path, open_runner: OpenRunner) -> None:
        self._config, self._argument, self._loop = config, argument, loop
        self._run_dir, self._open_runner = run_dir, open_runner
        self._is_device_checked = False

    def measure_start(self, search: BatchSearch) -> BatchSearch:
        """Measure the workload's own size, and resolve the budget in bytes: it may be a share of eager's peak there.

        Raises what `prepare` raises: a workload that cannot be captured or trained is an error of the config.
        """
        began, size = time.monotonic(), search.start
        budget = self._config.parsed_budget
        config = self._config_at(size, budget.text, budget.nbytes)
        with self._open_runner(config) as runner:
            prepared, baseline = runner.prepare(), runner.baseline()
            _, budget_bytes = plan_within_budget(config, prepared, baseline)
            budget_bytes = max(budget_bytes, 0)
            if budget.share is not None:  # what `BatchSearch.budget` names
                budget_bytes = Budget.parse(format_step_budget(budget_bytes)).step_bytes(
                    floor_bytes=prepared.floor_bytes, baseline_step_bytes=0
                )
            search = replace(search, floor_bytes=prepared.floor_bytes, budget_bytes=budget_bytes)
            search = replace(search, device=prepared.device.key, torch=prepared.device.torch)
            self._is_device_checked = True
            return self._add(search, *self._measure_sides(config, runner, search, size, began))

    def measure_eager(self, search: BatchSearch, size: StepSize) -> BatchSearch:
        """Measure plain eager alone at a size."""
        began = time.monotonic()
        device: Device | None = None
        try:
            with self._open_runner(self._config_at(size, search.budget, search.limit_bytes)) as runner:
                eager = _judge_eager(runner.baseline(), search, size)
                if search.device and not self._is_device_checked:  # eager's measurement names no device
                    with contextlib.suppress(*_FAILURES):
                        device = runner.prepare().device
            if device is not None:
                self._check_device(search, device)
        except (StoreError, OtherDeviceError):  # no plan ran that could be the cause of the former
            raise
        except _FAILURES as error:
            eager = _describe_failure(error)
        return self._add(search, MeasuredSize(size, eager, seconds=time.monotonic() - began))

    def measure_plan(self, search: BatchSearch, size: StepSize) -> BatchSearch:
        """Measure the planners' plan for the budget at a size, and eager beside it."""
        began, is_prepared = time.monotonic(), False
        config = self._config_at(size, search.budget, search.limit_bytes)
        file: planfile.PlanFile | None = None
        try:
            with self._open_runner(config) as runner:
                self._check_device(search, runner.prepare().device)
                is_prepared = True
                measured, file = self._measure_sides(config, runner, search, size, began)
        except _FAILURES as error:
            if isinstance(error, StoreError | OtherDeviceError) and not is_prepared:
                raise
            measured = MeasuredSize(size, None, _describe_failure(error), seconds=time.monotonic() - began)
        return self._add(search, measured, file)

    def _check_device(self, search: BatchSearch, device: Device) -> None:
        """Raise OtherDeviceError where another device or torch measured the sizes that a search recorded before."""
        is_other = (search.device, search.torch) != (device.key, device.torch)
        if search.device and is_other and not self._is_device_checked:
            raise OtherDeviceError(
                f"{self._run_dir}: its batch sizes were measured on {search.device} with torch {search.torch}, this is "
                f"{device.key} with torch {device.torch}; resume on the former, or tune under another --name"
            )
        self._is_device_checked = True

    def _add(self, search: BatchSearch, measured: MeasuredSize, file: planfile.PlanFile | None = None) -> BatchSearch:
        """Write the plan file of a result, and return the search with the result.

        Raises StoreError or WorkerError where the measurement was cut off; see `refuse_cut_off`.
        """
        run_dir, name = self._run_dir, f"{self._config.ref}: {self._argument}={measured.size}"
        is_recorded = RunDir(run_dir).batch_search.exists()
        go_on = f"continue with: {resume_command(run_dir)}" if is_recorded else "run the command again"
        for side in (measured.eager, measured.plan):
            if side is not None:
                is_full = side.outcome is Outcome.DISK_FULL and bool(self._config.stores)
                otherwise = ", or tune under another --name without --store" if is_full else ""
                refuse_cut_off(name, side.outcome, side.detail, f"{go_on}{otherwise}")
        if file is not None:
            planfile.write(plan_path(run_dir, measured.size), file, remedy=f"free space there, then {go_on}")
        return search.add(measured)

    def _config_at(self, size: StepSize, budget: str, limit_bytes: int | None) -> Config:
        return config_at_size(self._config, self._argument, size, self._loop, budget=budget, limit_bytes=limit_bytes)

    def _measure_sides(
        self, config: Config, runner: CaptureRunner, search: BatchSearch, size: StepSize, began: float
    ) -> tuple[MeasuredSize, planfile.PlanFile | None]:
        """Measure eager and a plan; a plan that exceeds the budget is replaced once by a smaller one.

        The plan file is None unless the plan ran to its end within the budget.
        """
        prepared, baseline = runner.prepare(), runner.baseline()
        eager = _judge_eager(baseline, search, size)
        aim = min(AIM, 1 / (1 + estimate_overhead(search.overheads))) if search.overheads else AIM
        candidate, budget_bytes = plan_within_budget(config, prepared, baseline, aim)
        result = _measure_candidate(config, runner, candidate, budget_bytes)
        if (lower_aim := _lower_aim(result, aim, budget_bytes)) is not None:
            lower, _ = plan_within_budget(config, prepared, baseline, lower_aim)
            if lower.plan != candidate.plan:
                candidate, result = lower, _measure_candidate(config, runner, lower, budget_bytes)
        file: planfile.PlanFile | None = None
        if result.outcome is Outcome.OK:
            file = _to_plan_file(config, prepared, candidate, result, budget_bytes)
        plan = SideResult.from_measurement(size, result)
        if not result.step_seconds and plan.charged_bytes is None and result.outcome is Outcome.OVER_BUDGET:
            plan = replace(plan, charged_bytes=candidate.estimate.peak_bytes)
        seconds, estimated_bytes = time.monotonic() - began, candidate.estimate.peak_bytes
        measured = MeasuredSize(size, eager, plan, estimated_bytes, result.verified, result.limit, seconds)
        return measured, file


def _to_plan_file(
    config: Config, prepared: PreparedWorkload, candidate: Candidate, result: Measurement, budget_bytes: int
) -> planfile.PlanFile:
    return planfile.PlanFile(
        workload=config.ref,
        graph_digest=prepared.graph.digest,
        budget=config.budget,
        budget_bytes=budget_bytes,
        floor_bytes=prepared.floor_bytes,
        settings=candidate.settings,
        plan=config.captured(candidate.plan),
        estimate=candidate.estimate,
        device=prepared.device,
        measurement=result,
        verified=result.verified or planfile.NOT_VERIFIED,
        loop=prepared.loop,
        target_bytes=candidate.target_bytes,
        summary=summarize_graph(prepared.graph),
    )


def _measure_candidate(config: Config, runner: CaptureRunner, candidate: Candidate, budget_bytes: int) -> Measurement:
    if candidate.estimate.peak_bytes > budget_bytes:
        return Measurement(Outcome.OVER_BUDGET, "no plan fits the budget by estimate: not measured")
    tolerance = config.parsed_budget.tolerance
    result = measure_undisturbed(runner, config.captured(candidate.plan), tolerated_bytes(budget_bytes, tolerance))
    return apply_budget(result, budget_bytes, tolerance)


def _lower_aim(result: Measurement, aim: float, budget_bytes: int) -> float | None:
    """Return the share of the budget to plan for after a plan that missed it; None after any other result."""
    charged = result.step_charged_bytes
    if result.outcome is Outcome.OVER_BUDGET and charged is not None and budget_bytes > 0:
        return aim * AIM * budget_bytes / charged
    return aim * KILLED_AIM if result.outcome is Outcome.OUT_OF_MEMORY else None


def _judge_eager(baseline: Measurement, search: BatchSearch, size: StepSize) -> SideResult:
    """Return eager's result under the budget.

    A budget of the process is compared with the charge of the process, every other budget with the charge of the step.
    """
    budget = Budget.parse(search.budget)
    if not budget.is_of_process:
        return SideResult.from_measurement(size, apply_budget(baseline, search.budget_bytes, budget.tolerance))
    floor_bytes = search.floor_bytes if baseline.floor_bytes is None else baseline.floor_bytes
    return SideResult.from_measurement(size, apply_budget(baseline, max(search.limit_bytes - floor_bytes, 0)))


def _describe_failure(error: Exception) -> SideResult:
    outcome = Outcome.OUT_OF_MEMORY if isinstance(error, InfeasibleError) else Outcome.CRASHED
    return SideResult(outcome, detail=" ".join(str(error).split()))
