"""One capture for all plans of a step, beside plain eager: a capture takes longer than the steps of many plans."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autotune.capture.optimizers.optimizer_snapshot import OptimizerSnapshot
from autotune.capture.program import Program
from autotune.ir.plan import Plan
from autotune.runtime.prepared_step import StepPreparer
from autotune.runtime.train_step import TrainStep
from autotune.workloads.batch import batch_tensors
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.kernel_counts import Kernels

Run = Callable[[], Any]
"""One step; returns what the loss function returned."""


class Twins:
    """Two equal workloads of which the first is captured. Under each plan both begin as they were made."""

    def __init__(self, make: Callable[[], Workload]) -> None:
        self.one, self.other = make(), make()
        self.traced = TrainStep(self.one.model, self.one.loss_fn, self.one.optimizer, self.one.batch)
        """The captured step in its own order."""
        self.program = self.traced._selector.first
        self.graph = self.program.graph
        self._starts = [
            (each, {key: part.clone() for key, part in each.model.state_dict().items()}, OptimizerSnapshot(each.optimizer))
            for each in (self.one, self.other)
        ]  # fmt: skip

    @contextmanager
    def planned(self, plan: Plan | None = None) -> Iterator[Run]:
        """Restore both, and yield the captured one's step under a plan; None is the step as traced."""
        for each, state, kept in self._starts:
            each.model.load_state_dict(state)
            kept.restore()
        if plan is None:
            yield partial(self.traced, self.one.batch)
            return
        with planned_step(self.program, self.one, plan) as step:
            yield step

    def assert_equals_eager(self, plan: Plan | None = None, steps: int = 3) -> None:
        """Both end at the same bits, the captured one under a plan."""
        with self.planned(plan) as step:
            for seed in range(steps):
                torch.manual_seed(seed)
                planned = step()
                torch.manual_seed(seed)
                assert torch.equal(planned, eager_step(self.other)[0])
        assert worst_difference(tensors(self.one), tensors(self.other)) == 0.0


@contextmanager
def planned_step(program: Program, workload: Workload, plan: Plan) -> Iterator[Run]:
    """Yield the step of a workload under a plan, without another capture than `program`."""
    prepared = StepPreparer(plan, {}, adapts=False).prepare(program, plan)

    def step() -> Any:
        with program.updates.step():
            return prepared.executor(batch_tensors(workload.batch))

    try:
        yield step
    finally:
        prepared.close()


def plain_step(workload: Workload) -> torch.Tensor:
    """One eager step, without copies of the gradients."""
    made = workload.loss_fn(workload.model, workload.batch)
    loss = made[0] if isinstance(made, tuple) else made
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@dataclass(frozen=True)
class Beside:
    """Three captured steps, as traced, beside three eager ones."""

    twins: Twins
    eager: Kernels
    """Those of the second step: optimizer state comes to be in the first."""
    traced: Kernels
    losses: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    worst: float
    """Difference of everything afterwards."""

    def assert_equal(self) -> None:
        """Every loss, and everything afterwards, has eager's bits."""
        assert all(torch.equal(*pair) for pair in self.losses)
        assert self.worst == 0.0


def run_beside(make: Callable[[], Workload]) -> Beside:
    """Capture a step, and run it beside eager with a count of the kernels."""
    twins = Twins(make)
    kernels, losses = [], []
    for seed in range(3):
        pair = []
        for run in (partial(plain_step, twins.other), partial(twins.traced, twins.one.batch)):
            torch.manual_seed(seed)
            with Kernels() if seed == 1 else nullcontext() as counting:
                made = run()
            if seed == 1:
                kernels.append(counting)
            pair.append(made[0] if isinstance(made, tuple) else made)
        losses.append(tuple(pair))
    return Beside(twins, *kernels, tuple(losses), worst_difference(tensors(twins.one), tensors(twins.other)))
