"""The machine under test: a real GPU, or a made-up one on which the whole script runs in seconds."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from autotune.ir.plan import Plan
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.measure.survey import PreparedWorkload
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement
from autotune.testing.fake_runner import FakeRunner
from autotune.workloads.reference import WorkloadRef
from experiments.common.repository import name_commit

ROOT = Path(__file__).parents[2]


class Runner(Protocol):
    """Measurements of one workload; `Harness` is one."""

    def prepare(self) -> PreparedWorkload: ...

    def baseline(self) -> Measurement: ...

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement: ...

    def renew(self) -> None: ...

    def close(self) -> None: ...


class Machine(Protocol):
    """Everything that a step of the script needs."""

    scratch: Path
    trials: int | None
    """Maximum number of trials of a tuning run; None for its time alone."""

    def facts(self) -> dict[str, Any]:
        """Return device, versions, commit, date and command."""
        ...

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run a Python module with arguments from the repository's root; return exit code and output."""
        ...

    def runner(self, workload: WorkloadRef, *, store: str = "", kernels: str = "") -> Runner:
        """Return the measurements of a workload, with a store if plans may offload."""
        ...


@dataclass
class GpuMachine:
    """This machine's current GPU."""

    scratch: Path
    trials: int | None = None

    def facts(self) -> dict[str, Any]:
        from autotune.measure.device.this_device import this_device

        return _facts(this_device("cuda"))

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        try:
            run = subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, text=True, timeout=seconds, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            return 124, output.decode(errors="replace") if isinstance(output, bytes) else output
        return run.returncode, run.stdout

    def runner(self, workload: WorkloadRef, *, store: str = "", kernels: str = "") -> Runner:
        stores = {store: self.scratch} if store else {}
        cache = self.scratch / "profile.json"
        return Harness(
            Spec(workload, self.scratch, stores, "cuda", kernels=kernels, time_limit_seconds=150.0, profile_cache=cache)
        )


@dataclass
class FakeMachine:
    """A made-up GPU: measurements are the simulator's, and commands print what they were."""

    scratch: Path
    trials: int | None = 2
    exit_code: int = 0
    """Exit code of every command."""

    def facts(self) -> dict[str, Any]:
        return _facts(Device("cuda", "Fake GPU 9000", 2**36, 132, "0"))

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        del seconds
        return self.exit_code, f"{' '.join(command)}\n3 passed"

    def runner(self, workload: WorkloadRef, *, store: str = "", kernels: str = "") -> Runner:
        del workload, kernels
        return FakeRunner(store=bool(store))


def _facts(device: Device) -> dict[str, Any]:
    import torch

    return {
        "device": to_json(device),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "commit": name_commit(ROOT),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m experiments.gpu.run {' '.join(sys.argv[1:])}".strip(),
    }


@contextmanager
def opened(runner: Runner) -> Iterator[Runner]:
    """Close a runner's processes at the end."""
    try:
        yield runner
    finally:
        runner.close()
