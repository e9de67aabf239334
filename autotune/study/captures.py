"""Choose kernels, memory format, rebuild price and threads of a study: measure a plan of each combination, and tune the fastest."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from autotune.errors import (
    AutotuneError,
    CaptureError,
    ConfigError,
    InfeasibleError,
    NumericsError,
    PlanError,
    StoreError,
    WorkerError,
)
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.ir.schedule import lower
from autotune.measure.survey import PreparedWorkload
from autotune.planners.auto import best_plan
from autotune.planners.candidates import Candidate
from autotune.planners.space import space_for_device
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import simulate
from autotune.records.config import Config, load_config
from autotune.records.device import Device
from autotune.records.measurement import KILLED, Measurement, Outcome
from autotune.records.run_dir import RunDir, lock_run_dir, write_json
from autotune.study.batch.records import read_request
from autotune.study.runner import INFORMATIVE
from autotune.study.verdicts.ranking import baseline_step_bytes, ratio_noise
from autotune.units import fmt_seconds

PLANNING_SECONDS = 20.0
"""Time after which no other planner is tried for a combination."""
AIM = 0.99
"""Share of the budget to plan for: the charge is above the peak."""
PRICES = (0.5, 0.05, 0.0)
"""Rebuild prices that are measured beside the default, where compiled regions lead."""

REFUSED = "refused"
"""Outcome of a combination that the model does not have, or that cannot be captured."""

CHOSEN = ("kernels", "memory_format", "rebuild_price", "threads")
"""Keys of a config that the choice sets."""

Kernels = Literal["", "inductor"]
MemoryFormat = Literal["", "channels_last"]


class CaptureRunner(Protocol):
    """Runner whose baseline can be taken from an earlier one, such as `autotune.measure.harness.Harness`."""

    def prepare(self) -> PreparedWorkload: ...

    def baseline(self) -> Measurement: ...

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement: ...

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None: ...


OpenRunner = Callable[[Config], AbstractContextManager[CaptureRunner]]


@dataclass(frozen=True, slots=True)
class MeasuredCapture:
    """One combination of kernels, memory format, rebuild price and threads, with the measurement of its plan."""

    kernels: Kernels
    memory_format: MemoryFormat
    outcome: str
    """Outcome of the measurement, or of the attempt to capture or plan."""
    time_ratio: float | None = None
    """Median step time over eager's."""
    noise: float = 0.0
    """Half the width of the ratio's interval, relative to the ratio."""
    charged_bytes: int | None = None
    """Charge of the step, without the floor."""
    verified: str = ""
    """Method by which results were compared with eager's."""
    detail: str = ""
    seconds: float = 0.0
    """Duration of capture, compilation, planning and measurement."""
    rebuild_price: float = REBUILD_PRICE
    threads: int = 0
    """Number of torch's threads; 0 for the process's own."""
    graph_digest: str = ""
    estimated_seconds: float | None = None
    """Step time of the plan by estimate."""
    step_seconds: float | None = None
    """Median step time."""

    @property
    def name(self) -> str:
        """Kernels, memory format, an unusual rebuild price and number of threads as text."""
        return Plan(()).captured_as(self).capture_name

    def __str__(self) -> str:
        if self.time is None or self.outcome != Outcome.OK:
            return f"{self.name}: {self.outcome}{f', {self.detail}' if self.detail else ''}"
        if self.time_ratio is None:
            return f"{self.name}: {fmt_seconds(self.time)}; eager does not fit"
        return f"{self.name}: {self.time_ratio:.3f} of eager's time"

    @property
    def time(self) -> float | None:
        """Time over eager's, or the step time in seconds where eager did not run; the two are never compared."""
        return self.step_seconds if self.time_ratio is None else self.time_ratio


