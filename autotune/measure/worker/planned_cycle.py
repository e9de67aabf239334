"""Run the steps of one update of a loop that needs every gradient, under a plan."""

import torch

from autotune.capture.optimizers.loop_updates import LoopUpdates
from autotune.errors import StoreError
from autotune.measure.worker.eager import EagerWorkload, OnGradient, detached_tensors
from autotune.runtime.executor import Executor, seed_gradient


def run_planned_cycle(
    eager: EagerWorkload, executor: Executor, updates: LoopUpdates, on_gradient: OnGradient | None
) -> list[torch.Tensor]:
    """Return the results of the last step; the loop reports all gradients before its update, as in eager.

    Raises:
        StoreError: A value stayed in memory, so the bytes are not the plan's.
    """
    cycle = eager.cycle
    assert cycle is not None
    eager.on_gradient, updates.on_complete = on_gradient, cycle.count_step
    outputs: list[torch.Tensor] = []
    for number in range(updates.loop.accumulate):
        outputs.clear()
        executor.is_whole = cycle.ends_with_next_step
        if cycle.scaler is not None:
            seed = seed_gradient(executor.program)
            executor.tangent = cycle.scaler.scale(seed).to(seed.dtype)
        with updates.step():
            outputs = detached_tensors(executor(eager.batch(number)))
        if executor.problem:
            raise StoreError(executor.problem)
    return outputs
