"""Time a training step without and with CUDA graphs, and compare the losses: `python -m experiments.gpu.graphs MODEL [ARGUMENTS]`.

It prints JSON: the medians of both in seconds, their ratio, the largest difference of a loss, the number of graphs, and
the reason if the step ran without them. ARGUMENTS are those of the zoo workload, as JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.runtime.executor import Executor
from autotune.runtime.gpu.cuda_recorder import CudaRecorder
from autotune.runtime.gpu.graphed_step import WARM_UP_STEPS, GraphRecorder
from autotune.workloads.batch import batch_tensors, map_batch
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO

STEPS = 30
"""Number of timed steps."""


def main(arguments: Sequence[str]) -> int:
    """Measure one model on the current GPU."""
    model, options = arguments[0], json.loads(arguments[1]) if len(arguments) > 1 else {}
    device = torch.device("cuda", torch.cuda.current_device())
    print(json.dumps(measure(lambda: ZOO[model](**options), device, lambda: CudaRecorder(device))))
    return 0


def measure(
    make: Callable[[], Workload],
    device: torch.device,
    make_recorder: Callable[[], GraphRecorder],
    steps: int = STEPS,
) -> dict[str, Any]:
    """Return the figures of two equal trainings, one after the other; `make` returns the workload on a CPU."""
    seconds, losses = {}, {}
    graphed = None
    for name, recorder in (("launches", None), ("graphs", make_recorder)):
        torch.manual_seed(0)
        workload = make()
        workload.model.to(device)
        workload.batch = map_batch(lambda leaf: leaf.to(device), workload.batch)
        program = capture(workload)
        executor = Executor(program, lower(program.graph, Plan.traced(program.graph)), make_recorder=recorder)
        seconds[name], losses[name] = _time(executor, batch_tensors(workload.batch), device, steps)
        graphed = executor.graphed
    assert graphed is not None
    return {
        "seconds": seconds,
        "time_ratio": seconds["graphs"] / seconds["launches"],
        "loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        "graphs": graphed.graphs,
        "problem": graphed.problem,
    }


def _time(executor: Executor, batch: list[torch.Tensor], device: torch.device, steps: int) -> tuple[float, list[float]]:
    """Return the median seconds of a step, and all losses."""
    times, losses = [], []
    updates = executor.program.updates
    assert updates is not None
    torch.manual_seed(0)
    for step in range(WARM_UP_STEPS + 1 + steps):
        start = time.perf_counter()
        with updates.step():
            result = executor(batch)
        losses.append((result[0] if isinstance(result, tuple) else result).detach())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step > WARM_UP_STEPS:  # the first step after the warm-up captures
            times.append(time.perf_counter() - start)
    return statistics.median(times), [loss.item() for loss in losses]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