def choose_capture(
    config: Config,
    run_dir: Path,
    open_runner: OpenRunner,
    notify: Callable[[str], None],
    race_config: Callable[[Config], Config] = lambda config: config,
) -> Config:
    """Return the config with kernels, memory format, rebuild price and threads chosen by measurement; see `select_capture`.

    A config that names its kernels is returned as it is. Where the run directory contains a config, or a search for the batch
    size, the choice is read from it. Otherwise the measurements are written to `captures.json`.

    Args:
        config: The config; `kernels` is "any" where this function has to choose.
        run_dir: Directory of the run.
        open_runner: Opens the runner of a config.
        notify: Receives a line for each combination.
        race_config: Returns the config to compare combinations with; by default the config itself.

    Raises:
        AutotuneError: Eager's own kernels cannot be captured or measured.
        ConfigError: The run directory contains a study for named kernels, or for other values than the config names.
        StoreError: The disk was full.
        WorkerError: A signal from outside ended a measuring process.
    """
    if config.kernels != "any":
        return config
    files = RunDir(run_dir)
    if (recorded := _read_choice(files)) is not None:
        if not files.captures.exists():
            raise ConfigError(
                f"{run_dir}: contains a study for kernels {recorded.kernels or 'aten'}, not any; tune under another --name"
            )
        _refuse_other_choice(config, recorded, run_dir)
        return _with_choice(config, recorded)
    with lock_run_dir(run_dir):
        best = _race(race_config(config), _Measurements(files, open_runner, notify))
    notify(f"tuning on {best.name}")
    return _with_choice(config, best)


def _read_choice(files: RunDir) -> Config | None:
    """Return the recorded config of a run, or of its search for the batch size; None where nothing was chosen yet."""
    return load_config(str(files.config)) if files.config.exists() else read_request(files.path)


def _refuse_other_choice(config: Config, recorded: Config, run_dir: Path) -> None:
    """Raise ConfigError where a config sets another value than the recorded choice; a default value is not compared."""
    for key in CHOSEN[1:]:
        requested, choice = getattr(config, key), getattr(recorded, key)
        if requested not in (Config.model_fields[key].default, choice):
            raise ConfigError(
                f"{run_dir}: contains a study for {key} {'none' if choice == '' else choice}, not {requested}; "
                "tune under another --name"
            )


def _with_choice(config: Config, choice: Config | MeasuredCapture) -> Config:
    return config.model_copy(update={name: getattr(choice, name) for name in CHOSEN})


def _race(config: Config, measurements: "_Measurements") -> MeasuredCapture:
    """Measure kernels and memory formats, then rebuild prices where compiled regions lead, and then fewer threads."""
    for combination in _combinations(config):
        if combination.memory_format not in measurements.refused:
            measurements.add(combination)
    best = select_capture(measurements.measured)
    if best.kernels and config.rebuild_price == REBUILD_PRICE:
        for price in PRICES:
            measurements.add(_with_choice(config, replace(best, rebuild_price=price)), leader=best)
            best = select_capture(measurements.measured)
    for threads in () if config.threads else measurements.fewer_threads():
        measurements.add(_with_choice(config, replace(best, threads=threads)), leader=best)
        leader, best = best, select_capture(measurements.measured)
        if best is leader:
            break
    return best


class _Measurements:
    """Measured combinations of one run, the first one's baseline, and the memory formats that the model refuses."""

    def __init__(self, files: RunDir, open_runner: OpenRunner, notify: Callable[[str], None]) -> None:
        self.measured: list[MeasuredCapture] = []
        self.refused: set[str] = set()
        self._files, self._open_runner, self._notify = files, open_runner, notify
        self._baseline: tuple[Measurement, Device] | None = None

    def fewer_threads(self) -> Iterator[int]:
        """Yield half of torch's own threads, a quarter, and so on down to one; nothing for a GPU."""
        device = self._baseline[1] if self._baseline is not None else None
        if device is None or device.kind != "cpu":
            return
        threads = int(device.environment.get("torch threads", "1")) // 2
        while threads:
            yield threads
            threads //= 2

    def add(self, combination: Config, leader: MeasuredCapture | None = None) -> None:
        """Measure a combination and record it; one that cannot be faster than the `leader` is only estimated.

        Raises StoreError for a full disk, and WorkerError for a process that a signal from outside ended.
        """
        began, is_prepared = time.monotonic(), False
        try:
            with self._open_runner(combination) as runner:
                if self._baseline is not None:
                    runner.reuse_baseline(*self._baseline)
                runner.prepare()
                is_prepared = True
                # another price may give the same graph; another number of threads always does, and other seconds
                varies_graph = leader is not None and combination.threads == leader.threads
                earlier = {each.graph_digest: each.name for each in self.measured} if varies_graph else {}
                result = _measure(combination, runner, earlier, leader)
                if self._baseline is None:
                    self._baseline = runner.baseline(), runner.prepare().device
        except (CaptureError, ConfigError, InfeasibleError, NumericsError, PlanError, StoreError) as error:
            # eager's results need the disk, too: such an error is no result of the combination
            if not self.measured or (isinstance(error, StoreError) and not is_prepared):
                raise
            if isinstance(error, ConfigError):  # a model without four-dimensional weights
                self.refused.add(combination.memory_format)
            result = _describe_error(combination, error)
        refuse_cut_off(str(combination.ref), result.outcome, result.detail, "run the command again")
        self.measured.append(replace(result, seconds=time.monotonic() - began))
        self._notify(str(self.measured[-1]))
        write_json(self._files.captures, [asdict(each) for each in self.measured])


