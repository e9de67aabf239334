"""Replay a search on a landscape: run the study itself, with a record in place of the planners and of the device.

Recorded settings get their own plan and measurement. Other settings get those of the nearest recorded settings
(`priors.distance`), so every answer was really measured, and the best possible result is the best on
record. The share of such answers is reported. Each measurement is a new sample of the recorded turns, with their noise.
"""

import contextlib
import itertools
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autotune.errors import ConfigError, InfeasibleError, NumericsError, PlansFailedError, StudyInterruptedError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.early_stop import cannot_beat
from autotune.measure.messages import BLOCK_STEPS
from autotune.measure.survey import PreparedWorkload
from autotune.planners import KINDS
from autotune.planners.candidates import Candidate
from autotune.planners.knobs import Settings
from autotune.planners.space import Space
from autotune.predict.simulate import Estimate
from autotune.records.budget import STEP_PREFIX
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study import session as study
from autotune.study.events import Event, PhaseStarted, StudyPhase
from autotune.study.offline.landscape import Landscape, LandscapePoint, find_nearest
from autotune.study.priors.phase import MODEL_SAMPLERS
from autotune.study.verdicts.ranking import select_leader
from autotune.study.verdicts.statistics import Interval, median_interval

TRIALS_PER_MEASUREMENT = 5
"""Maximum number of trials per measured one, so that a search ends that suggests the same plans again and again."""
PLANNERS_ALONE = "planners"
"""Name of the replay that measures the planners' own plans, without a search."""
LOST_OUTCOMES = frozenset({Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET})


class ReplayEnded(Exception):
    """The replay is complete: enough trials are measured, or every plan on record is, or the search ended by itself."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of one replayed search. Sequences run over the measured trials, without the baseline."""

    sampler: str
    seed: int
    priors: bool
    """True if simulated settings started the sampler."""
    planners: bool
    """True if the planners' own plans were measured first."""
    fastest_gaps: tuple[float, ...]
    """Relative gap of the fastest plan so far to the best on record; infinite while no plan fits."""
    leader_gaps: tuple[float, ...]
    """Relative gap of the leader, which may be slower than the fastest plan in exchange for fewer bytes."""
    lost: tuple[int, ...]
    """Number of trials so far that ran out of memory or over the budget."""
    stopped_early: int
    requests: int
    """Number of settings that the search suggested, repeats and rejected ones included."""
    neighbour_share: float
    """Share of the requests whose settings are not on record, so that the nearest ones answered."""


@dataclass
class RecordedPlanning:
    """Planning from the record: a plan with one op stands for the recorded plan of that number."""

    landscape: Landscape
    planners: bool = True
    """True if the recorded planners' own plans are proposed."""
    counting: bool = True
    """True if calls of `make_candidate` count as requests; simulated settings do not."""
    requests: int = 0
    neighbours: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    unmeasured: set[str] = field(default_factory=set)
    """Hashes of the recorded plans that this search did not measure yet."""

    def __post_init__(self) -> None:
        for point in self.landscape.points:
            self.numbers.setdefault(point.plan, len(self.numbers))
            if point.measurement.outcome is not Outcome.OVER_BUDGET or point.measurement.highest_bytes is not None:
                self.unmeasured.add(point.plan)
        self.searched = [point for point in self.landscape.points if point.kind != TrialKind.SMALLEST]

    def find_smallest(self) -> Candidate:
        return self._candidate(next(point for point in self.landscape.points if point.kind == TrialKind.SMALLEST))

    def propose(self, budget_bytes: int, seconds: float = math.inf) -> Iterator[Candidate]:
        del budget_bytes, seconds  # the record has one budget
        proposed: set[str] = set()
        for point in self.landscape.points:
            if self.planners and point.kind == TrialKind.PLANNER and point.plan not in proposed:
                proposed.add(point.plan)
                yield self._candidate(point)

    def make_candidate(self, settings: Settings, budget_bytes: int) -> Candidate:
        del budget_bytes
        if not self.unmeasured:
            raise ReplayEnded
        point, distance = find_nearest(self.searched, settings)
        self.requests += self.counting
        self.neighbours += self.counting and distance > 0
        return replace(self._candidate(point), settings=settings)

    def estimate_layout(self, candidate: Candidate) -> Estimate:
        return self.find_point(candidate.plan).estimate

    def start_moves(self) -> None:
        """Return no moves: nobody measured the plans that they would make."""

    def find_point(self, plan: Plan) -> LandscapePoint:
        """Return the recorded point that a plan stands for."""
        return next(point for point in self.landscape.points if self.numbers[point.plan] == plan.order[0])

    def _candidate(self, point: LandscapePoint) -> Candidate:
        bare = replace(point.estimate, layout_bytes=0, layout_live_bytes=0, reserved_bytes=0)
        return Candidate(point.settings, Plan((self.numbers[point.plan],)), bare)


