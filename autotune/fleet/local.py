"""Open the device of this machine: the harness of a config, for a study here or for one at the other end of a channel."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import ConfigError, DeviceRefusedError, StoreError
from autotune.fleet.channel import Channel, Reach
from autotune.fleet.far_end import device_lock
from autotune.fleet.far_end.device_server import DeviceServer, OpenDeviceRunner
from autotune.fleet.far_end.opener import find_opener
from autotune.fleet.messages import FleetCall, FleetReply, OpenDevice, decode_reply, encode_message
from autotune.fleet.node import check_promise, prepare_process
from autotune.ir.plan import Plan
from autotune.measure.device.conditions import MachineConditions, collect_machine_conditions
from autotune.measure.device.this_device import this_device
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.measurement import Measurement
from autotune.records.run_dir import RunDir, RunsDir

if TYPE_CHECKING:
    from autotune.measure.harness import Harness
    from autotune.measure.survey import PreparedWorkload


def _claim_nothing() -> None:
    """Use the device beside others: people know what runs on their machine."""


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """Runner of this machine's harness that also collects the machine's conditions."""

    harness: "Harness"
    claim: Callable[[], object] = _claim_nothing
    """Called before the conditions are collected: it may wait until no other process measures on the device."""

    def prepare(self) -> "PreparedWorkload":
        return self.harness.prepare()

    def baseline(self) -> Measurement:
        return self.harness.baseline()

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        return self.harness.measure(plan, budget_bytes=budget_bytes, beat=beat)

    def renew(self) -> None:
        self.harness.renew()

    def close(self) -> None:
        self.harness.close()

    def conditions(self) -> MachineConditions:
        self.claim()
        return collect_machine_conditions()

    def listen(self, report: Callable[[str], None]) -> None:
        """Report lines of progress to a function."""
        self.harness.listen(lambda work: report(str(work)))

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        """Use a recorded baseline where the device is the same."""
        self.harness.reuse_baseline(measurement, device)


@contextlib.contextmanager
def open_harness(config: Config, log_dir: Path | None = None, profile_cache: Path | None = None) -> Iterator["Harness"]:
    """Open the harness of a config for the time of a `with` block.

    Without `log_dir` its logs are temporary. Costs of ops are cached in `runs` unless `profile_cache` names a file.
    """
    from autotune.measure.harness import Harness
    from autotune.measure.scratch import Scratch, temporary_root
    from autotune.measure.spec import Spec

    if config.kernels == "any":
        raise ConfigError("kernels: any is for tune, which measures each; name aten or inductor here")
    stores = {str(name): Path(directory) for name, directory in config.stores.items()}
    check_store_directories(stores, None if log_dir is None else log_dir.parent)
    with contextlib.ExitStack() as stack:
        logs = log_dir or stack.enter_context(Scratch(temporary_root(), "autotune-session-")).path
        op_profile = profile_cache or RunsDir(Path(config.runs)).op_profile
        spec = Spec(
            workload=config.ref,
            # absolute, because the user's module may change the working directory
            log_dir=logs.absolute(),
            stores={name: directory.absolute() for name, directory in stores.items()},
            device_kind=config.device,
            memory_format=config.memory_format,
            loop=config.loop,
            batch_argument=config.batch_argument or "batch",
            kernels=config.kernels,
            exact=config.exact,
            rebuild_price=config.rebuild_price,
            threads=config.threads,
            seed=config.seed,
            samples=config.samples,
            limit_bytes=config.limit_bytes,
            profile_cache=op_profile.absolute(),
        )
        yield stack.enter_context(Harness(spec))


@contextlib.contextmanager
def open_device(request: OpenDevice, report: Callable[[str], None]) -> Iterator[LocalRunner]:
    """Open this machine's device for a request: check its promise, wait until nobody measures on it, open its harness.

    Logs and temporary files lie in the system's temporary directory, costs of ops in the user's cache. Raises
    DeviceRefusedError for a broken promise, and StoreError for a store without a directory here.
    """
    prepare_process(request.environment)
    config = Config.model_validate(request.config)
    if request.promise.kind == "cpu":  # a GPU's identity needs a context: the study checks it after `prepare`
        check_promise(request.device_class, os.uname().nodename, this_device("cpu"), request.promise)
    with device_lock.lock_device(request.promise.kind, report), open_harness(config, None, find_cache()) as harness:
        runner = LocalRunner(harness)
        runner.listen(report)
        if request.recorded is not None:
            runner.reuse_baseline(request.recorded.measurement, request.recorded.device)
        yield runner


def find_cache() -> Path:
    """Return the file of this machine's costs of ops, in the user's cache directory.

    Raises DeviceRefusedError where that directory cannot be made.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceRefusedError(f"{home}: {error.strerror}; set XDG_CACHE_HOME on the node") from None
    return RunsDir(home).op_profile


def check_store_directories(stores: Mapping[str, Path], run_dir: Path | None = None) -> None:
    """Raise StoreError for a store's directory that is missing, is a file or is read-only.

    `run_dir` is the study's run directory. If it holds a recorded run, whose stores cannot change, the message suggests
    a new run.
    """
    for name, directory in stores.items():
        remedy = _suggest_directory(name, run_dir)
        if not directory.exists():
            raise StoreError(f"{name} store: no directory {directory}; create it, or {remedy}")
        if not directory.is_dir():
            raise StoreError(f"{name} store: {directory} is no directory; {remedy}")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise StoreError(f"{name} store: {directory} is read-only; {remedy}")


def _suggest_directory(name: str, run_dir: Path | None) -> str:
    if run_dir is None or not (RunDir(run_dir).is_recorded or RunDir(run_dir).batch_search.exists()):
        return f"name another directory with --store {name}=DIR"
    seeds = f" --seed-from {shlex.quote(str(run_dir))}" if RunDir(run_dir).trials.exists() else ""
    return f"tune under another --name with --store {name}=DIR{seeds}"


class LocalChannel:
    """Channel to a device server in this process."""

    def __init__(self, open_runner: OpenDeviceRunner) -> None:
        self._server = DeviceServer(open_runner)

    def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        return decode_reply(self._server.answer(encode_message(call), report))

    def close(self) -> None:
        self._server.close()


def open_channel(reach: Reach, report: Callable[[str], None]) -> Channel:
    """Serve this machine's device in this process, which is a class of its own."""
    del report
    return LocalChannel(find_opener(reach.opener))