def _describe_error(combination: Config, error: AutotuneError) -> MeasuredCapture:
    """Return the result of a combination that was not measured, with the cause and without the next step of its message.

    The next step is for somebody who named the combination; here it was only tried.
    """
    outcomes = {NumericsError: Outcome.WRONG_RESULT.value, InfeasibleError: Outcome.OVER_BUDGET.value}
    cause = str(error).partition("\n")[0].partition(";")[0]
    described = _describe(combination, Measurement(Outcome.CRASHED, cause))
    return replace(described, outcome=outcomes.get(type(error), REFUSED))


def select_capture(measured: Sequence[MeasuredCapture]) -> MeasuredCapture:
    """Return the fastest combination within the budget; the first where none is.

    The first one stays unless others are faster by more than the noise of both; of those the fastest is returned. Within the
    noise one on eager's kernels, which keep its bits, is preferred. Another rebuild price, or another number of threads, must be
    faster by more than the noise.

    >>> eager, other = MeasuredCapture("", "", "ok", 1.0), MeasuredCapture("inductor", "", "ok", 0.9)
    >>> select_capture([eager, other]).kernels
    'inductor'
    >>> select_capture([eager, replace(other, noise=0.12)]).kernels
    ''
    """
    usable = [each for each in measured if each.outcome == Outcome.OK and each.time is not None]
    if not usable:
        return measured[0]
    first = usable[0]
    # eager may fit in one memory format only, and seconds are no ratios
    usable = [each for each in usable if (each.time_ratio is None) == (first.time_ratio is None)]
    alike = [each for each in usable if _variation(each) == _variation(first)]
    faster = [each for each in alike if _is_surely_faster(each, first)]
    best = min(faster, key=lambda each: each.time or 0.0, default=first)
    on_eagers = min((each for each in faster if not each.kernels), key=lambda each: each.time or 0.0, default=first)
    if best is not on_eagers and not _is_surely_faster(best, on_eagers):
        best = on_eagers
    for each in usable:
        if _variation(each) != _variation(first) and _is_surely_faster(each, best):
            best = each
    return best


def _variation(capture: MeasuredCapture) -> tuple[float, int]:
    return capture.rebuild_price, capture.threads


def _is_surely_faster(capture: MeasuredCapture, best: MeasuredCapture) -> bool:
    assert capture.time is not None
    assert best.time is not None
    return capture.time * (1 + capture.noise + best.noise) < best.time


def _combinations(config: Config) -> Iterator[Config]:
    """Yield a config for each combination, eager's kernels in the user's format first."""
    formats: tuple[MemoryFormat, ...] = ("", "channels_last")
    for memory_format in (config.memory_format,) if config.memory_format else formats:
        for kernels in ("", "inductor"):
            yield config.model_copy(update={"kernels": kernels, "memory_format": memory_format})


