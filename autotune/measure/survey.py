"""Records of a workload on this device: before any step has run, and before any plan has run."""

from dataclasses import dataclass

from autotune.errors import AutotuneError, CaptureError, ConfigError, InfeasibleError, StoreError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.workloads.reference import WorkloadRef


@dataclass(frozen=True, slots=True)
class WorkloadSurvey:
    """Graph, costs and device of a workload, obtained without running a step."""

    graph: TrainGraph
    costs: Costs
    device: Device
    floor_bytes: int
    """Idle bytes of the process that captured and profiled."""
    loop: str = ""
    """Training loop of the step; empty for updates at once."""
    free_bytes: int | None = None
    """Bytes of the GPU that processes could still use; None on a CPU."""


@dataclass(frozen=True, slots=True)
class PreparedWorkload:
    """Everything measured of a workload on this device before the first plan; only the traced plan has run."""

    graph: TrainGraph
    costs: Costs
    device: Device
    floor_bytes: int
    """Idle bytes of a process that runs plans: interpreter, libraries, code of kernels."""
    baseline_fits: bool
    """True if a plain eager step fits the memory or the limit."""
    capture_error: float | None
    """Largest error of the captured step against eager, as a share of the gate's bound. None if no batch size allows a
    comparison. Records of earlier versions hold an absolute difference."""
    verified: str = ""
    """Method by which the captured step was compared with eager; empty if it was not."""
    loop: str = ""
    """Training loop of the step; empty for updates at once."""

    @property
    def tolerance(self) -> float | None:
        """Largest `max_error` accepted of a plan; above 0 on a GPU, whose kernels add in any order."""
        return None if self.capture_error is None else plan_tolerance(self.device.kind)


def plan_tolerance(device_kind: str) -> float:
    """Return the largest `max_error` accepted of a plan: 0 on a CPU, where plans run the same kernels bit for bit."""
    return 1.0 if device_kind == "cuda" else 0.0


TRAINS_AT_IMPORT = 'if its file trains when it is imported, put that under `if __name__ == "__main__":`'
"""Next step for a workload that takes too long: worker processes import its file."""


def explain_eager_failure(workload: WorkloadRef, baseline: Measurement) -> AutotuneError:
    """Return the error for a workload whose step fails in plain PyTorch."""
    if baseline.outcome is Outcome.TIMEOUT:
        return ConfigError(
            f"{workload}: steps in plain PyTorch are too slow to measure, or hang: {baseline.detail}; make the batch smaller, or "
            f"accumulate fewer steps; {TRAINS_AT_IMPORT}. If a step should take seconds, run it once without autotune"
        )
    if baseline.outcome is Outcome.DISK_FULL:  # the step's results are files of the run
        return StoreError(
            f"{workload}: the results of the step in plain PyTorch could not be written: {baseline.detail}; free space on the "
            "disk of the run directory, or name another one with runs"
        )
    outcome = baseline.outcome.value.replace("_", " ")
    return ConfigError(
        f"{workload}: the step in plain PyTorch fails with this batch ({outcome}): {baseline.detail}; "
        "run it once without autotune, and fix that first"
    )


def explain_survey_failure(
    workload: WorkloadRef, outcome: Outcome, detail: str, *, seconds: float, limit_bytes: int | None
) -> AutotuneError:
    """Return the error for a process that could not capture and profile within `seconds` and the memory limit."""
    match outcome:
        case Outcome.OUT_OF_MEMORY:
            limit = f"a limit of {limit_bytes / 2**20:.1f} MiB" if limit_bytes else "this machine's memory"
            return InfeasibleError(
                f"{workload} does not even fit {limit} one operator at a time; make the batch smaller"
            )
        case Outcome.TIMEOUT:
            return CaptureError(
                f"{workload} took more than {seconds:g} s to capture and profile; {TRAINS_AT_IMPORT}, else make the "
                "batch smaller"
            )
        case Outcome.DISK_FULL:
            return StoreError(
                f"{workload}: a disk is full while it is captured and profiled: {detail}; free space on the disks of "
                "the run directory, the stores and temporary files"
            )
    return CaptureError(f"cannot capture and profile {workload}: {detail}")
