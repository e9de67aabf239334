"""Zoo workload whose forward and backward are compiled under one setting of `activation_memory_budget`."""

from dataclasses import replace
from typing import Any

import torch

from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.benchmarks.frontier.peers import Compiled, disable_updates


def workload(setting: float, model: str, *, still: bool = False, **arguments: Any) -> Workload:
    """Make the workload compiled with eager's kernels, so that its gradients can be compared bit for bit.

    `still`: updates leave the parameters as they are.
    """
    base = ZOO[model](**arguments)
    if still:
        disable_updates(base)
    return replace(base, loss_fn=Compiled("aot_eager", setting).build(base).loss_fn)


def saved_bytes(setting: float, model: str, arguments: dict[str, Any]) -> int:
    """Return the bytes that the compiled forward saves for its backward, without parameters, buffers and batch."""
    torch._dynamo.reset()
    compiled = workload(setting, model, **arguments)
    persistent = {
        part.untyped_storage()._cdata
        for part in (*compiled.model.parameters(), *compiled.model.buffers(), *compiled.batch)
    }
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    assert compiled.loss_fn is not None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled.loss_fn(compiled.model, compiled.batch)
    nbytes = sum(tensor.untyped_storage().nbytes() for storage, tensor in saved.items() if storage not in persistent)
    del loss
    return nbytes
