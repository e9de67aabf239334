"""A landscape: what a study measured, settings by settings, in one small file that searches can be tried on."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Op, Phase, TrainGraph
from autotune.planners import KINDS
from autotune.planners.knobs import Choice, Knob, KnobValue, Settings
from autotune.predict.simulate import Estimate
from autotune.records.device import Device
from autotune.records.json_codec import read_whole, to_json
from autotune.records.measurement import Measurement, Outcome, held_to
from autotune.records.trial import Trial
from autotune.study.recorded_run import Records
from autotune.study.verdicts.ranking import Rules, measured_ratio, plan_hash, pool, was_run

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Point:
    """Settings, the plan that they made, and what became of it."""

    kind: str
    """Of the trial: `smallest`, `planner`, `search` or `seed`."""
    settings: Settings
    plan: str
    """Its hash: points of the same plan share what was seen of it."""
    estimate: Estimate
    measurement: Measurement
    """All runs of the plan as one; of a plan that the simulator found too large the reason alone."""


@dataclass(frozen=True, slots=True)
class Landscape:
    """One workload on one device under one budget."""

    schema: int
    source: str
    """For people: what was measured or simulated, and with which command."""
    workload: str
    budget: str
    graph: str
    """Digest of the graph."""
    device: Device
    stores: dict[str, StoreCost]
    floor_bytes: int
    budget_bytes: int
    """What the step itself may take."""
    traced_seconds: float
    """Predicted for the step with no plan."""
    capture_error: float | None
    baseline: Measurement
    points: tuple[Point, ...]

    @property
    def known_best(self) -> float:
        """The lowest time over plain eager's of all plans that kept the budget; ConfigError where none did."""
        found = [ratio for point in self.points if (ratio := self.worth(point)) is not None]
        if not found:
            raise ConfigError(f"{self.workload}: no recorded plan was measured within {self.budget}: nothing to find")
        return min(found)

    def worth(self, point: Point) -> float | None:
        """Its time over plain eager's as recorded, over the predicted one where eager does not fit; None where it does not
        count: it failed, or was charged too much.
        """
        seen = held_to(point.measurement, self.budget_bytes)
        return measured_ratio(seen, self.rules) if seen.outcome is Outcome.OK else None

    @property
    def rules(self) -> Rules:
        """What its plans are held to; their results were judged when they were recorded."""
        return Rules(self.budget_bytes, self.floor_bytes, None, self.traced_seconds)

    @property
    def graph_in_name(self) -> TrainGraph:
        """One op that takes what the traced step is predicted to: the planners, which need more, are not asked."""
        op = Op(0, "step", "step", (), (), Phase.FORWARD, "")
        return TrainGraph(self.workload, (op,), (), (), ())

    @property
    def costs_in_name(self) -> Costs:
        """Of that one op; the stores as they were measured."""
        return Costs((self.traced_seconds,), (0,), self.stores)


def read(path: Path) -> Landscape:
    """A landscape's file, or a directory that autotune tune made; ConfigError where it is neither."""
    if path.is_dir():
        return of_run(path)
    return read_whole(
        Landscape, path, schema=SCHEMA, what="landscape", again="give a run's directory, or record it anew"
    )


def of_run(run_dir: Path, source: str = "") -> Landscape:
    """What a run recorded; `source` by default names the run."""
    records = Records.load(run_dir)
    first, rules, traced = records.baseline, records.rules, records.traced
    if first is None or first.measurement is None or rules is None or traced is None or records.device is None:
        raise ConfigError(f"{run_dir}: ended before its first plan; nothing of it can be replayed")
    if records.costs is None or not any(trial.kind == "smallest" for trial in records.trials):
        raise ConfigError(f"{run_dir}: holds no measured plan; nothing of it can be replayed")
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
        baseline=_bare(first.measurement),
        points=tuple(_points(records.trials)),
    )


def write(path: Path, landscape: Landscape) -> None:
    """One line a point, whole or not at all."""
    head = to_json(replace(landscape, points=()))
    del head["points"]
    lines = ",\n".join(json.dumps(to_json(point), separators=(",", ":")) for point in landscape.points)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "points": [\n{lines}\n]}}\n')
    draft.replace(path)


def nearest(points: Sequence[Point], settings: Settings) -> tuple[Point, float]:
    """The recorded point whose settings lie nearest, the first of several, and how far it is."""
    away = [apart(point.settings, settings) for point in points]
    at = min(range(len(points)), key=away.__getitem__)
    return points[at], away[at]


def apart(one: Settings, other: Settings) -> float:
    """How far settings lie from each other: 1 for each kind with another planner, and up to 1 for the same one's knobs.

    Knobs count alike, each by the share of its range (of its logarithm, where it is searched so) that lies between.
    """
    total = 0.0
    for kind in one.keys() | other.keys():
        mine, theirs = one.get(kind, {}), other.get(kind, {})
        if mine.get("planner") != theirs.get("planner"):
            total += 1
        elif planner := KINDS.get(kind, {}).get(str(mine.get("planner"))):
            total += statistics.fmean(_knobs_apart(planner.knobs, mine, theirs) or [0.0])
    return total


def _knobs_apart(
    knobs: Mapping[str, Knob], mine: Mapping[str, KnobValue], theirs: Mapping[str, KnobValue]
) -> list[float]:
    found = []
    for name, knob in knobs.items():
        one, other = mine.get(name), theirs.get(name)
        if one == other:
            found.append(0.0)
        elif isinstance(knob, Choice) or not isinstance(one, (int, float)) or not isinstance(other, (int, float)):
            found.append(1.0)
        elif knob.log:
            found.append(abs(math.log(one / other)) / math.log(knob.high / knob.low))
        else:
            found.append(abs(one - other) / (knob.high - knob.low))
    return found


def _points(trials: Sequence[Trial]) -> list[Point]:
    """A point for each trial of the search."""
    seen: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.plan is not None and trial.kind != "repeat" and trial.measurement is not None:
            seen.setdefault(plan_hash(trial.plan), []).append(trial)
    known = {plan: _as_one(runs) for plan, runs in seen.items()}
    return [
        Point("search" if trial.kind == "repeat" else trial.kind, trial.settings, plan, trial.estimate, known[plan])
        for trial in trials
        if trial.plan is not None and trial.estimate is not None and trial.kind != "confirm"
        if (plan := plan_hash(trial.plan)) in known
    ]


def _as_one(runs: Sequence[Trial]) -> Measurement:
    """The first that went wrong, where one did; else all samples of the search together.

    A confirmation's are left out: eager beside it is another process than the one that all trials of a search share, and
    may be a tenth faster or slower.
    """
    ran = [run for run in runs if was_run(run)] or list(runs)
    wrong = [run.measurement for run in ran if run.measurement and run.measurement.outcome is not Outcome.OK]
    found = wrong[0] if wrong else pool([run for run in ran if run.kind != "confirm"] or ran).measurement
    assert found is not None
    return _bare(found)


def _bare(seen: Measurement) -> Measurement:
    """Without what no search looks at; samples to the microsecond, as no step repeats itself closer."""
    return replace(
        seen,
        detail=seen.detail.partition("\n")[0][:200],
        step_seconds=tuple(round(seconds, 6) for seconds in seen.step_seconds),
        baseline_seconds=tuple(round(seconds, 6) for seconds in seen.baseline_seconds),
        lanes=None,
        device=None,
    )


def _capture_error(run_dir: Path) -> float | None:
    path = run_dir / "study.json"
    found = json.loads(path.read_text())["capture_error"] if path.exists() else 0.0
    return None if found is None else float(found)
