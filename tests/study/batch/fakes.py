"""A workload without a device: a chain whose activations grow with the batch size, on runners that enforce the limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from autotune.capture.fake.sized_step import CapturedStep
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.predict.simulate import peak_bytes
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.study.batch.choice import BatchSources
from autotune.study.batch.records import StepSize
from autotune.study.batch.sized_steps import SizedSteps
from autotune.study.captures import CaptureRunner
from autotune.testing.fake_runner import FLOOR_BYTES, FakeRunner
from autotune.testing.graphs import training_chain
from autotune.workloads.batch_argument import BatchArgument
from autotune.workloads.loop import Loop

OWN = 8
"""Batch size of the workload's config."""


def graph_of(batch: int) -> TrainGraph:
    return training_chain(9, nbytes=10_000 * batch, param_bytes=50_000)


def traced_bytes(batch: int, of: Callable[[int], TrainGraph] = graph_of) -> int:
    graph = of(batch)
    return peak_bytes(graph, Plan.traced(graph), Costs.unit(graph))


@dataclass
class FakeWorkload:
    """Graph, costs and speed of the workload by batch size; the lists record what was measured."""

    graph_of: Callable[[int], TrainGraph] = graph_of
    overhead: float = 0.02
    seconds_of: Callable[[StepSize], float] = lambda size: 0.01 + 0.001 * size.samples
    """Seconds of one update."""
    loop: Loop = field(default_factory=Loop)
    has_updates: bool = True
    floor_of: Callable[[int], int] = lambda batch: FLOOR_BYTES
    """Bytes of the idle process that measures a batch size."""
    before_measure: Callable[[StepSize], None] = lambda size: None
    planned: list[StepSize] = field(default_factory=list)
    """Sizes whose plans were measured."""
    eager: list[StepSize] = field(default_factory=list)
    """Sizes at which plain eager was measured."""
    limits: set[str | None] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> BatchSources:
        return BatchSources(self.open, self.notes.append, self.capture, lambda *_: BatchArgument("batch", OWN))

    def costs_of(self, batch: int, accumulate: int = 1) -> Costs:
        graph = self.graph_of(batch)
        seconds = self.seconds_of(StepSize(batch, accumulate)) / accumulate
        return Costs((seconds / len(graph.ops),) * len(graph.ops), (0,) * len(graph.ops))

    def capture(self, config: Config, argument: str, size: int, loop: str | None = None) -> SizedSteps:
        words = self.loop if loop is None else Loop.parse(loop)

        def capture(batch: int) -> CapturedStep:
            return CapturedStep(self.graph_of(batch), self.costs_of(batch, words.accumulate), words, self.has_updates)

        return SizedSteps(capture, lambda batch: traced_bytes(batch, self.graph_of), size)

    @contextmanager
    def open(self, config: Config) -> Iterator[CaptureRunner]:
        batch = config.arguments["batch"]
        assert isinstance(batch, int)
        size = StepSize(batch, Loop.parse(config.loop).accumulate if config.loop else self.loop.accumulate)
        yield LimitedRunner(
            graph=self.graph_of(batch),
            overhead=self.overhead,
            spread=0.0,
            floor_bytes=self.floor_of(batch),
            workload=self,
            size=size,
            config=config,
        )


@dataclass
class LimitedRunner(FakeRunner):
    """Runner of one size that ends a step whose charge exceeds the limit, as the kernel does."""

    workload: FakeWorkload = field(default_factory=FakeWorkload)
    size: StepSize = field(default_factory=lambda: StepSize(OWN))
    config: Config | None = None

    @property
    def costs(self) -> Costs:
        return self.workload.costs_of(self.size.batch, self.size.accumulate)

    def prepare(self) -> PreparedWorkload:
        return replace(super().prepare(), baseline_fits=self.baseline().outcome is Outcome.OK)

    def baseline(self) -> Measurement:
        if self.size not in self.workload.eager:
            self.workload.eager.append(self.size)
        return self._enforce(super().baseline())

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        self.workload.before_measure(self.size)
        assert self.config is not None
        self.workload.limits.add(self.config.limit)
        self.workload.planned.append(self.size)
        return self._enforce(super().measure(plan, budget_bytes=budget_bytes, beat=beat))

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        raise AssertionError("every size has its own baseline")

    def _enforce(self, measurement: Measurement) -> Measurement:
        limit = self.config.parsed_budget.nbytes if self.config is not None else None  # without the room for page cache
        if limit is not None and (measurement.charged_bytes or 0) > limit:
            return Measurement(Outcome.OUT_OF_MEMORY, "killed at the limit")
        return measurement


def charge_of_eager(batch: int, workload: FakeWorkload) -> int:
    """Bytes of eager's process."""
    return FLOOR_BYTES + int(traced_bytes(batch, workload.graph_of) * (1 + workload.overhead))
