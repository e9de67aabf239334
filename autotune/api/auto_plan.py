"""Tune the step of a running training loop once, and remember its plan for the next start."""

import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import errors
from autotune.errors import AutotuneError, ConfigError, PlanError, StudyInterruptedError, WorkerError
from autotune.ir.plan import REBUILD_PRICE
from autotune.records import plan_file as planfile
from autotune.records.config import Config, load_config
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import RunDir, lock_file, remove_empty_run
from autotune.units import fmt_bytes
from autotune.workloads.reference import LIVE_SUFFIX

if TYPE_CHECKING:
    from autotune.ir.graph import TrainGraph
    from autotune.workloads.workload import Workload

_STOP_SECONDS = 20.0
"""Longest time for the tuning process to end its children after an interrupt."""
_WORKER = "autotune.measure.worker.main"


@dataclass(frozen=True)
class AutoPlan:
    """A plan that does not exist yet: pass it as `plan` to `PlannedLoss` or `TrainStep`.

    At the first batch the step is tuned in other processes, once; training then goes on under the best plan. The plan is
    cached by graph, device, torch, threads and the fields below that change the plan (not `time` and `trials`), so that
    the next start reads it. Of several processes that need the same plan, one tunes and the others wait.

    The model, the loss function, the optimizer and the batch are copied to the tuning processes through a private file,
    which is removed afterwards. Functions of the main script, closures and lambdas are copied too. Nothing of the training
    process changes: neither weights and gradients nor random generators. The tuning processes need the memory of an eager
    step beside the waiting one.

    Args:
        budget: Bytes of the process (6 * 2**30 or "6GiB") or of the step ("step:6GiB"), or a share of the baseline's step bytes ("65%").
        time: Time limit of the search in seconds, or as "10m". No trial begins after it; capture, baseline and the running
            trial end first. A search four times as long follows where no plan was measured.
        trials: Maximum number of trials.
        stores: Directories for offloaded bytes, by the name of the store. The plan runs with the same directories.
        planners: Names of the planners to choose from, by kind of decision.
        kernels: "inductor" for plans on compiled regions, whose results differ from eager's by rounding; "aten" or empty for
            eager's kernels. On a CPU these plans give the captured step's bits.
        memory_format: "channels_last" for plans in that format; weights and batches of this process are converted, too.
        rebuild_price: Weight of rebuilding in compiled regions. They minimize the bytes kept for the backward pass, plus this
            number times the bytes that rebuilding ops read or write. 0 keeps the fewest bytes; 4 rebuilds hardly anything.
        threads: Number of threads that torch's CPU ops use during a step; 0 for those that the process has.
        cache: Directory of the plans; by default `autotune/plans` in `$XDG_CACHE_HOME` or `~/.cache`.
        runs: Directory of all runs, for their records, logs, temporary files and MLflow store.
        tracking_uri: MLflow tracking server or database; by default `$MLFLOW_TRACKING_URI`, else a SQLite file in `runs`.

    Raises:
        ConfigError: A field is invalid, or a part of the step cannot be copied to another process.
        OutOfTimeError: The search of the first step ended without a measured plan. Its other errors are those of `tune`.

    Examples:
        >>> import torch, autotune
        >>> model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> plan = autotune.AutoPlan(budget="90%", time="2m", trials=2)
        >>> planned = autotune.PlannedLoss(model, loss_fn, plan)
        >>> planned(torch.ones(512, 64)).backward()  # tunes, then trains
        >>> model[0].weight.grad.shape
        torch.Size([64, 64])
    """

    budget: str | int = "65%"
    time: str | float = "5m"
    trials: int | None = None
    stores: Mapping[str, str | Path] = field(default_factory=dict)
    planners: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kernels: str = ""
    memory_format: str = ""
    rebuild_price: float = REBUILD_PRICE
    threads: int = 0
    cache: str | Path | None = None
    runs: str | Path = "runs"
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        if self.kernels == "any":
            raise ConfigError(
                "AutoPlan(kernels='any') cannot choose, because only autotune tune compares kernels; pass 'inductor' or '', "
                "or run: autotune tune file.py:factory --kernels any"
            )
        kernels = self._make_config("model", "cpu").kernels
        object.__setattr__(self, "kernels", kernels)  # "aten" is the name of the default

    def __call__(self, workload: "Workload", graph: "TrainGraph | None" = None) -> PlanFile:
        """Return the plan for a workload: the cached one, or else that of a study in other processes.

        Args:
            workload: The step, with the live objects of this process. They are read and not changed.
            graph: The step as this process captures it; by default it is captured here.

        Raises:
            InfeasibleError: No plan fits the budget; the message states the lowest peak.
            ConfigError: A part of the step cannot be copied to another process.
            PlanError: The copy of the step is another graph.
            WorkerError: The tuning process was killed.
            KeyboardInterrupt: Ctrl-C; the tuning processes have ended.
        """
        self._refuse_worker()
        if graph is None:
            from autotune.capture.tracer import capture
            from autotune.kernels.region_program import with_kernels
            from autotune.workloads.memory_format import in_format

            with in_format(workload, self.memory_format) as converted:
                graph = with_kernels(capture(converted), self.kernels, self.rebuild_price).graph
        key = self._key(workload, graph)
        cached = self._cache_directory() / f"{key}.json"
        if (file := _read_cached(cached, graph)) is not None:
            _print(f"using the plan {cached}")
            return file
        with self._lock():
            if (file := _read_cached(cached, graph)) is not None:  # another process tuned meanwhile
                return file
            with self._lock_run(self._run_dir(type(workload.model).__name__, key)):
                if (file := _read_cached(cached, graph)) is not None:  # so did one on another host
                    return file
                return self._tune(workload, graph, key, cached)

    def _tune(self, workload: "Workload", graph: "TrainGraph", key: str, cached: Path) -> PlanFile:
        from autotune.workloads.live_workload import device_kind, release_cached_memory, save_workload

        name = type(workload.model).__name__
        run_dir = self._run_dir(name, key)
        run_dir.mkdir(parents=True, exist_ok=True)
        live = run_dir / f"{name}{LIVE_SUFFIX}"
        config = self._make_config(str(live), device_kind(workload), str(workload.loop))
        config = config.model_copy(update={"plans": str(run_dir / "plans")})
        files = RunDir(run_dir)
        files.logs.mkdir(exist_ok=True)
        log = files.logs / "tune.log"
        _print(f"tuning a plan of {name} for {config.budget}, at most {config.time} of search; log: {log}")
        keeps_log = False
        try:
            save_workload(workload, live)
            if config.device == "cuda":
                release_cached_memory()
            tuned = planfile.read(_run_study(config, run_dir, graph.digest, log))
        except WorkerError:  # its message names the log in the directory
            keeps_log = True
            raise
        finally:
            live.unlink(missing_ok=True)
            if not keeps_log:
                remove_empty_run(run_dir)
        file = replace(tuned, run=planfile.refer_to_run(run_dir, cached.parent))
        planfile.write(cached, file, remedy="name another directory by AutoPlan(cache=DIR)")
        _print(f"{_describe(file)}; plan: {cached}")
        return planfile.read(cached)

    def _make_config(self, workload: str, device: str, loop: str = "") -> Config:
        if device not in ("cpu", "cuda"):
            raise ConfigError(
                f"AutoPlan: the model is on {device}, and plans are measured on cpu and cuda; pass plan=None"
            )
        overrides: dict[str, Any] = {
            "budget": f"{self.budget}B" if isinstance(self.budget, int) else self.budget,
            "time": f"{self.time}s" if isinstance(self.time, (int, float)) else self.time,
            "trials": self.trials,
            "stores": {name: str(directory) for name, directory in self.stores.items()},
            "planners": {kind: list(names) for kind, names in self.planners.items()},
            "device": device,
            "loop": loop,
            "kernels": self.kernels,
            "memory_format": self.memory_format,
            "rebuild_price": self.rebuild_price,
            "threads": self.threads,
            "runs": str(self.runs),
            "tracking_uri": self.tracking_uri,
        }
        return load_config(workload, overrides=overrides)

    def _key(self, workload: "Workload", graph: "TrainGraph") -> str:
        """Return the name of the cached plan: a digest of everything that a plan is chosen by."""
        import autotune
        from autotune.measure.device.this_device import this_device
        from autotune.workloads.live_workload import device_kind, thread_count

        kind = device_kind(workload)
        config = self._make_config("model", kind, str(workload.loop))
        device = this_device(kind)
        parts = (
            autotune.__version__, planfile.SCHEMA, graph.digest, device.key, device.torch, thread_count(), config.budget,
            sorted(config.stores.items()), config.planners.model_dump_json(), config.loop,
            config.kernels, config.memory_format, config.rebuild_price, config.threads,
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _cache_directory(self) -> Path:
        if self.cache is not None:
            return Path(self.cache)
        base = os.environ.get("XDG_CACHE_HOME", "")
        # the specification has relative paths ignored
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "autotune" / "plans"

    def _run_dir(self, name: str, key: str) -> Path:
        return Path(self.runs) / f"auto-{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{key[:12]}"

    @contextlib.contextmanager
    def _lock_run(self, run_dir: Path) -> Iterator[None]:
        """Let one process write a run directory at a time; machines with caches of their own may share directories of runs."""
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with _take_turns(run_dir.parent / f".{run_dir.name}.lock"):
            yield

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process of this machine tune at a time: two would disturb each other's measurements."""
        directory = self._cache_directory()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f".{os.uname().nodename}.lock"
            with _take_turns(path):
                yield
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ConfigError(
                f"{error.filename or directory}: cannot be written; name another directory by AutoPlan(cache=DIR, runs=DIR)"
            ) from error

    def _refuse_worker(self) -> None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name == _WORKER:
            raise ConfigError(
                "a measuring process imports a module that starts training with AutoPlan; "
                "put the training under: if __name__ == '__main__':"
            )


def _run_study(config: Config, run_dir: Path, digest: str, log: Path) -> Path:
    """Run a study in a process of its own, whose children measure; return the path of its best plan.

    Optuna, MLflow and signal handlers stay out of the training process.
    """
    command = [sys.executable, "-P", "-m", "autotune.api.tune_live", str(os.getpid()), str(run_dir), digest]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
        )
        try:
            answer, _ = process.communicate(config.model_dump_json().encode())
        except BaseException:  # Ctrl-C: the study is in a session of its own and does not receive it
            _stop(process)
            raise
    try:
        document = json.loads(answer.splitlines()[-1])
    except (ValueError, IndexError):
        code = process.returncode
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise WorkerError(f"the process that tuned the step was {cause}; see {log}, and start again") from None
    if "plan" in document:
        return Path(document["plan"])
    kind = getattr(errors, document["class"], None)
    if kind is StudyInterruptedError:
        raise WorkerError(f"the process that tuned the step was interrupted; see {log}, and start again")
    if isinstance(kind, type) and issubclass(kind, AutotuneError):
        # the copy of the step is deleted, so `autotune resume` cannot load it
        reason, command, _ = document["message"].partition("; continue with: autotune resume")
        raise kind(f"{reason}; start again, finished trials are kept" if command else reason)
    raise WorkerError(f"{document['message']}; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a study and its children; its finished trials stay."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_cached(path: Path, graph: "TrainGraph") -> PlanFile | None:
    """Return a cached plan; None where there is none, or where it is damaged or of another graph."""
    if not path.exists():
        return None
    from autotune.ir.check import check
    from autotune.ir.schedule import lower

    try:
        file = planfile.read(path)
        check(graph, file.plan)
        lower(graph, file.plan)  # the digest leaves out layers, which set the times of transfers
    except (ConfigError, PlanError):
        return None
    return file if file.graph_digest == graph.digest else None


def _describe(file: PlanFile) -> str:
    measured = file.measurement
    if measured is None or measured.step_charged_bytes is None:
        return "tuned"
    seconds = f" in {measured.time_ratio:.2f} times eager's time" if measured.time_ratio is not None else ""
    return f"tuned: a step needs {fmt_bytes(measured.step_charged_bytes)}{seconds}"


@contextlib.contextmanager
def _take_turns(path: Path) -> Iterator[None]:
    """Lock a file against other processes, which may be on other machines; a wait is printed with the process that has the lock."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(lock_file(path, wait=False))
        except BlockingIOError as error:
            _print(f"waiting for process {str(error) or 'unknown'}, which tunes a step now")
            file = stack.enter_context(lock_file(path, wait=True))
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def _print(text: str) -> None:
    print(f"autotune: {text}", file=sys.stderr, flush=True)
