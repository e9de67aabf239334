"""Record a landscape: the measurements of a study by settings, in one small file that a search can be replayed on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Op, Phase, TrainGraph
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate
from autotune.records.device import Device
from autotune.records.json_codec import read_whole, to_json
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.records.run_dir import RunDir, write_text
from autotune.records.trial import Trial, TrialKind
from autotune.study.priors.distance import settings_distance
from autotune.study.recorded_run import RecordedRun
from autotune.study.verdicts.ranking import Rules, measured_ratio, plan_hash, pool_runs

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LandscapePoint:
    """Settings, the plan made from them, and its measurement."""

    kind: TrialKind
    settings: Settings
    plan: str
    """Hash of the plan; points of the same plan share their measurement."""
    estimate: Estimate
    measurement: Measurement
    """All runs of the plan, pooled; for a plan rejected by estimate, the reason alone."""


@dataclass(frozen=True, slots=True)
class Landscape:
    """Recorded trials of one workload on one device under one budget."""

    schema: int
    source: str
    """Description for people: measured or simulated, and the command."""
    workload: str
    budget: str
    graph: str
    """Digest of the graph."""
    device: Device
    stores: dict[str, StoreCost]
    floor_bytes: int
    budget_bytes: int
    """Maximum charge of the step, without the floor."""
    traced_seconds: float
    """Predicted seconds of the step without a plan."""
    capture_error: float | None
    baseline: Measurement
    points: tuple[LandscapePoint, ...]
    commit: str = ""
    date: str = ""
    command: str = ""
    """Commit, date and command of the recording; empty in records without them."""
    budget_tolerance: float = 0.0
    """Share by which the charge may exceed the budget; 0 in records without it."""

    @property
    def best_ratio(self) -> float:
        """Lowest time ratio of the plans that kept the budget; ConfigError where none did."""
        ratios = [ratio for point in self.points if (ratio := self.ratio_of(point)) is not None]
        if not ratios:
            raise ConfigError(f"{self.workload}: no recorded plan was measured within {self.budget}: nothing to find")
        return min(ratios)

    def ratio_of(self, point: LandscapePoint) -> float | None:
        """Return a point's time over plain eager's, or over its prediction where eager does not fit.

        None where the plan failed or exceeded the budget.
        """
        result = apply_budget(point.measurement, self.budget_bytes, self.budget_tolerance)
        return measured_ratio(result, self.rules) if result.outcome is Outcome.OK else None

    @property
    def rules(self) -> Rules:
        """Rules of the study; the numerical tolerance was applied when the outcomes were recorded."""
        return Rules(self.budget_bytes, self.floor_bytes, None, self.traced_seconds, self.budget_tolerance)

    @property
    def stand_in_graph(self) -> TrainGraph:
        """Graph of one op with the traced step's predicted time; no planner runs on it."""
        op = Op(0, "step", "step", (), (), Phase.FORWARD, "")
        return TrainGraph(self.workload, (op,), (), (), ())

    @property
    def stand_in_costs(self) -> Costs:
        """Costs of the stand-in graph, with the measured store rates."""
        return Costs((self.traced_seconds,), (0,), self.stores)


def read_landscape(path: Path) -> Landscape:
    """Read a landscape's file, or a directory that autotune tune wrote; ConfigError where it is neither."""
    if path.is_dir():
        return landscape_from_run(path)
    return read_whole(
        Landscape, path, schema=SCHEMA, what="landscape", again="name a run's directory, or record it again"
    )


