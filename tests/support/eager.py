"""The user's own training step in plain PyTorch: what every plan is compared with."""

from typing import Any

import torch

from autotune.ir.plan import Plan
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload


def eager_step(workload: Workload) -> tuple[Any, dict[str, torch.Tensor]]:
    """One step; what the loss function returned, detached, and the gradients by parameter."""
    assert workload.loss_fn is not None
    assert workload.optimizer is not None
    made = workload.loss_fn(workload.model, workload.batch)
    loss = made[0] if isinstance(made, tuple) else made
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in workload.model.named_parameters() if p.grad is not None}
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def tensors(workload: Workload) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state by name."""
    found = dict(workload.model.state_dict())
    assert workload.optimizer is not None
    for name, parameter in workload.model.named_parameters():
        for key, part in workload.optimizer.state.get(parameter, {}).items():
            if isinstance(part, torch.Tensor):
                found[f"{name}.{key}"] = part
    return found


def worst_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference between tensors of one name; infinity where the names differ."""
    if one.keys() != other.keys():
        return float("inf")
    different = [(one[key], other[key]) for key in one if not torch.equal(one[key], other[key])]
    return max(((a.double() - b.double()).abs().max().item() for a, b in different), default=0.0)


def assert_equals_eager(one: Workload, other: Workload, plan: Plan | None = None, steps: int = 2) -> None:
    """`one` under a plan and `other` in plain eager end at the same bits."""
    assert one.loss_fn is not None
    assert one.optimizer is not None
    with TrainStep(one.model, one.loss_fn, one.optimizer, one.batch, plan) as step:
        for seed in range(steps):
            torch.manual_seed(seed)
            planned = step(one.batch)
            torch.manual_seed(seed)
            assert torch.equal(planned, eager_step(other)[0])
    assert worst_difference(tensors(one), tensors(other)) == 0.0
