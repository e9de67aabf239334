"""Define the protocol of a runner, which executes steps on a device, and a runner that several sessions share."""

from dataclasses import dataclass
from typing import Protocol

from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.records.measurement import Measurement


class Runner(Protocol):
    """Runner of steps on a device; a step that fails gives an outcome, not an exception.

    `autotune.measure.harness.Harness` measures on this machine, `autotune.testing.fake_runner.FakeRunner` simulates.
    """

    def prepare(self) -> PreparedWorkload:
        """Capture the step, profile its ops and stores, and measure the floor."""
        ...

    def baseline(self) -> Measurement:
        """Measure the step in plain PyTorch eager."""
        ...

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Measure a plan beside plain eager.

        Args:
            plan: the plan to run.
            budget_bytes: maximum charge of the step, without the floor.
            beat: time ratio to eager; a plan that is sure to stay above it may be stopped early.
        """
        ...

    def renew(self) -> None:
        """Run the next measurement in new processes."""
        ...

    def close(self) -> None:
        """End all processes and delete temporary files."""
        ...


@dataclass(frozen=True, slots=True)
class SharedRunner:
    """Runner that others use afterwards: `close` only renews it. A night shares its runner with a study."""

    runner: Runner

    def prepare(self) -> PreparedWorkload:
        return self.runner.prepare()

    def baseline(self) -> Measurement:
        return self.runner.baseline()

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        return self.runner.measure(plan, budget_bytes=budget_bytes, beat=beat)

    def renew(self) -> None:
        self.runner.renew()

    def close(self) -> None:
        self.runner.renew()
