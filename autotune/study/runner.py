"""Define the protocol of a runner, which executes steps on a device, and runners that wrap another one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome

MAX_LOSSES = 2
"""Number of devices lost while they run one plan, at which its trial is recorded as crashed."""


def make_lost_measurement(hosts: Sequence[str], device: Device | None) -> Measurement:
    """Return the measurement of a plan under which these hosts were lost."""
    detail = f"{len(hosts)} devices were lost while it ran: {', '.join(hosts)}"
    return Measurement(Outcome.CRASHED, detail, device=device, lost_nodes=tuple(hosts))


class Runner(Protocol):
    """Runner of steps on a device; a step that fails gives an outcome, not an exception.

    `autotune.measure.harness.Harness` measures on this machine, `autotune.fleet.remote_runner.RemoteRunner` on another one, and
    `autotune.testing.fake_runner.FakeRunner` simulates.
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


@runtime_checkable
class QueuedRunner(Protocol):
    """Runner on a device that others may use first, such as one behind a queue."""

    def wait_for_device(self) -> None:
        """Return once the device answers."""
        ...

    def limit_waits(self, until: float) -> None:
        """Let no wait for the replacement of a lost device last beyond a time on the monotonic clock."""
        ...


class ParallelRunner(Runner, Protocol):
    """Runner that may measure in a thread beside other runners of one study.

    `measure` raises DeviceLostError with the host's name where the device is lost and no other one takes its place.
    """

    def abort(self) -> None:
        """End all processes, from another thread as well; a request that waits for its reply fails, as do later ones."""
        ...

    def reset(self) -> None:
        """Accept requests again after `abort`. Requires that none waits in another thread."""
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


@dataclass(frozen=True, slots=True)
class CompleteRunner:
    """Runner that stops no plan early, so that slow plans have all of their samples: for records to replay a search on."""

    runner: Runner

    def prepare(self) -> PreparedWorkload:
        return self.runner.prepare()

    def baseline(self) -> Measurement:
        return self.runner.baseline()

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        del beat
        return self.runner.measure(plan, budget_bytes=budget_bytes)

    def renew(self) -> None:
        self.runner.renew()

    def close(self) -> None:
        self.runner.close()


MAX_REPEATS = 2
"""Maximum number of repeated measurements of one plan because other work disturbed it, or killed its process."""
MAX_FRUITLESS = 4
"""Number of successive repeats that were disturbed too, after which only an undisturbed measurement allows others."""
INFORMATIVE = frozenset(
    {Outcome.OK, Outcome.STOPPED_EARLY, Outcome.OVER_BUDGET, Outcome.WRONG_RESULT, Outcome.OUT_OF_MEMORY}
)
"""Outcomes of a repeat that are evidence for or against the plan. The others may have a cause outside of it."""


@dataclass(slots=True)
class QuietRunner:
    """Runner that measures a plan again where other work disturbed it or killed its process, while time and the machine allow.

    On a machine that stays busy the repeats end: measurements remain marked as disturbed, and killed ones are crashes.
    """

    runner: Runner
    has_time: Callable[[float], bool]
    """Return True if a repeat of so many seconds may begin."""
    notify: Callable[[str], None]
    """Receive the reason of each measurement that is repeated."""
    fruitless: int = 0
    """Number of successive repeats that were disturbed, too."""

    def prepare(self) -> PreparedWorkload:
        return self.runner.prepare()

    def baseline(self) -> Measurement:
        return self.runner.baseline()

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        began = time.monotonic()
        result = self.runner.measure(plan, budget_bytes=budget_bytes, beat=beat)
        seconds = time.monotonic() - began
        repeats = 0
        while (
            (reason := _describe_disturbance(result))
            and repeats < MAX_REPEATS
            and self.fruitless < MAX_FRUITLESS
            and self.has_time(seconds)
        ):
            self.notify(reason)
            repeated = self.runner.measure(plan, budget_bytes=budget_bytes, beat=beat)
            repeats += 1
            self.fruitless += 1
            if not result.was_killed and repeated.outcome not in INFORMATIVE:
                break  # killed or out of time: the disturbed measurement is worth more
            result = repeated
        if not (result.disturbed or result.was_killed):
            self.fruitless = 0
        return result

    def renew(self) -> None:
        self.runner.renew()

    def close(self) -> None:
        self.runner.close()


def _describe_disturbance(result: Measurement) -> str:
    """Return how other work disturbed a measurement, so that a repeat may give a better one; empty if it did not."""
    if result.was_killed:
        return f"a process was {result.detail.partition(':')[0]}"
    return result.disturbed if result.outcome in (Outcome.OK, Outcome.STOPPED_EARLY) else ""
