"""Choose kernels and memory format of a study: measure one plan of each combination, and tune the fastest."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from autotune.errors import CaptureError, ConfigError, InfeasibleError, NumericsError
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.survey import PreparedWorkload
from autotune.planners.auto import best_plan
from autotune.planners.space import space_for_device
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import simulate
from autotune.records.config import Config, load_config
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir, lock_run_dir, write_json
from autotune.study.verdicts.ranking import baseline_step_bytes, ratio_noise

PLANNING_SECONDS = 20.0
"""Time after which no other planner is tried for a combination."""
AIM = 0.99
"""Share of the budget to plan for: the charge is above the peak."""

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
    """One combination of kernels and memory format, with the measurement of its plan."""

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

    @property
    def name(self) -> str:
        """Kernels and memory format as text."""
        return " ".join(filter(None, (self.kernels or "aten", self.memory_format)))

    def __str__(self) -> str:
        if self.time_ratio is None or self.outcome != Outcome.OK:
            return f"{self.name}: {self.outcome}{f', {self.detail}' if self.detail else ''}"
        return f"{self.name}: {self.time_ratio:.3f} of eager's time"


def choose_capture(config: Config, run_dir: Path, open_runner: OpenRunner, notify: Callable[[str], None]) -> Config:
    """Return the config with the kernels and the memory format that were surely fastest within the budget.

    A config that names its kernels is returned as it is. A run directory with a config was chosen for before. The
    measurements are written to `captures.json`.

    Args:
        config: The config; `kernels` is "any" where this function has to choose.
        run_dir: Directory of the run.
        open_runner: Opens the runner of a config.
        notify: Receives a line for each combination.

    Raises:
        AutotuneError: Eager's own kernels cannot be captured or measured.
    """
    if config.kernels != "any":
        return config
    files = RunDir(run_dir)
    if files.config.exists():
        earlier = load_config(str(files.config))
        return config.model_copy(update={"kernels": earlier.kernels, "memory_format": earlier.memory_format})
    with lock_run_dir(run_dir):
        best = select_capture(_measure_all(config, files, open_runner, notify))
    notify(f"tuning on {best.name}")
    return config.model_copy(update={"kernels": best.kernels, "memory_format": best.memory_format})


def _measure_all(
    config: Config, files: RunDir, open_runner: OpenRunner, notify: Callable[[str], None]
) -> list[MeasuredCapture]:
    measured: list[MeasuredCapture] = []
    baseline: tuple[Measurement, Device] | None = None
    refused: set[str] = set()
    for combination in _combinations(config):
        if combination.memory_format in refused:
            continue
        began = time.monotonic()
        try:
            with open_runner(combination) as runner:
                if baseline is not None:
                    runner.reuse_baseline(*baseline)
                result = _measure(combination, runner)
                if baseline is None:
                    baseline = runner.baseline(), runner.prepare().device
        except (CaptureError, ConfigError, NumericsError, InfeasibleError) as error:
            if not measured:
                raise
            if isinstance(error, ConfigError):  # a model without four-dimensional weights
                refused.add(combination.memory_format)
            result = _describe(combination, Measurement(Outcome.CRASHED, str(error)))
        measured.append(replace(result, seconds=time.monotonic() - began))
        notify(str(measured[-1]))
        write_json(files.captures, [asdict(each) for each in measured])
    return measured


def select_capture(measured: Sequence[MeasuredCapture]) -> MeasuredCapture:
    """Return the fastest combination within the budget; the first where none is.

    An earlier combination stays unless another one is faster by more than the noise of both.

    >>> eager, other = MeasuredCapture("", "", "ok", 1.0), MeasuredCapture("inductor", "", "ok", 0.9)
    >>> select_capture([eager, other]).kernels
    'inductor'
    >>> select_capture([eager, replace(other, noise=0.12)]).kernels
    ''
    """
    best: MeasuredCapture | None = None
    for each in measured:
        if each.outcome == Outcome.OK and each.time_ratio is not None and (best is None or _is_surely_faster(each, best)):
            best = each
    return best or measured[0]


def _is_surely_faster(one: MeasuredCapture, other: MeasuredCapture) -> bool:
    assert one.time_ratio is not None
    assert other.time_ratio is not None
    return one.time_ratio * (1 + one.noise + other.noise) < other.time_ratio


def _combinations(config: Config) -> Iterator[Config]:
    """Yield a config for each combination, eager's kernels in the user's format first."""
    formats: tuple[MemoryFormat, ...] = ("", "channels_last")
    for memory_format in (config.memory_format,) if config.memory_format else formats:
        for kernels in ("", "inductor"):
            yield config.model_copy(update={"kernels": kernels, "memory_format": memory_format})


def _measure(config: Config, runner: CaptureRunner) -> MeasuredCapture:
    """Measure the planners' fastest plan for the budget."""
    prepared, baseline = runner.prepare(), runner.baseline()
    graph, costs = prepared.graph, prepared.costs
    baseline_bytes = baseline_step_bytes(baseline) if prepared.baseline_fits else None
    if baseline_bytes is None:
        baseline_bytes = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    budget_bytes = config.parsed_budget.step_bytes(floor_bytes=prepared.floor_bytes, baseline_step_bytes=baseline_bytes)
    space = space_for_device(config.planners.model_dump(), prepared.device.kind, costs.stores)
    target = int(AIM * budget_bytes)
    best = best_plan(graph, costs, target, space, seconds=PLANNING_SECONDS)
    layout_bytes = add_layout(graph, best.plan, costs, best.estimate).charged_bytes
    if layout_bytes is not None and layout_bytes > budget_bytes:
        best = best_plan(graph, costs, int(target * budget_bytes / layout_bytes), space, seconds=PLANNING_SECONDS)
    if best.estimate.peak_bytes > budget_bytes:
        return _describe(config, Measurement(Outcome.OVER_BUDGET, "no plan fits the budget by estimate"))
    plan = replace(best.plan, kernels=config.kernels, memory_format=config.memory_format)
    accepted = int(budget_bytes * (1 + config.parsed_budget.tolerance))
    measurement = runner.measure(plan, budget_bytes=accepted)
    if measurement.disturbed:
        measurement = runner.measure(plan, budget_bytes=accepted)
    return _describe(config, measurement)


def _describe(config: Config, measurement: Measurement) -> MeasuredCapture:
    kernels: Kernels = "inductor" if config.kernels == "inductor" else ""
    return MeasuredCapture(
        kernels=kernels,
        memory_format=config.memory_format,
        outcome=measurement.outcome.value,
        time_ratio=measurement.time_ratio,
        noise=ratio_noise(measurement),
        charged_bytes=measurement.step_charged_bytes,
        verified=measurement.verified,
        detail=measurement.detail.partition("\n")[0],
    )
