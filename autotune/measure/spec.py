"""The specification of a measurement: what runs, on which device, under which limits."""

from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import PlanError
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.workloads.reference import WorkloadRef

PATIENCE_SECONDS = 100.0
"""Seconds of one timing after which no further block begins."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A workload and the conditions under which it is measured; every child process receives it whole."""

    workload: WorkloadRef
    log_dir: Path
    """Directory of the children's logs, and of their temporary files."""
    stores: dict[str, Path] = field(default_factory=dict)
    """Directory of each store, by the store's name."""
    device_kind: str = "cpu"
    memory_format: str = ""
    """Memory format of plans and of their reference; the baseline keeps the factory's format."""
    loop: str = ""
    """Training loop of plans and of the baseline, such as `clip,accumulate=4`; empty for the factory's own."""
    batch_argument: str = "batch"
    """Argument of the factory that sets the batch size, for comparisons at a smaller batch where eager does not fit."""
    kernels: str = ""
    """Kernels of plans: `inductor` for compiled regions, or empty for those of eager."""
    exact: bool = False
    """Refuse a captured step, and plans, that differ from eager in any bit."""
    rebuild_price: float = REBUILD_PRICE
    """Price at which compiled regions rebuild a byte."""
    threads: int = 0
    """Number of torch's threads for plans and their reference; 0 for the process's own, which the baseline keeps."""
    seed: int = 0
    samples: int = 8
    """Number of timed steps of one measurement."""
    limit_bytes: int | None = None
    """Memory limit of each child; a child that must not limit itself receives None."""
    time_limit_seconds: float = 300.0
    """Longest time of one request without accumulation. `Children` multiplies it by the loop's `accumulate`."""
    prepare_limit_seconds: float = 1800.0
    """Longest time for capture and profiling."""
    profile_cache: Path | None = None
    """File of op times measured before."""
    scratch: Path = Path()
    """Directory of a child's temporary files; `Children` sets it."""
    return_memory: bool = False
    """Make malloc return freed memory at once: for peaks, not for times. `Children` sets it."""

    def refuse_other_capture(self, plan: Plan) -> None:
        """Raise PlanError for a plan in another memory format, or on other kernels, regions or threads, than this workload's."""
        if plan.memory_format not in ("", self.memory_format):
            raise PlanError(
                f"the plan is in {plan.memory_format}, the workload in {self.memory_format or 'its own format'}; "
                f"prepare it with memory_format={plan.memory_format}"
            )
        if plan.kernels not in ("", self.kernels):
            raise PlanError(
                f"the plan runs on kernels of {plan.kernels}; prepare the workload with kernels={plan.kernels}"
            )
        if plan.kernels and plan.rebuild_price != self.rebuild_price:
            raise PlanError(
                f"the plan is for regions of rebuild_price={plan.rebuild_price:g}, the workload has those of "
                f"{self.rebuild_price:g}; prepare it with rebuild_price={plan.rebuild_price:g}"
            )
        if plan.threads not in (0, self.threads):
            raise PlanError(
                f"the plan is for {plan.threads} threads, the workload for {self.threads or 'those of the process'}; "
                f"prepare it with threads={plan.threads}"
            )
