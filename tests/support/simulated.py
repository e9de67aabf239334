"""A harness that captures the workload in this process and measures what the simulator predicts."""

from collections.abc import Callable
from typing import Self

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.this_device import this_device
from autotune.measure.messages import WorkProgress
from autotune.measure.spec import Spec
from autotune.measure.survey import PreparedWorkload
from autotune.predict.simulate import simulate
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.workloads.factory import load_workload

FLOOR_BYTES = 100 * 2**20
"""Bytes of an idle process."""


class SimulatedHarness:
    """Stand-in for `autotune.measure.harness.Harness`: no process, no second of measuring, and the same plan files."""

    def __init__(self, spec: Spec) -> None:
        workload = load_workload(spec.workload.reference, spec.workload.arguments, spec.loop)
        self._limit_bytes = spec.limit_bytes
        self._graph = capture(workload, spec.workload.reference).graph
        self._costs = Costs((0.001,) * len(self._graph.ops), (0,) * len(self._graph.ops))
        fits = self._measure(Plan.traced(self._graph), None).outcome is Outcome.OK
        self._prepared = PreparedWorkload(
            self._graph, self._costs, this_device("cpu"), FLOOR_BYTES, fits, 0.0, loop=str(workload.loop)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def listen(self, report: Callable[[WorkProgress], None]) -> None:
        """Report nothing: no work takes long."""

    def prepare(self) -> PreparedWorkload:
        return self._prepared

    survey = prepare

    def baseline(self) -> Measurement:
        return self._measure(Plan.traced(self._graph), None)

    def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
        return self._measure(plan, this_device("cpu"))

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        """Keep simulating: the baseline is the same each time."""

    def renew(self) -> None:
        """There are no processes."""

    def close(self) -> None:
        """There is nothing to close."""

    def _measure(self, plan: Plan, device: Device | None) -> Measurement:
        expected = simulate(self._graph, lower(self._graph, plan), self._costs)
        charged_bytes = FLOOR_BYTES + expected.peak_bytes
        if self._limit_bytes is not None and charged_bytes > self._limit_bytes:
            return Measurement(Outcome.OUT_OF_MEMORY, "killed by the kernel: over its memory limit", device=device)
        return Measurement(
            Outcome.OK,
            peak_bytes=charged_bytes,
            charged_bytes=charged_bytes,
            floor_bytes=FLOOR_BYTES,
            step_seconds=(expected.seconds,) * 10,
            baseline_seconds=(sum(self._costs.seconds),) * 10,
            max_error=0.0,
            verified="bit-equal to eager",
            meter="simulated",
            limit="simulated" if self._limit_bytes is not None else "",
            device=device,
        )
