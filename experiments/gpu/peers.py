"""PyTorch's own ways to save memory on a GPU, as workloads."""

from dataclasses import replace
from typing import Any

import torch

from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.benchmarks.frontier import peers


def workload(peer: str, model: str, **arguments: Any) -> Workload:
    """Make a zoo workload that always runs like this peer; `save_on_cpu` keeps what backward needs in pinned host memory."""
    if peer != "save_on_cpu":
        return peers.workload(peer, model, **arguments)
    base = ZOO[model](**arguments)
    assert base.loss_fn is not None
    plain_loss = base.loss_fn

    def loss(network: torch.nn.Module, batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return plain_loss(network, batch)

    return replace(base, loss_fn=loss)