def landscape_from_run(run_dir: Path, source: str = "") -> Landscape:
    """Return the landscape of a recorded run; `source` names the run by default.

    Raises ConfigError where the run ended before its first plan.
    """
    records = RecordedRun.load(run_dir)
    if records.is_front and any(trial.target_bytes is not None for trial in records.trials):
        raise ConfigError(
            f"{run_dir}: a search of a Pareto front, with a budget for each plan; a replay needs a run of objective: time"
        )
    first, rules, traced = records.baseline, records.rules, records.traced
    if first is None or first.measurement is None or rules is None or traced is None or records.device is None:
        raise ConfigError(f"{run_dir}: ended before its first plan; it cannot be replayed")
    if records.costs is None or not any(trial.kind == TrialKind.SMALLEST for trial in records.trials):
        raise ConfigError(f"{run_dir}: contains no measured plan; it cannot be replayed")
    return Landscape(
        schema=SCHEMA,
        source=source or f"measured: {run_dir.name}",
        workload=first.workload,
        budget=str(records.config["budget"]),
        graph=first.graph_digest,
        device=records.device,
        stores=records.costs.stores,
        floor_bytes=rules.floor_bytes,
        budget_bytes=rules.budget_bytes,
        traced_seconds=rules.baseline_seconds,
        capture_error=_capture_error(run_dir),
        baseline=_strip(first.measurement),
        points=tuple(_points(records.trials)),
        budget_tolerance=rules.budget_tolerance,
    )


def write_landscape(path: Path, landscape: Landscape) -> None:
    """Write a landscape with one line per point, in one step."""
    head = to_json(replace(landscape, points=()))
    del head["points"]
    lines = ",\n".join(json.dumps(to_json(point), separators=(",", ":")) for point in landscape.points)
    write_text(path, f'{json.dumps(head, indent=1)[:-2]},\n "points": [\n{lines}\n]}}\n')


def find_nearest(points: Sequence[LandscapePoint], settings: Settings) -> tuple[LandscapePoint, float]:
    """Return the recorded point with the nearest settings, the first of several, and its distance."""
    distances = [settings_distance(point.settings, settings) for point in points]
    nearest = min(range(len(points)), key=distances.__getitem__)
    return points[nearest], distances[nearest]


def _points(trials: Sequence[Trial]) -> list[LandscapePoint]:
    """Return a point for each trial of the search."""
    runs: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.plan is not None and trial.kind != TrialKind.REPEAT and trial.measurement is not None:
            runs.setdefault(plan_hash(trial.plan), []).append(trial)
    measurements = {plan: pool_measurements(same) for plan, same in runs.items()}
    return [
        LandscapePoint(
            TrialKind.SEARCH if trial.kind == TrialKind.REPEAT else trial.kind,
            trial.settings,
            plan,
            trial.estimate,
            measurements[plan],
        )
        for trial in trials
        if trial.plan is not None and trial.estimate is not None and trial.kind != TrialKind.CONFIRM
        if not trial.move  # its settings make another plan
        if (plan := plan_hash(trial.plan)) in measurements
    ]


def pool_measurements(runs: Sequence[Trial]) -> Measurement:
    """Return the first failure, or else all samples of the search together.

    Re-measurements are left out: they ran beside another eager process than the search, which may differ by a tenth.
    """
    ran = [run for run in runs if run.was_run] or list(runs)
    failed = [run.measurement for run in ran if run.measurement and run.measurement.outcome is not Outcome.OK]
    result = (
        failed[0] if failed else pool_runs([run for run in ran if run.kind != TrialKind.CONFIRM] or ran).measurement
    )
    assert result is not None
    return _strip(result)


def _strip(measurement: Measurement) -> Measurement:
    """Return the fields that a search reads, with times in whole microseconds: steps vary by more than that."""
    return replace(
        measurement,
        detail=measurement.detail.partition("\n")[0][:200],
        step_seconds=tuple(round(seconds, 6) for seconds in measurement.step_seconds),
        baseline_seconds=tuple(round(seconds, 6) for seconds in measurement.baseline_seconds),
        lanes=None,
        device=None,
    )


def _capture_error(run_dir: Path) -> float | None:
    path = RunDir(run_dir).study
    error = json.loads(path.read_text(encoding="utf-8"))["capture_error"] if path.exists() else 0.0
    return None if error is None else float(error)
