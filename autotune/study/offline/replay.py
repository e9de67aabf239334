"""A search tried on a landscape: the study itself, with a record in place of the planners and of the device.

Settings that were recorded get their own plan and measurement, all others those of the nearest recorded settings
(`landscape.apart`), so that whatever a sampler asks for is answered by something that was really measured and the best
that it can find is the best on record. How many were answered by a neighbour is told. A measurement is drawn anew from
the recorded turns each time, with the noise that they had.
"""

import contextlib
import itertools
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autotune.errors import ConfigError, InfeasibleError, NumericsError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.early_stop import hopeless
from autotune.measure.survey import Prepared
from autotune.planners import KINDS
from autotune.planners.candidates import Candidate
from autotune.planners.knobs import Settings
from autotune.planners.space import Space
from autotune.predict.simulate import Estimate
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, load
from autotune.study import session as study
from autotune.study.offline.landscape import Landscape, Point, nearest
from autotune.study.verdicts.ranking import leader, was_run
from autotune.study.verdicts.statistics import BLOCK

ASKED = 5
"""Trials that a replay may take for each one that is measured: where a search asks for the same plans again and again, it
ends."""
LOST = frozenset({Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET})


class Enough(Exception):
    """As many trials were measured as were asked for, every plan on record was, or the search ended by itself."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one search came to. Lists run over the measured trials, the baseline not counted."""

    sampler: str
    seed: int
    found: tuple[float, ...]
    """How far the fastest plan so far lies above the best on record, relative; infinite while none fitted."""
    chosen: tuple[float, ...]
    """The same of the plan that leads, which may give up time for bytes."""
    lost: tuple[int, ...]
    """Trials so far that ran out of memory or over the budget."""
    stopped_early: int
    asked: int
    """Settings that the search asked for, those of plans that it knew and those that the simulator refused among them."""
    neighbours: float
    """Share of those that were answered by their nearest neighbour."""


