"""Capture a workload's step on fake tensors, for one batch size among several that are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.capture.fake.fake_workload import capture_on_fake_tensors
from autotune.capture.fake.modelled_costs import model_costs
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.workloads.factory import load_workload
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """Step of one batch size, captured without memory for its tensors."""

    graph: TrainGraph
    costs: Costs
    """Modelled seconds; workspaces count as zero bytes."""
    loop: Loop = field(default_factory=Loop)
    """Training loop of the step."""
    has_updates: bool = True
    """True if the step updates parameters: an optimizer is there, and the loop leaves the update to it."""


def capture_sized_step(reference: str, arguments: Mapping[str, Any], loop: str = "") -> CapturedStep:
    """Return the captured step of a workload by its reference, the arguments of its factory and its training loop.

    Raises:
        ConfigError: The workload cannot be made.
        CaptureError: Its step cannot be captured.
    """
    workloads: list[Workload] = []

    def make() -> Workload:
        workloads.append(load_workload(reference, arguments, loop))
        return workloads[0]

    program = capture_on_fake_tensors(make, reference)
    return CapturedStep(program.graph, model_costs(program), workloads[0].loop, workloads[0].optimizer is not None)
