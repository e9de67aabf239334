"""Count the tensor bytes of a workload's plain eager step, on fake tensors or real ones.

The count contains every tensor that is alive when an ATen op ends: parameters, buffers, batch, optimizer state,
gradients, activations saved for the backward pass, and results. It excludes a kernel's workspace, the allocator's
rounding and reserve, and the process without tensors; eager's measured peak is higher by these.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.capture.fake.fake_workload import fake_tensors
from autotune.capture.optimizers.loop_updates import MAX_NORM
from autotune.errors import ConfigError
from autotune.workloads.batch import batch_tensors, spans_of_storages
from autotune.workloads.factory import load_workload
from autotune.workloads.workload import Workload, infer, select_loss

_READ_SCALAR = torch.ops.aten._local_scalar_dense.default


class LiveBytesCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of all storages that are alive, after every op in the `with` block.

    >>> import torch
    >>> with LiveBytesCounter() as counter:
    ...     x = torch.ones(256) + torch.ones(256)
    >>> counter.peak_bytes
    3072
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.scalar: float | None = None
        """Value of every scalar that an op reads out of a tensor; None to read the tensor, which fake tensors forbid."""
        self._storages: dict[int, weakref.ref[Any]] = {}

    def count(self, tensors: Any) -> None:
        """Count the storages of all tensors in a nested structure, each storage once as long as it is alive."""
        for tensor in pytree.tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._count_storage(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def count_batch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count what the tensors of a batch span of their storages: a slice of a data set counts alone."""
        spans = spans_of_storages(tensors)
        for tensor in tensors:
            self._count_storage(tensor.untyped_storage(), spans[tensor.untyped_storage()._cdata])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, then count its results."""
        if func is _READ_SCALAR and self.scalar is not None:
            return self.scalar
        results = func(*args, **(kwargs or {}))
        self.count(results)
        return results

    def _count_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)
        if key in self._storages and self._storages[key]() is storage:
            return

        def release(_: object) -> None:
            self.live_bytes -= nbytes

        self._storages[key] = weakref.ref(storage, release)
        self.live_bytes += nbytes


def count_eager_bytes(workload: Workload) -> int:
    """Return the peak of live tensor bytes during a warm eager step; the first step creates the optimizer's state.

    Works on fake tensors inside the mode that made them, and on real tensors, which it trains for two steps.
    """
    counter = LiveBytesCounter()
    state = workload.optimizer.state if workload.optimizer is not None else {}
    counter.count([list(workload.model.parameters()), list(workload.model.buffers()), list(state.values())])
    counter.count_batch(batch_tensors(workload.batch))
    with counter:
        _run_step(workload, counter)
        counter.peak_bytes = counter.live_bytes
        _run_step(workload, counter)
    return counter.peak_bytes


def _run_step(workload: Workload, counter: LiveBytesCounter) -> None:
    if workload.loss_fn is None:
        with torch.no_grad():
            infer(workload.model, workload.batch)
        return
    for _ in range(min(2, workload.loop.accumulate)):  # every later micro-batch needs what the second one needs
        results = workload.loss_fn(workload.model, workload.batch)
        loss = select_loss(results)
        loss.backward()
    if workload.loop.clip:
        torch.nn.utils.clip_grad_norm_(workload.model.parameters(), MAX_NORM)
    if workload.optimizer is not None:
        # optimizers read their step count, which changes values but no bytes
        counter.scalar = 1.0
        workload.optimizer.step()
        counter.scalar = None
    workload.model.zero_grad(set_to_none=True)


def count_workload_bytes(reference: str, arguments: Mapping[str, Any], loop: str = "") -> int:
    """Return the peak of live tensor bytes of a workload's eager step, with its tensors faked.

    Raises ConfigError where the workload cannot be made, or its eager step cannot run on fake tensors.
    """
    with fake_tensors():
        workload = load_workload(reference, arguments, loop)
        try:
            return count_eager_bytes(workload)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            # an op without a shape function, or a branch on data
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ConfigError(f"{reference}: the eager step cannot run on fake tensors: {reason}") from error
