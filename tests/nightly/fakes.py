"""A night without a device: plans of a fixed pace, recorded noise, a clock that only measurements advance, a fake search."""

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.conditions import MachineConditions
from autotune.nightly.config import NightlyConfig, NightlyEntry
from autotune.nightly.diagnosis import Conditions
from autotune.nightly.history import EntryDirectory, NightRecord
from autotune.nightly.night import NightJob, run_night
from autotune.nightly.results import NightResults
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.records.trial import Trial, TrialKind
from autotune.study.outcome import StudyResult
from autotune.study.runner import Runner
from autotune.study.verdicts.ranking import plan_hash
from autotune.testing.fake_runner import DEVICE, FLOOR_BYTES, FakeRunner
from autotune.testing.graphs import training_chain
from autotune.workloads.reference import WorkloadRef

GRAPH = training_chain(8, nbytes=100_000, param_bytes=5_000)
CHAMPION = Plan.traced(GRAPH)
CHALLENGER = replace(CHAMPION, allocator="arena")
NOISE: dict[str, list[float]] = json.loads((Path(__file__).parents[1] / "data" / "noise.json").read_text())["ratios"]
ROUND_SECONDS = 45.0
"""Duration of one ResNet-18 measurement: three child processes, a comparison of results, forty steps of each side."""
BLOCKS = 10


def recorded(name: str, seed: object) -> Iterator[float]:
    """Yield recorded ratios in runs of four neighbours, which keep bursts of noise together."""
    dice, ratios = random.Random(f"{name} {seed}"), NOISE[name]
    while True:
        start = dice.randrange(len(ratios))
        yield from (ratios[(start + step) % len(ratios)] for step in range(4))


def quiet() -> Iterator[float]:
    """One part in a thousand, up and down."""
    while True:
        yield from (1.0, 1.001, 0.999, 1.0)


class Clock:
    """Seconds that pass only while something is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class PacedRunner(FakeRunner):
    """Plans take `pace` of plain eager's time."""

    graph: Any = GRAPH
    clock: Clock = field(default_factory=Clock)
    pace: dict[Plan, float] = field(default_factory=dict)
    noise: Iterator[float] = field(default_factory=quiet)
    plans: list[Plan] = field(default_factory=list)
    """Measured plans, in order."""
    extra_bytes: int = 0
    eager_seconds: float = 1.0

    def baseline(self) -> Measurement:
        return Measurement(Outcome.OK, step_seconds=(self.eager_seconds,) * 4, device=DEVICE)

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        self.clock.now += ROUND_SECONDS
        self.measured.append(plan_hash(plan))
        self.plans.append(plan)
        self.before_measure(self)
        outcome = self.outcome_of(plan)
        if outcome is not Outcome.OK:
            return Measurement(outcome, f"the worker said {outcome}", device=DEVICE)
        pace = self.pace.get(plan, 1.0)
        blocks = [pace * next(self.noise) for _ in range(BLOCKS)]
        return Measurement(
            Outcome.OK,
            charged_bytes=FLOOR_BYTES + 800_000 + self.extra_bytes,
            floor_bytes=FLOOR_BYTES,
            step_seconds=tuple(block for block in blocks for _ in range(2)),
            baseline_seconds=(1.0,) * 2 * BLOCKS,
            max_error=self.error_of(plan),
            device=DEVICE,
            disturbed="other processes used 50 % of the CPUs" if self.disturbed(len(self.measured)) else "",
        )


def plan_file(plan: Plan, graph: Any = GRAPH) -> PlanFile:
    expected = simulate(graph, lower(graph, plan))
    return PlanFile(
        WorkloadRef("chain"), graph.digest, "65%", 10_000_000, FLOOR_BYTES, {}, plan, expected, DEVICE
    )  # fmt: skip


@dataclass
class FakeSearch:
    """Finds one plan, which it measured once."""

    finds: Plan | None = None
    ratio: float = 0.9
    graph: Any = GRAPH
    configs: list[Config] = field(default_factory=list)
    error: Exception | None = None
    interrupted: int = 0

    def __call__(self, config: Config, runner: Runner, run_dir: Path) -> StudyResult:
        self.configs.append(config)
        if self.error is not None:
            raise self.error
        baseline = Trial(0, TrialKind.BASELINE, "chain", self.graph.digest)
        best = None
        if self.finds is not None:
            file = plan_file(self.finds, self.graph)
            planfile.write(run_dir / "plan.json", file)
            measurement = Measurement(Outcome.OK, step_seconds=(self.ratio,), baseline_seconds=(1.0,))
            best = Trial(
                1, TrialKind.SEARCH, "chain", self.graph.digest, plan=self.finds, estimate=file.estimate, measurement=measurement
            )  # fmt: skip
        runner.close()
        return StudyResult(baseline, best, (baseline,), 0, 0, None, None, self.interrupted)


@dataclass
class Bench:
    """Everything that a night needs, to be turned between nights."""

    directory: Path
    runner: PacedRunner = field(default_factory=PacedRunner)
    search: FakeSearch = field(default_factory=FakeSearch)
    conditions: Conditions = field(default_factory=Conditions)
    opened: list[str] = field(default_factory=list)

    def options(self, *names: str, budget: str = "65%", **fields: Any) -> NightlyConfig:
        entries = [
            NightlyEntry(workload="chain", name=name, time="5m", refine=self.refines, budget=budget)
            for name in names or ("chain",)
        ]
        return NightlyConfig(entries=entries, directory=str(self.directory / "nightly"), **fields)

    refines: bool = True

    @contextlib.contextmanager
    def open(self, entry: NightlyEntry, log_dir: Path) -> Iterator[PacedRunner]:
        self.opened.append(entry.key)
        yield self.runner

    def run(
        self, name: str, options: NightlyConfig | None = None, tell: Callable[[NightRecord], None] | None = None
    ) -> NightResults:
        job = NightJob(
            options or self.options(), Path("night.yaml"), self.open, self.search, tell or (lambda night: None)
        )
        return run_night(job, name)

    def night(self, name: str) -> NightRecord:
        """Run a night of one entry."""
        (night,) = self.run(name).nights
        return night

    def home(self, name: str = "chain") -> EntryDirectory:
        return EntryDirectory(self.directory / "nightly" / name)

    def crown(self, plan: Plan = CHAMPION, nights: Sequence[str] = ("n0", "n1", "n2", "n3")) -> None:
        """Let a champion have good nights."""
        planfile.write(self.home().champion, plan_file(plan))
        for name in nights:
            self.night(name)


def make_bench(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench with a fake clock and fixed conditions of the machine."""
    bench = Bench(directory)
    clock = bench.runner.clock
    fake_time = SimpleNamespace(monotonic=clock.monotonic, time=lambda: 1e9 + clock.now)
    monkeypatch.setattr("autotune.nightly.entry.time", fake_time)
    monkeypatch.setattr("autotune.nightly.night.time", fake_time)
    monkeypatch.setattr("autotune.nightly.rounds.time", fake_time)

    def fixed_conditions(
        machine: MachineConditions, device: Any, digest: str, *, baseline_seconds: float | None
    ) -> Conditions:
        code = {**bench.conditions.code, "graph": digest[:12]}
        return replace(bench.conditions, code=code, baseline_seconds=baseline_seconds)

    monkeypatch.setattr("autotune.nightly.entry.collect_conditions", fixed_conditions)
    return bench
