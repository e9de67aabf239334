"""Time short ops on a GPU by its own clock, without the time of their launches."""

import math
from collections.abc import Callable
from typing import Any

import torch

LEAST_SECONDS = 1e-3
"""Duration of a timed batch: much longer than the resolution of an event, half a microsecond."""
MAX_REPEATS = 50
"""Maximum number of calls in a batch."""
_PLUG_CYCLES = 2_000_000
"""Clock cycles, about a millisecond, for which the GPU is kept busy while the host queues a batch behind them."""


def kernel_seconds(call: Callable[[], object], device: torch.device, cuda: Any = None) -> float:
    """Return the seconds that one call takes on the GPU.

    The host needs 10 us to launch what may run for 3 us. The batch is therefore queued behind a kernel that only waits, and
    events measure from the first call's start to the last one's end.

    Args:
        call: Queues the work on the current stream. It runs a few times before it is measured.
        device: The GPU.
        cuda: Replacement of `torch.cuda`, for tests.
    """
    cuda = cuda or torch.cuda
    with cuda.device(device):
        call()  # libraries choose algorithms and load kernels at first use
        seconds = _time_batch(call, 1, cuda)
        repeats = min(MAX_REPEATS, math.ceil(LEAST_SECONDS / max(seconds, LEAST_SECONDS / MAX_REPEATS)))
        return _time_batch(call, repeats, cuda) if repeats > 1 else seconds


def _time_batch(call: Callable[[], object], repeats: int, cuda: Any) -> float:
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    cuda._sleep(_PLUG_CYCLES)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def describe_kernels() -> str:
    """Describe everything besides the GPU by which libraries choose kernels; costs of one choice are not those of another."""
    cudnn: Any = torch.backends.cudnn
    cublas = torch.backends.cuda.matmul
    switches = {
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "bf16 sums": cublas.allow_bf16_reduced_precision_reduction,
        "fp16 sums": cublas.allow_fp16_reduced_precision_reduction,
    }
    on = ", ".join(name for name, is_on in switches.items() if is_on)
    # where a precision was set, `allow_tf32` raises an error
    precisions = f"products {cublas.fp32_precision}, convolutions {cudnn.conv.fp32_precision}, recurrent layers {cudnn.rnn.fp32_precision}"
    read_driver = getattr(torch._C, "_cuda_getDriverVersion", None)  # a build for CPUs has none
    driver = read_driver() if read_driver is not None else None
    return f"CUDA {torch.version.cuda} driver {driver} cuDNN {cudnn.version() if cudnn.is_available() else None} ({on}; {precisions})"