@dataclass
class RecordedRunner:
    """Runner that answers from the record."""

    planning: RecordedPlanning
    most: int
    """Number of measurements after which the replay ends."""
    samples: int
    seed: int
    measured: int = 0

    def prepare(self) -> PreparedWorkload:
        record = self.planning.landscape
        fits = record.baseline.outcome is not Outcome.OUT_OF_MEMORY
        graph, costs = record.stand_in_graph, record.stand_in_costs
        return PreparedWorkload(graph, costs, record.device, record.floor_bytes, fits, record.capture_error)

    def baseline(self) -> Measurement:
        return self.planning.landscape.baseline

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Return a measurement with turns sampled from the recorded ones; the study applies the budget."""
        del budget_bytes
        if self.measured == self.most:
            raise ReplayEnded
        self.measured += 1
        point = self.planning.find_point(plan)
        self.planning.unmeasured.discard(point.plan)
        record = point.measurement
        if record.outcome is not Outcome.OK:
            return record
        return _stop_early(self._resample(record, random.Random(f"{self.seed} {self.measured}")), beat)

    def renew(self) -> None:
        """End the replay: re-measurements would only sample the same turns again."""
        raise ReplayEnded

    def close(self) -> None:
        pass

    def _resample(self, record: Measurement, dice: random.Random) -> Measurement:
        steps, eager = record.step_seconds, record.baseline_seconds
        blocks = [range(start, min(start + BLOCK_STEPS, len(steps))) for start in range(0, len(steps), BLOCK_STEPS)]
        sampled = itertools.chain.from_iterable(dice.choices(blocks, k=-(-self.samples // BLOCK_STEPS)))
        indices = list(sampled)[: self.samples]
        baseline = tuple(eager[index] for index in indices) if len(eager) == len(steps) else eager
        return replace(record, step_seconds=tuple(steps[index] for index in indices), baseline_seconds=baseline)


@dataclass(frozen=True)
class ReplayListener:
    """Listener of a replayed study."""

    planning: RecordedPlanning
    planners_alone: bool

    def __call__(self, event: Event) -> None:
        """Count no requests while settings are simulated; ReplayEnded before the search of the planners alone."""
        if not isinstance(event, PhaseStarted):
            return
        self.planning.counting = event.phase is not StudyPhase.PRIORS
        if self.planners_alone and event.phase in (StudyPhase.PRIORS, StudyPhase.SEARCH):
            raise ReplayEnded


def replay(
    landscape: Landscape, sampler: str, seed: int, trials: int, *, priors: bool = True, planners: bool = True
) -> ReplayResult:
    """Search a landscape as `autotune tune` would, until `trials` trials are measured.

    The study does not end for lack of a gain, so that searches are compared after the same number of trials.

    Args:
        landscape: the record that answers.
        sampler: a config's sampler, or `planners` to measure the planners' own plans and nothing else.
        seed: seed of the sampler and of the measurements' noise.
        trials: number of measured trials after which the replay ends.
        priors: whether simulated settings start the sampler; simulating one gives the recorded estimate.
        planners: whether the planners' own plans are measured first, as `autotune tune` does.
    """
    best = landscape.best_ratio
    alone = sampler == PLANNERS_ALONE
    planning = RecordedPlanning(landscape, planners=planners or alone)
    listener = ReplayListener(planning, planners_alone=alone)
    runner = RecordedRunner(planning, trials, samples=10, seed=seed)
    with tempfile.TemporaryDirectory(prefix="autotune-replay-") as folder:
        run_dir = Path(folder) / "run"
        # the figures show that no plan fitted
        with contextlib.suppress(ReplayEnded, PlansFailedError, InfeasibleError, NumericsError):
            config = _config(landscape, "random" if alone else sampler, seed, trials, Path(folder), priors=priors)
            reuse = partial(_reuse_planning, planning)
            result = study.tune(config, runner, run_dir, progress=listener, planning=reuse, lasting=False)
            if result.interrupted:  # a search that was cut short is no result of its sampler
                raise StudyInterruptedError("interrupted; no replay is complete", result.interrupted)
        recorded = load_trials(RunDir(run_dir).trials)
    ran = [trial for trial in recorded if trial.plan is not None and trial.kind != TrialKind.REPEAT and trial.was_run]
    outcomes = [trial.measurement.outcome for trial in ran if trial.measurement is not None]
    gaps = [_gap(best, planning, trial) for trial in ran]
    counts = range(1, len(ran) + 1)
    return ReplayResult(
        sampler=sampler,
        seed=seed,
        priors=priors and sampler in MODEL_SAMPLERS,
        planners=planning.planners,
        fastest_gaps=tuple(min(gaps[:count]) for count in counts),
        leader_gaps=tuple(_gap(best, planning, select_leader(ran[:count], landscape.rules)) for count in counts),
        lost=tuple(sum(outcome in LOST_OUTCOMES for outcome in outcomes[:count]) for count in counts),
        stopped_early=outcomes.count(Outcome.STOPPED_EARLY),
        requests=planning.requests,
        neighbour_share=planning.neighbours / planning.requests if planning.requests else 0.0,
    )


def _config(landscape: Landscape, sampler: str, seed: int, trials: int, folder: Path, *, priors: bool) -> Config:
    """Return the config of the replayed study: the recorded planners that this version has, limited by trials alone."""
    names: dict[str, list[str]] = {}
    for kind, planners in KINDS.items():
        used = {str(point.settings.get(kind, {}).get("planner")) for point in landscape.points}
        if not (usable := [name for name in planners if name in used]):
            raise ConfigError(
                f"{landscape.workload}: this version has no {kind} planner of the record; record it again"
            )
        names[kind] = usable
    budget_bytes, has_tolerance = landscape.budget_bytes, landscape.budget_tolerance > 0
    return Config.model_validate(
        {
            "workload": landscape.workload,
            "budget": f"{STEP_PREFIX}{budget_bytes}B" if has_tolerance else f"{landscape.floor_bytes + budget_bytes}B",
            "planners": names,
            "sampler": sampler,
            "priors": priors,
            "seed": seed,
            "trials": TRIALS_PER_MEASUREMENT * trials,
            "time": "1000h",
            "patience": TRIALS_PER_MEASUREMENT * trials,
            "plans": str(folder / "plans"),
            "runs": str(folder),
        }
    )


def _reuse_planning(planning: RecordedPlanning, graph: TrainGraph, costs: Costs, searched: Space) -> RecordedPlanning:
    del graph, costs, searched
    return planning


def _gap(best: float, planning: RecordedPlanning, trial: Trial | None) -> float:
    """Return the relative gap of a plan's recorded time to the best on record; infinite where the plan failed."""
    ratio = (
        None if trial is None or trial.plan is None else planning.landscape.ratio_of(planning.find_point(trial.plan))
    )
    return math.inf if ratio is None else ratio / best - 1


