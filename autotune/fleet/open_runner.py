"""Open the runner of a config: this machine's harness, or a device of the class that the config names."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from autotune.errors import ConfigError
from autotune.fleet import ENGINES
from autotune.fleet.channel import Channel, Reach
from autotune.fleet.far_end.device_server import DeviceRunner
from autotune.fleet.fleet_file import DeviceClass, FleetConfig, load_fleet
from autotune.fleet.local import LocalRunner, open_harness
from autotune.fleet.messages import OpenDevice, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.measurement import Measurement
from autotune.study.runner import ParallelRunner, Runner, SharedRunner

ConfigT = TypeVar("ConfigT", bound=Config)
FLEET_VARIABLE = "AUTOTUNE_FLEET"
"""Environment variable that names the file of the fleet where neither the config nor an option does."""


class StudyRunner(DeviceRunner, Protocol):
    """Runner that reports its progress, and that reuses a recorded baseline."""

    def listen(self, report: Callable[[str], None]) -> None:
        """Report lines of progress to a function."""
        ...

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        """Use a recorded baseline where the device is the same."""
        ...


def find_class(config: Config) -> tuple[FleetConfig, DeviceClass] | None:
    """Return the fleet of a config and the class that measures; None for this machine.

    Raises ConfigError for a class without a fleet, a fleet without a class, and an unknown class.
    """
    if config.on is None:
        if config.fleet is not None:
            raise ConfigError(f"--fleet {config.fleet}: no class is named; add --on CLASS")
        if config.parallel > 1:
            raise ConfigError(
                f"{config.ref}: parallel {config.parallel}: this machine is one device; add --fleet FILE --on CLASS"
            )
        return None
    path = config.fleet or os.environ.get(FLEET_VARIABLE)
    if not path:
        raise ConfigError(f"--on {config.on}: no fleet is named; add --fleet FILE, or set {FLEET_VARIABLE}")
    fleet = load_fleet(Path(path))
    return fleet, fleet.find(config.on)


def refuse_fleet(config: Config, command: str) -> None:
    """Raise ConfigError for a command that profiles this machine and would not use the config's class."""
    if config.on is not None:
        raise ConfigError(
            f"{command} profiles this machine, the config names class {config.on}; remove `on`, or run tune"
        )


def apply_class(config: ConfigT) -> ConfigT:
    """Return a config with the device, the limit and the stores of the class that it names."""
    selected = find_class(config)
    return config if selected is None else selected[1].apply(config)


@contextlib.contextmanager
def open_runner(config: Config, log_dir: Path) -> Iterator[StudyRunner]:
    """Open the runner of a config for the time of a `with` block; a device of a class is reached at the first request."""
    selected = find_class(config)
    if selected is None:
        with open_harness(config, log_dir) as harness:
            yield LocalRunner(harness)
        return
    runner = _make_remote_runner(config, *selected, log_dir)
    try:
        yield runner
    finally:
        runner.close()


@contextlib.contextmanager
def open_parallel_devices(config: Config, runner: Runner, log_dir: Path) -> Iterator[Sequence[ParallelRunner]]:
    """Open the devices of a parallel search: that of `runner` first, then further devices of its class.

    The sequence is empty if only one device measures. A further device is connected when it prepares the workload.
    """
    bare = runner.runner if isinstance(runner, SharedRunner) else runner
    selected = find_class(config)
    if selected is None or not isinstance(bare, RemoteRunner):
        yield ()
        return
    count = min(config.parallel, selected[1].devices)
    further = [_make_remote_runner(config, *selected, log_dir, replaces_lost_device=False) for _ in range(1, count)]
    try:
        yield [bare, *further] if further else ()
    finally:
        for each in further:
            each.abort()


def _make_remote_runner(
    config: Config, fleet: FleetConfig, device_class: DeviceClass, log_dir: Path, *, replaces_lost_device: bool = True
) -> RemoteRunner:
    name = str(config.on)
    reach = to_reach(fleet, name, log_dir)
    if not replaces_lost_device:  # the study has the code that its first device connected with
        reach = replace(reach, code_digest="")
    document = to_document(device_class.apply(config))
    request = OpenDevice(code_identity(), name, document, device_class.promise, device_class.environment)

    def open_channel(report: Callable[[str], None]) -> Channel:
        return ENGINES[device_class.engine](reach, report)

    class_file = Path(config.runs) / "fleet" / f"{name}.json"
    # the study runs while further devices start, so only the first device's wait is recorded
    wait_name = str(log_dir.parent) if replaces_lost_device else ""
    return RemoteRunner(
        open_channel, request, class_file, replaces_lost_device=replaces_lost_device, wait_name=wait_name
    )


def to_reach(fleet: FleetConfig, name: str, log_dir: Path) -> Reach:
    """Return everything by which a device of a class is reached."""
    device_class = fleet.find(name)
    return Reach(
        device_class=name,
        log_dir=log_dir,
        command=tuple(device_class.command),
        resource=device_class.resource or name,
        uses_gpu=device_class.device == "cuda",
        address=fleet.address,
        code=fleet.code,
        code_digest=digest_code(Path(fleet.code)) if fleet.code and device_class.engine == "ray" else "",
    )


def digest_code(directory: Path) -> str:
    """Return a digest of the Python files of a directory, without hidden ones and what studies leave there."""
    digest = xxhash.xxh64()
    for place, folders, files in os.walk(directory):
        left_out = ("runs", "plans") if Path(place) == directory else ()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith("."):
                with contextlib.suppress(OSError):  # a broken link
                    digest.update(f"{place}/{name}\0".encode(errors="replace") + Path(place, name).read_bytes())
    return digest.hexdigest()


def to_document(config: Config) -> dict[str, object]:
    """Return the JSON of a study's config; keys of a nightly entry alone are left out."""
    return Config.model_validate({name: getattr(config, name) for name in Config.model_fields}).model_dump(mode="json")