@dataclass
class Answers:
    """Planning by the record: a plan stands for a recorded one, and its only op is the number of that."""

    landscape: Landscape
    asked: int = 0
    neighbours: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Plans that were measured on the device, and not yet in this search."""

    def __post_init__(self) -> None:
        for point in self.landscape.points:
            self.numbers.setdefault(point.plan, len(self.numbers))
            if point.measurement.outcome is not Outcome.OVER_BUDGET or point.measurement.peak_bytes is not None:
                self.left.add(point.plan)
        self.searched = [point for point in self.landscape.points if point.kind != "smallest"]

    def smallest(self) -> Candidate:
        return self._candidate(next(point for point in self.landscape.points if point.kind == "smallest"))

    def answers(self, budget_bytes: int) -> Iterator[Candidate]:
        del budget_bytes  # the record was made for its own
        known: set[str] = set()
        for point in self.landscape.points:
            if point.kind == "planner" and point.plan not in known:
                known.add(point.plan)
                yield self._candidate(point)

    def made(self, settings: Settings, budget_bytes: int) -> Candidate:
        del budget_bytes
        if not self.left:
            raise Enough
        point, away = nearest(self.searched, settings)
        self.asked += 1
        self.neighbours += away > 0
        return replace(self._candidate(point), settings=settings)

    def laid_out(self, made: Candidate) -> Estimate:
        return self.point(made.plan).estimate

    def point(self, plan: Plan) -> Point:
        """What the plan stands for."""
        return next(point for point in self.landscape.points if self.numbers[point.plan] == plan.order[0])

    def _candidate(self, point: Point) -> Candidate:
        bare = replace(point.estimate, layout_bytes=0, layout_live_bytes=0)
        return Candidate(point.settings, Plan((self.numbers[point.plan],)), bare)


@dataclass
class Recorded:
    """A runner that answers from the record."""

    answers: Answers
    most: int
    """Measurements, after which it is enough."""
    samples: int
    seed: int
    measured: int = 0

    def prepare(self) -> Prepared:
        known = self.answers.landscape
        fits = known.baseline.outcome is not Outcome.OUT_OF_MEMORY
        return Prepared(
            known.graph_in_name, known.costs_in_name, known.device, known.floor_bytes, fits, known.capture_error
        )

    def baseline(self) -> Measurement:
        return self.answers.landscape.baseline

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """A measurement with turns drawn from the recorded ones; whoever judges it knows the budget."""
        del budget_bytes
        if self.measured == self.most:
            raise Enough
        self.measured += 1
        point = self.answers.point(plan)
        self.answers.left.discard(point.plan)
        seen = point.measurement
        if seen.outcome is not Outcome.OK:
            return seen
        return _raced(self._drawn(seen, random.Random(f"{self.seed} {self.measured}")), beat)

    def renew(self) -> None:
        """The search is over: what follows is its confirmation, which more draws of the same turns would not be."""
        raise Enough

    def close(self) -> None:
        pass

    def _drawn(self, seen: Measurement, dice: random.Random) -> Measurement:
        steps, eager = seen.step_seconds, seen.baseline_seconds
        blocks = [range(at, min(at + BLOCK, len(steps))) for at in range(0, len(steps), BLOCK)]
        picked = itertools.chain.from_iterable(dice.choices(blocks, k=-(-self.samples // BLOCK)))
        chosen = list(picked)[: self.samples]
        beside = tuple(eager[at] for at in chosen) if len(eager) == len(steps) else eager
        return replace(seen, step_seconds=tuple(steps[at] for at in chosen), baseline_seconds=beside)


def replay(landscape: Landscape, sampler: str, seed: int, trials: int) -> Replayed:
    """Search `landscape` as `autotune tune` would, until so many trials were measured. The no-gain rule is left out:
    searches are compared after as many trials each.
    """
    best = landscape.known_best
    answers = Answers(landscape)
    runner = Recorded(answers, trials, samples=10, seed=seed)
    with tempfile.TemporaryDirectory(prefix="autotune-replay-") as folder:
        run_dir = Path(folder) / "run"
        # that no plan was found to fit is told by the figures
        with contextlib.suppress(Enough, InfeasibleError, NumericsError):
            config = _config(landscape, sampler, seed, trials, Path(folder))
            study.tune(config, runner, run_dir, planning=partial(_planning, answers), lasting=False)
        done = load(run_dir / "trials.jsonl")
    ran = [trial for trial in done if trial.plan is not None and trial.kind != "repeat" and was_run(trial)]
    outcomes = [trial.measurement.outcome for trial in ran if trial.measurement is not None]
    gaps = [_above(best, answers, trial) for trial in ran]
    counts = range(1, len(ran) + 1)
    return Replayed(
        sampler=sampler,
        seed=seed,
        found=tuple(min(gaps[:count]) for count in counts),
        chosen=tuple(_above(best, answers, leader(ran[:count], landscape.rules)) for count in counts),
        lost=tuple(sum(outcome in LOST for outcome in outcomes[:count]) for count in counts),
        stopped_early=outcomes.count(Outcome.STOPPED_EARLY),
        asked=answers.asked,
        neighbours=answers.neighbours / answers.asked if answers.asked else 0.0,
    )


def _config(landscape: Landscape, sampler: str, seed: int, trials: int, folder: Path) -> Config:
    """Of the replayed study: the recorded planners, as far as this version has them, and nothing but trials to end it."""
    names: dict[str, list[str]] = {}
    for kind, known in KINDS.items():
        used = {str(point.settings.get(kind, {}).get("planner")) for point in landscape.points}
        if not (kept := [name for name in known if name in used]):
            raise ConfigError(f"{landscape.workload}: no {kind} planner on record is known here; record it anew")
        names[kind] = kept
    return Config.model_validate(
        {
            "workload": landscape.workload,
            "budget": f"{landscape.floor_bytes + landscape.budget_bytes}B",
            "planners": names,
            "sampler": sampler,
            "seed": seed,
            "trials": ASKED * trials,
            "time": "1000h",
            "patience": ASKED * trials,
            "plans": str(folder / "plans"),
            "runs": str(folder),
        }
    )


def _planning(answers: Answers, graph: TrainGraph, costs: Costs, searched: Space) -> Answers:
    del graph, costs, searched
    return answers


def _above(best: float, answers: Answers, trial: Trial | None) -> float:
    """How far the plan's recorded time lies above the best on record, relative; infinite where it does not count."""
    worth = None if trial is None or trial.plan is None else answers.landscape.worth(answers.point(trial.plan))
    return math.inf if worth is None else worth / best - 1


def _raced(seen: Measurement, beat: float | None) -> Measurement:
    """As the harness does: given up as soon as its first blocks cannot beat what they have to."""
    if beat is None:
        return seen
    for steps in range(BLOCK, len(seen.step_seconds), BLOCK):
        first, beside = seen.step_seconds[:steps], seen.baseline_seconds[:steps]
        if hopeless(first, beside, beat):
            return replace(seen, outcome=Outcome.STOPPED_EARLY, step_seconds=first, baseline_seconds=beside)
    return seen
