"""Records of a workload on this device: before any step has run, and before any plan has run."""

from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.measure.numerics import plan_tolerance
from autotune.records.device import Device


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What is known of a workload on this device without running a step of it."""

    graph: TrainGraph
    costs: Costs
    device: Device
    floor_bytes: int
    """Of the process that captured and profiled."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a workload on this device before any plan but the traced one has run."""

    graph: TrainGraph
    costs: Costs
    device: Device
    floor_bytes: int
    """Of a process that runs plans: interpreter, libraries, kernels' code."""
    baseline_fits: bool
    """Whether a plain eager step fits the memory, or the limit, at all."""
    capture_error: float | None
    """Largest error of the captured step against eager, as a share of what the gate admits; None if they could not be
    compared at any batch size. In records of earlier versions an absolute difference."""
    verified: str = ""
    """How the captured step was compared with eager; empty if it was not."""

    @property
    def tolerance(self) -> float | None:
        """Largest `max_error` accepted of a plan; a GPU's kernels add in any order."""
        return None if self.capture_error is None else plan_tolerance(self.device.kind)