def _measure(
    config: Config, runner: CaptureRunner, earlier: Mapping[str, str], leader: MeasuredCapture | None
) -> MeasuredCapture:
    """Measure the planners' fastest plan for the budget.

    A graph whose digest is among the `earlier` ones is not measured again, nor is a plan that is slower than the leader's by
    estimate.
    """
    prepared, baseline = runner.prepare(), runner.baseline()
    digest = prepared.graph.digest
    if digest in earlier:
        detail = f"the graph is that of {earlier[digest]}: not measured"
        return replace(_describe(config, Measurement(Outcome.STOPPED_EARLY, detail)), graph_digest=digest)
    best, budget_bytes = plan_within_budget(config, prepared, baseline)
    seconds, limit = best.estimate.seconds, _longest_seconds(leader)
    if best.estimate.peak_bytes > budget_bytes:
        measurement = Measurement(Outcome.OVER_BUDGET, "no plan fits the budget by estimate")
    elif seconds > limit:
        detail = f"estimated {fmt_seconds(seconds)}, at most {fmt_seconds(limit)} may win: not measured"
        measurement = Measurement(Outcome.STOPPED_EARLY, detail)
    else:
        accepted = int(budget_bytes * (1 + config.parsed_budget.tolerance))
        measurement = measure_undisturbed(runner, config.captured(best.plan), accepted)
    return replace(_describe(config, measurement), graph_digest=digest, estimated_seconds=seconds)


def plan_within_budget(
    config: Config, prepared: PreparedWorkload, baseline: Measurement, aim: float = AIM
) -> tuple[Candidate, int]:
    """Return the planners' fastest plan for a share `aim` of the budget, and the budget of the step in bytes.

    Where no plan fits, it is the one with the lowest peak.
    """
    graph, costs = prepared.graph, prepared.costs
    baseline_bytes = baseline_step_bytes(baseline) if prepared.baseline_fits else None
    if baseline_bytes is None:
        baseline_bytes = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    budget_bytes = config.parsed_budget.step_bytes(floor_bytes=prepared.floor_bytes, baseline_step_bytes=baseline_bytes)
    space = space_for_device(config.planners.model_dump(), prepared.device.kind, costs.stores)
    target = int(aim * budget_bytes)
    best = best_plan(graph, costs, target, space, seconds=PLANNING_SECONDS, or_smallest=True)
    layout_bytes = add_layout(graph, best.plan, costs, best.estimate).charged_bytes
    if layout_bytes is not None and layout_bytes > budget_bytes:
        lower_target = int(target * budget_bytes / layout_bytes)
        best = best_plan(graph, costs, lower_target, space, seconds=PLANNING_SECONDS, or_smallest=True)
    return best, budget_bytes


def _longest_seconds(leader: MeasuredCapture | None) -> float:
    """Return the estimate above which a plan is slower than the leader's; infinity without one."""
    if leader is None or leader.estimated_seconds is None:
        return math.inf
    return leader.estimated_seconds * (1 + leader.noise)


def refuse_cut_off(name: str, outcome: str, detail: str, go_on: str) -> None:
    """Raise StoreError where the disk was full, and WorkerError where a signal from outside ended the process.

    Neither says anything about the workload, so neither is recorded. `name` is the workload's name in the message;
    `go_on` is the next step for the user.
    """
    if outcome == Outcome.DISK_FULL:
        raise StoreError(f"{name}: the disk is full: {detail.partition(';')[0]}; free space there, then {go_on}")
    if outcome == Outcome.CRASHED and detail.startswith(KILLED):
        raise WorkerError(f"{name}: the process of a measurement was {detail.partition(':')[0]}; {go_on}")


def measure_undisturbed(runner: CaptureRunner, plan: Plan, budget_bytes: int) -> Measurement:
    """Measure a plan, and once more where other work disturbed it, or a signal from outside ended it.

    A disturbed measurement is kept where the second one ends without evidence on the plan, such as killed or out of time.
    """
    measurement = runner.measure(plan, budget_bytes=budget_bytes)
    if not (measurement.disturbed or measurement.was_killed):
        return measurement
    again = runner.measure(plan, budget_bytes=budget_bytes)
    return again if measurement.was_killed or again.outcome in INFORMATIVE else measurement


def _describe(config: Config, measurement: Measurement) -> MeasuredCapture:
    kernels: Kernels = "inductor" if config.kernels == "inductor" else ""
    return MeasuredCapture(
        kernels=kernels,
        memory_format=config.memory_format,
        outcome=measurement.outcome.value,
        time_ratio=measurement.time_ratio,
        step_seconds=measurement.median_seconds,
        noise=ratio_noise(measurement),
        charged_bytes=measurement.step_charged_bytes,
        verified=measurement.verified,
        detail=measurement.detail.partition("\n")[0],
        rebuild_price=config.rebuild_price,
        threads=config.threads,
    )
