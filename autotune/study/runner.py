"""The contract of what runs steps on a device."""

from typing import Protocol

from autotune.ir.plan import Plan
from autotune.measure.survey import Prepared
from autotune.records.measurement import Measurement


class Runner(Protocol):
    """Runs steps on the device; a failed step is an outcome. `autotune.measure.harness.Harness` is the real one."""

    def prepare(self) -> Prepared: ...
    def baseline(self) -> Measurement: ...
    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """`budget_bytes`: what the step itself may be charged, the floor not included. `beat`: a ratio to eager's time; a
        plan that is sure to stay above it may be stopped early.
        """
        ...

    def renew(self) -> None:
        """Let the next measurement come from fresh processes."""
        ...

    def close(self) -> None: ...
