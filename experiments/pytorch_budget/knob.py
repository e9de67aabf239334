"""A ready workload whose forward and backward are compiled under one setting of `activation_memory_budget`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO

sys.path.insert(0, str(Path(__file__).parents[1] / "frontier"))
from peers import Compiled


def workload(setting: float, model: str, **arguments: Any) -> Workload:
    """On eager's kernels, so that gradients can be compared to the bit."""
    made = ZOO[model](**arguments)
    return replace(made, loss_fn=Compiled("aot_eager", setting).way(made).loss_fn)


def saved_bytes(setting: float, model: str, arguments: dict[str, Any]) -> int:
    """What the compiled forward saves for its backward, parameters, buffers and batch aside."""
    torch._dynamo.reset()
    given = workload(setting, model, **arguments)
    own = {part.untyped_storage()._cdata for part in (*given.model.parameters(), *given.model.buffers(), *given.batch)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    assert given.loss_fn is not None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = given.loss_fn(given.model, given.batch)
    found = sum(tensor.untyped_storage().nbytes() for storage, tensor in saved.items() if storage not in own)
    del loss
    return found
