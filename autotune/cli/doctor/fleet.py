"""Checks of a fleet: one device of each class, without measuring on it."""

import tempfile
from pathlib import Path

from autotune.cli.doctor.check_result import CheckResult
from autotune.errors import AutotuneError, ConfigError
from autotune.fleet import ENGINES
from autotune.fleet.channel import FarEndLostError
from autotune.fleet.far_end.inspection import DeviceInspection
from autotune.fleet.fleet_file import DeviceClass, FleetConfig
from autotune.fleet.messages import CallFailed, InspectDevice, code_identity
from autotune.fleet.node import check_promise
from autotune.fleet.open_runner import to_reach
from autotune.records.device import Device
from autotune.study.interrupts import Expired, expire_after
from autotune.units import fmt_bytes

BUSY_SHARE = 0.1
"""Share of the cores in use by others from which a device is not quiet."""
WAIT_SECONDS = 30.0
"""Maximum seconds to wait for a device's answer: `doctor` must not wait for another study to end."""


def check_fleet(fleet: FleetConfig, names: list[str]) -> list[CheckResult]:
    """Return the result of each class; one whose device does not answer within `WAIT_SECONDS` is bad."""
    with tempfile.TemporaryDirectory(prefix="autotune-doctor-") as logs:
        return [check_class(fleet, name, Path(logs)) for name in names]


def check_class(fleet: FleetConfig, name: str, log_dir: Path) -> CheckResult:
    """Reach one device of a class and return what is wrong with it, the worst first."""
    device_class = fleet.find(name)
    try:
        inspection = inspect_class(fleet, name, log_dir)
    except (AutotuneError, FarEndLostError) as error:
        detail, _, fix = str(error).partition("; ")
        return CheckResult(name, "bad", detail, fix)
    detail = (
        f"{inspection.host}: {inspection.device_name}, {fmt_bytes(inspection.memory_bytes)}, CPUs {inspection.cpus}, "
        f"{100 * inspection.busy:.0f} % busy{', in use by a study' if inspection.in_use else ''}"
    )
    for status, check in (("bad", _find_error), ("warn", _find_weakness)):
        if problem := check(name, device_class, inspection):
            reason, _, fix = problem.partition("; ")
            return CheckResult(name, "bad" if status == "bad" else "warn", f"{detail}; {reason}", fix)
    return CheckResult(name, "ok", detail)


def inspect_class(fleet: FleetConfig, name: str, log_dir: Path) -> DeviceInspection:
    """Return the inspection of one device; raises what reaching it raises."""
    device_class = fleet.find(name)
    stores = {str(store): directory for store, directory in (device_class.stores or {}).items()}
    request = InspectDevice(code_identity(), device_class.device, stores, device_class.environment)
    notes = ["no answer"]
    channel = ENGINES[device_class.engine](to_reach(fleet, name, log_dir), notes.append)
    try:
        with expire_after(WAIT_SECONDS):
            reply = channel.ask(request, notes.append)
    except Expired:
        raise FarEndLostError(f"{notes[-1]} for {WAIT_SECONDS:g} s; run doctor when the device is idle") from None
    finally:
        channel.close()
    if isinstance(reply, CallFailed):
        raise reply.to_error("")
    if not isinstance(reply, DeviceInspection):
        raise ConfigError(f"the far end answers with {type(reply).__name__}; install autotune {code_identity()} there")
    return reply


def _find_error(name: str, device_class: DeviceClass, inspection: DeviceInspection) -> str:
    promise = device_class.promise
    cores = inspection.cores if inspection.cores is not None else promise.cores or 0
    device = Device(promise.kind, inspection.device_name, inspection.memory_bytes, cores, "")
    try:
        check_promise(name, inspection.host, device, promise)
    except ConfigError as error:
        return str(error)
    if inspection.nice > 0:
        return (
            f"runs at nice {inspection.nice}; start its job system at nice 0 (Ray: RAY_worker_niceness=0 ray start ...)"
        )
    return "; ".join(f"store {store}: {problem}" for store, problem in inspection.store_problems.items())


def _find_weakness(name: str, device_class: DeviceClass, inspection: DeviceInspection) -> str:
    del name, device_class
    checks: list[tuple[bool, str]] = [
        (
            inspection.busy > BUSY_SHARE and not inspection.in_use,
            "other processes are busy; times there will be marked as disturbed",
        ),
        (
            inspection.oom_score_adj > 0,
            f"its processes are the kernel's first victims (oom_score_adj {inspection.oom_score_adj})",
        ),
        (not inspection.limits_memory, "no writable memory cgroup; limits are emulated"),
    ]
    return next((text for applies, text in checks if applies), "")
