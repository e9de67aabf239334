"""Run a study without a device: results are the simulator's, with allocator overhead and noisy times.

A study needs a `Runner`, and this one answers in milliseconds. It tests a planner, a sampler, a listener or a tracker in
a whole study, with failures at will:

    from pathlib import Path

    from autotune.records.config import load_config
    from autotune.study.session import tune
    from autotune.testing.fake_runner import FakeRunner

    config = load_config("resnet18", overrides={"trials": 8, "budget": "65%", "plans": "plans"})
    result = tune(config, FakeRunner(), Path("runs/fake"))

The config's workload is a name only: the graph that is tuned is the runner's own.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.conditions import MachineConditions
from autotune.measure.early_stop import MIN_STEPS, cannot_beat
from autotune.measure.survey import PreparedWorkload
from autotune.predict.simulate import simulate
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.study.verdicts.ranking import plan_hash
from autotune.testing.graphs import training_chain

FLOOR_BYTES = 1_000_000
"""Bytes of the idle process."""
DEVICE = Device("cpu", "Fake 9000", 2**34, 2, "2.13.0")
"""Device that the measurements name."""


@dataclass
class FakeRunner:
    """Runner that answers from the simulator. Set the fields before the study; read the lists after it.

    >>> runner = FakeRunner(overhead=0.0, spread=0.0)
    >>> plan = Plan.traced(runner.graph)
    >>> result = runner.measure(plan, budget_bytes=10**9)
    >>> result.outcome.value, result.charged_bytes == result.peak_bytes, len(runner.measured)
    ('ok', True, 1)
    """

    graph: TrainGraph = field(default_factory=lambda: training_chain(40, nbytes=100_000, param_bytes=5_000))
    """Graph of the step; every op takes one to three milliseconds."""
    overhead: float = 0.02
    """Allocator overhead, as a share of a plan's peak bytes."""
    spread: float = 0.002
    """Range of a plan's charge over processes, as a share of its peak bytes; seeded by plan and process."""
    floor_bytes: int = FLOOR_BYTES
    """Bytes of this runner's idle process."""
    store: bool = False
    """True if plans may offload to a store named `ssd`."""
    baseline_fits: bool = True
    """True if plain eager fits in memory."""
    outcome_of: Callable[[Plan], Outcome] = lambda plan: Outcome.OK
    """Outcome of each plan; anything but OK gives a measurement without numbers."""
    error_of: Callable[[Plan], float] = lambda plan: 0.0
    """Numerical error of each plan, as a share of the accepted bound."""
    slowdown_of: Callable[[Plan], float] = lambda plan: 1.01
    """Step time of each plan over the simulator's prediction."""
    disturbed: Callable[[int], bool] = lambda number: False
    """True if other work disturbs the measurement of this number, counted from 1; the plan's times are then doubled."""
    before_measure: Callable[["FakeRunner"], None] = lambda runner: None
    """Hook before each measurement, for example to send a signal or to raise an error."""
    measured: list[str] = field(default_factory=list)
    """Hashes of the measured plans, in order."""
    budgets: list[int] = field(default_factory=list)
    """Budget in bytes of each measurement."""
    beats: list[float | None] = field(default_factory=list)
    """Time ratio above which each measurement may stop early."""
    renewed: int = 0
    """Number of calls of `renew`."""
    closed: int = 0
    """Number of calls of `close`."""
    aborted: int = 0
    """Number of calls of `abort`."""

    @property
    def costs(self) -> Costs:
        """Costs of the ops, and of the store if there is one."""
        seconds = tuple(0.001 * (1 + op.id % 3) for op in self.graph.ops)
        stores = {"ssd": StoreCost(5e7, 5e7, 3e7, 3e7)} if self.store else {}
        return Costs(seconds, (0,) * len(self.graph.ops), stores)

    def prepare(self) -> PreparedWorkload:
        """Return graph, costs and floor."""
        return PreparedWorkload(self.graph, self.costs, DEVICE, self.floor_bytes, self.baseline_fits, 0.0)

    def baseline(self) -> Measurement:
        """Return the measurement of plain eager, which names no device, as the harness's does not."""
        traced = Plan.traced(self.graph)
        first = self._simulate(traced, slowdown=1.0, error=0.0)
        charges = tuple(self.floor_bytes + self._charge(traced, f"baseline {number}") for number in range(2))
        return replace(first, charged_bytes=charges[0], process_charged_bytes=charges, device=None)

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Return the measurement of a plan, stopped early where it cannot reach the ratio `beat`."""
        self.measured.append(plan_hash(plan))
        self.budgets.append(budget_bytes)
        self.beats.append(beat)
        self.before_measure(self)
        outcome = self.outcome_of(plan)
        if outcome is not Outcome.OK:
            return Measurement(outcome, f"the worker said {outcome}", device=DEVICE)
        disturbed = "other processes used 50 % of the CPUs" if self.disturbed(len(self.measured)) else ""
        slowdown = self.slowdown_of(plan) * (2 if disturbed else 1)
        result = replace(self._simulate(plan, slowdown=slowdown, error=self.error_of(plan)), disturbed=disturbed)
        for count in range(MIN_STEPS, len(result.step_seconds)):
            steps, eager = result.step_seconds[:count], result.baseline_seconds[:count]
            if beat is not None and cannot_beat(steps, eager, beat):
                return replace(result, outcome=Outcome.STOPPED_EARLY, step_seconds=steps, baseline_seconds=eager)
        return result

    def renew(self) -> None:
        """Count the call."""
        self.renewed += 1

    def close(self) -> None:
        """Count the call."""
        self.closed += 1

    def abort(self) -> None:
        """Count the call."""
        self.aborted += 1

    def reset(self) -> None:
        """Do nothing; `abort` ends nothing either."""

    def conditions(self) -> MachineConditions:
        """Return conditions that never change."""
        return MachineConditions("fake", {"autotune": "fake"}, {"kernel": "fake"})

    def _simulate(self, plan: Plan, *, slowdown: float, error: float) -> Measurement:
        estimate = simulate(self.graph, lower(self.graph, plan), self.costs)
        eager = sum(self.costs.seconds)
        jitter = random.Random(f"{plan_hash(plan)} {len(self.measured)}")
        return Measurement(
            Outcome.OK,
            peak_bytes=self.floor_bytes + estimate.peak_bytes,
            charged_bytes=self.floor_bytes + self._charge(plan, str(self.renewed)),
            floor_bytes=self.floor_bytes,
            step_seconds=tuple(estimate.seconds * slowdown * jitter.gauss(1, 0.003) for _ in range(8)),
            baseline_seconds=tuple(eager * jitter.gauss(1, 0.003) for _ in range(8)),
            stall_seconds=estimate.stall_seconds,
            transfer_bytes=estimate.transfer_bytes,
            max_error=error,
            verified="" if error else "bit-equal to eager",
            meter="fake",
            device=DEVICE,
        )

    def _charge(self, plan: Plan, process: str) -> int:
        """Return the charge of a plan's step in one process, without the floor."""
        peak_bytes = simulate(self.graph, lower(self.graph, plan), self.costs).peak_bytes
        excess = self.spread * random.Random(f"{plan_hash(plan)} {process}").random()
        return int(peak_bytes * (1 + self.overhead + excess))
