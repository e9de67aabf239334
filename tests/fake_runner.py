"""A runner without a device: what the simulator predicts, with an allocator that wastes and a clock that jitters."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.early_stop import RACED, hopeless
from autotune.measure.survey import Prepared
from autotune.predict.simulate import simulate
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.study.verdicts.ranking import plan_hash
from tests.graphs import training_chain

FLOOR_BYTES = 1_000_000
DEVICE = Device("cpu", "Fake 9000", 2**34, 2, "2.13.0")


@dataclass
class FakeRunner:
    graph: TrainGraph = field(default_factory=lambda: training_chain(40, nbytes=100_000, param_bytes=5_000))
    waste: float = 0.02
    store: bool = False
    baseline_fits: bool = True
    outcome_of: Callable[[Plan], Outcome] = lambda plan: Outcome.OK
    error_of: Callable[[Plan], float] = lambda plan: 0.0
    slower_of: Callable[[Plan], float] = lambda plan: 1.01
    """Of the simulator's seconds."""
    before_measure: Callable[["FakeRunner"], None] = lambda runner: None
    measured: list[str] = field(default_factory=list)
    """Hashes of the plans that reached the device, in turn."""
    budgets: list[int] = field(default_factory=list)
    beats: list[float | None] = field(default_factory=list)
    renewed: int = 0
    closed: int = 0

    @property
    def costs(self) -> Costs:
        seconds = tuple(0.001 * (1 + op.id % 3) for op in self.graph.ops)
        stores = {"ssd": StoreCost(5e7, 5e7, 3e7, 3e7)} if self.store else {}
        return Costs(seconds, (0,) * len(self.graph.ops), stores)

    def prepare(self) -> Prepared:
        return Prepared(self.graph, self.costs, DEVICE, FLOOR_BYTES, self.baseline_fits, 0.0)

    def baseline(self) -> Measurement:
        # as the harness, which says of plans alone what they ran on
        return replace(self._look(Plan.traced(self.graph), slower=1.0, error=0.0), device=None)

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        self.measured.append(plan_hash(plan))
        self.budgets.append(budget_bytes)
        self.beats.append(beat)
        self.before_measure(self)
        outcome = self.outcome_of(plan)
        if outcome is not Outcome.OK:
            return Measurement(outcome, f"the worker said {outcome}", device=DEVICE)
        seen = self._look(plan, slower=self.slower_of(plan), error=self.error_of(plan))
        first, beside = seen.step_seconds[:RACED], seen.baseline_seconds[:RACED]
        if beat is None or not hopeless(first, beside, beat):
            return seen
        return replace(seen, outcome=Outcome.STOPPED_EARLY, step_seconds=first, baseline_seconds=beside)

    def renew(self) -> None:
        self.renewed += 1

    def close(self) -> None:
        self.closed += 1

    def _look(self, plan: Plan, *, slower: float, error: float) -> Measurement:
        seen = simulate(self.graph, lower(self.graph, plan), self.costs)
        eager = sum(self.costs.seconds)
        jitter = random.Random(f"{plan_hash(plan)} {len(self.measured)}")
        return Measurement(
            Outcome.OK,
            peak_bytes=FLOOR_BYTES + seen.peak_bytes,
            charged_bytes=FLOOR_BYTES + int(seen.peak_bytes * (1 + self.waste)),
            floor_bytes=FLOOR_BYTES,
            step_seconds=tuple(seen.seconds * slower * jitter.gauss(1, 0.003) for _ in range(8)),
            baseline_seconds=tuple(eager * jitter.gauss(1, 0.003) for _ in range(8)),
            stall_seconds=seen.stall_seconds,
            transfer_bytes=seen.transfer_bytes,
            max_error=error,
            verified="" if error else "bit-equal to eager",
            meter="fake",
            device=DEVICE,
        )