def _stop_early(measurement: Measurement, beat: float | None) -> Measurement:
    """Cut a measurement off once its first blocks are hopeless, as the harness does."""
    if beat is None:
        return measurement
    for steps in range(BLOCK_STEPS, len(measurement.step_seconds), BLOCK_STEPS):
        first, baseline = measurement.step_seconds[:steps], measurement.baseline_seconds[:steps]
        if cannot_beat(first, baseline, beat):
            return replace(measurement, outcome=Outcome.STOPPED_EARLY, step_seconds=first, baseline_seconds=baseline)
    return measurement


def summarize_regret(replays: Sequence[ReplayResult], count: int) -> Interval:
    """Return the median over seeds of the fastest plan's gap after `count` measured trials, with its interval.

    A replay that ended earlier keeps its last gap; one without a measured trial has none, which is infinite.
    """
    gaps = [
        replay.fastest_gaps[min(count, len(replay.fastest_gaps)) - 1] if replay.fastest_gaps else math.inf
        for replay in replays
    ]
    return median_interval(gaps)


def trials_until_near(replay: ReplayResult, gap: float) -> float:
    """Return the number of measured trials after which the fastest plan is within `gap` of the best; infinite if never."""
    return next((number for number, regret in enumerate(replay.fastest_gaps, 1) if regret <= gap), math.inf)
