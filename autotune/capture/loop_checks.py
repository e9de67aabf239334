"""Refuse a loop around the step in which it would do something else than the loop in plain PyTorch."""

import os
import sys

import torch

from autotune.capture.program import Program
from autotune.errors import CaptureError, ConfigError


def refuse_modes(*, trains: bool) -> None:
    """Refuse the modes that a planned step cannot run under."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(
            "torch.autocast is on around the step, whose backward and update would run under it too; enter it in the loss "
            "function, without one in the model's forward"
        )
    if not trains:
        return
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ConfigError(
            f"torch.{mode} is on around the step, where backward fails in plain PyTorch too; call the step outside of it"
        )
    if torch.is_anomaly_enabled():
        raise ConfigError(
            "torch.autograd's anomaly mode is on, but a planned step has no autograd in which it could look; turn it off, or "
            "look for the anomaly with loss_fn(model, batch).backward()"
        )


def refuse_fork(pid: int) -> None:
    """Refuse a step that offloads in a forked child: the threads of its store are the parent's."""
    if os.getpid() != pid:
        raise ConfigError(
            f"the step was made in process {pid} and is called in {os.getpid()}, where the threads of its store do not exist; "
            "make the TrainStep in the process that calls it"
        )


def refuse_unreduced(model: torch.nn.Module, *, reduces: bool) -> None:
    """Refuse wrappers of `torch.distributed`, and a model whose gradients nothing reduces over the ranks."""
    if (wrapper := _wrapper(model)) is not None:
        raise ConfigError(
            f"the model is wrapped in {wrapper}, whose communication a planned step never runs; pass the module within it, "
            "and before_update=... that all-reduces every .grad"
        )
    if reduces or _ranks() < 2:
        return
    raise ConfigError(
        f"torch.distributed has {_ranks()} ranks, and gradients are not reduced: pass before_update=... that all-reduces "
        "every .grad; pass one that does nothing if ranks train apart"
    )


def refuse_no_gradient(program: Program, name: str) -> None:
    """Refuse a loss that has no gradient, from which `backward` would fail."""
    if program.tangent is None:
        raise CaptureError(
            f"the loss of {name} has no gradient, so backward fails in plain PyTorch too; look for detach(), no_grad, or "
            "parameters that do not require a gradient"
        )


def _ranks() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def _wrapper(model: torch.nn.Module) -> str | None:
    """Return the name of the first wrapper in a model that communicates; FSDP2 puts its class into each module's own."""
    names = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
    for module in model.modules():
        found = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in names), None)
        if found is not None:
            return found
    return None
