"""Sessions to kill: a study and a night with real processes and records, whose workers answer from the simulator."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.errors import WorkerError
from autotune.ir.plan import Plan
from autotune.measure import child as child_module
from autotune.measure.children import Children, ChildRole
from autotune.measure.messages import ChildError, MemoryPeak, PlanCheck, PlanCheckRequest
from autotune.measure.spec import Spec
from autotune.measure.worker import main as worker
from autotune.nightly.config import NightlyConfig, NightlyEntry
from autotune.nightly.night import NightJob, run_night
from autotune.records.config import load_config
from autotune.records.measurement import Measurement
from autotune.runtime.stores.slab_file import Slab
from autotune.study.session import tune
from autotune.testing.fake_runner import DEVICE, FakeRunner
from autotune.testing.graphs import training_chain
from autotune.workloads.reference import WorkloadRef

TRIALS = 5
WORKER_SECONDS = 0.005
"""Time that a worker takes for a plan."""
PLANNERS = {
    "recompute": ["keep", "segments"], "reorder": ["keep"], "order": ["traced"], "offload": ["keep"], "update": ["at_end"],
    "inplace": ["never"], "allocator": ["arena"],
}  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a session handles."""
WORKERS = "workers"
"""File of the ids of all workers, one a line."""


class ForkedWorker:
    """Worker in a forked process, with the part of `subprocess.Popen` that `Child` uses."""

    record = Path()

    def __init__(self, command: Sequence[str], *, stdout: Any, pass_fds: Sequence[int], **_: object) -> None:
        self.args = command
        self._code: int | None = None
        coordinator = os.getpid()
        # as `Popen`, which returns after exec: no signal finds the worker with the coordinator's handlers
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            with self.record.open("a", encoding="utf-8") as file:
                file.write(f"{self.pid}\n")
            return
        try:
            os.setsid()
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if descriptor > 2 and descriptor not in pass_fds:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            sys.argv = ["worker", str(coordinator), *map(str, pass_fds)]
            worker.main()
        finally:
            os._exit(0)

    def poll(self) -> int | None:
        """Return the exit code, or None while the worker lives."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.001)
        assert self._code is not None
        return self._code


class SimulatedBench:
    """Worker's side of a measurement: it writes scratch and a swap file, as the real one, and answers at once."""

    def __init__(self, spec: Spec) -> None:
        (spec.scratch / f"initial-{os.getpid()}").write_bytes(b"0" * 4096)
        self._slab = Slab("ssd", spec.stores["ssd"], 1 << 16)

    def awake(self, *, parks: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing is parked on a GPU."""
        del parks
        return contextlib.nullcontext()

    def check_plan(self, plan: Plan, reference: Path | None, tolerance: float) -> PlanCheck:
        """Answer after some milliseconds."""
        del plan, reference, tolerance
        time.sleep(WORKER_SECONDS)
        return PlanCheck(None, MemoryPeak(1, 1, "simulated"))


@dataclass
class WorkerRunner(FakeRunner):
    """Runner whose measurements take a worker process, which may die."""

    children: Children | None = None

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Ask a worker, then return what the simulator predicts."""
        assert self.children is not None
        try:
            self.children.ask(ChildRole.PLAN_BYTES, PlanCheckRequest(plan, None, 1.0))
        except ChildError as error:
            return Measurement(error.outcome, error.detail, device=DEVICE)
        return super().measure(plan, budget_bytes=budget_bytes, beat=beat)

    def renew(self) -> None:
        """End the worker."""
        assert self.children is not None
        self.children.end_all()

    def close(self) -> None:
        """End the worker and remove its files."""
        assert self.children is not None
        self.children.close()


@contextlib.contextmanager
def open_runner(root: Path, log_dir: Path) -> Iterator[WorkerRunner]:
    """Open a runner with real children for the time of a `with` block."""
    spec = Spec(WorkloadRef("chain"), log_dir, stores={"ssd": root / "store"}, time_limit_seconds=20)
    children = Children(spec)
    try:
        yield WorkerRunner(graph=training_chain(12, nbytes=100_000, param_bytes=5_000), children=children)
    finally:
        children.close()


def run_study(root: Path) -> int:
    """Begin or continue the study below `root`; return the number of the signal that ended it, or 0."""
    fields = {
        "trials": TRIALS,
        "plans": str(root / "plans"),
        "planners": PLANNERS,
        "budget": "90%",
        "sampler": "random",
        "runs": str(root / "runs"),
    }
    with open_runner(root, root / "runs" / "one" / "logs") as runner:
        return tune(load_config("chain", overrides=fields), runner, root / "runs" / "one").interrupted


def run_one_night(root: Path) -> int:
    """Begin or continue the night below `root`, of two entries; return the number of the signal that ended it, or 0."""
    entries = [
        NightlyEntry(
            workload="chain", name=name, trials=3, planners=PLANNERS, time="2s", budget="90%", sampler="random"
        )  # type: ignore[arg-type]
        for name in ("first", "second")
    ]
    options = NightlyConfig(entries=entries, directory=str(root / "runs"), time="1h")
    job = NightJob(options, Path("nightly.yaml"), lambda _, log_dir: open_runner(root, log_dir), tune, _ignore)
    return run_night(job, "n1").interrupted


def import_everything(root: Path) -> None:
    """Run a study and a night in this process, so that forked sessions import nothing."""
    (root / "store").mkdir()
    _simulate_workers(root)
    run_study(root)
    (root / "night" / "store").mkdir(parents=True)
    run_one_night(root / "night")


def start_session(root: Path, mode: str) -> int:
    """Fork a coordinator and return its process id."""
    (root / "store").mkdir(parents=True, exist_ok=True)
    coordinator = os.fork()
    if coordinator:
        return coordinator
    try:
        with (root / "log").open("a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _simulate_workers(root)
        number = (run_one_night if mode == "nightly" else run_study)(root)
        code = 128 + number if number else 0
    except WorkerError as error:  # a killed worker took the only plan
        code = error.exit_code
    except SystemExit as stopped:  # a signal before the first trial
        code = int(stopped.code or 0)
    except BaseException:  # noqa: BLE001 - the log has the traceback, the driver sees the code
        import traceback

        traceback.print_exc()
        code = 99
    sys.stderr.flush()
    os._exit(code)


def _simulate_workers(root: Path) -> None:
    ForkedWorker.record = root / WORKERS
    replacement: Mapping[str, Any] = {**vars(subprocess), "Popen": ForkedWorker}
    setattr(child_module, "subprocess", SimpleNamespace(**replacement))  # noqa: B010 - mypy refuses a namespace
    setattr(worker, "_import_bench", lambda _: SimulatedBench)  # noqa: B010


def _ignore(record: object) -> None:
    del record
