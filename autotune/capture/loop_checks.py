"""Refuse a training loop in which a planned step would differ from the loop in plain PyTorch."""

import os
import sys
import threading
import warnings
import weakref
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.capture.fx_nodes import get_attribute
from autotune.capture.program import Program
from autotune.errors import CaptureError, ConfigError
from autotune.workloads.workload import Workload


class _Captures:
    """Captures of this process, one at a time."""

    def __init__(self) -> None:
        self.lock, self.running = threading.RLock(), 0


_CAPTURES = _Captures()


@contextmanager
def one_capture() -> Iterator[None]:
    """Let one thread capture at a time: meanwhile the tracer turns autograd's anomaly mode on, for the whole process."""
    with _CAPTURES.lock:
        _CAPTURES.running += 1
        try:
            yield
        finally:
            _CAPTURES.running -= 1


def refuse_modes(*, trains: bool) -> None:
    """Raise ConfigError for active modes that a planned step does not support. `trains`: the step has an optimizer."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(
            "torch.autocast is on around the step, so backward and update would run under it too; enter it in the loss function "
            "instead, and not in the model's forward"
        )
    if not trains:
        return
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ConfigError(
            f"torch.{mode} is on around the step, where backward fails in plain PyTorch too; call the step outside of it"
        )
    refuse_anomaly_mode()


def refuse_anomaly_mode() -> None:
    """Raise ConfigError for autograd's anomaly mode, which finds nothing in a step that runs without autograd."""
    if torch.is_anomaly_enabled() and not _CAPTURES.running:
        raise ConfigError(
            "torch.autograd's anomaly mode is on, but a planned step runs without autograd; turn the mode off, or find the "
            "anomaly with loss_fn(model, batch).backward()"
        )


def refuse_fork(pid: int, maker: str) -> None:
    """Raise ConfigError for a step that offloads in a forked child: the threads of its store exist only in the parent.

    `maker` is the class that made the step.
    """
    if os.getpid() != pid:
        raise ConfigError(
            f"the step was created in process {pid} and is called in {os.getpid()}, where the threads of its store do not exist; "
            f"create the {maker} in the process that calls it"
        )


def refuse_unreduced(model: torch.nn.Module, *, reduces: bool, verifies: bool) -> None:
    """Raise ConfigError for wrappers of `torch.distributed`, and for a model whose gradients are not reduced over the ranks.

    `reduces`: the step has a `before_update`. `verifies`: the first steps run several times, to compare with eager.
    The number of runs may differ between ranks. The reductions of two ranks would then no longer match.
    """
    if (wrapper := _wrapper(model)) is not None:
        raise ConfigError(
            f"the model is wrapped in {wrapper}, whose communication a planned step never runs; pass the module within it, "
            "and before_update=... that all-reduces every .grad"
        )
    if count_ranks() < 2:
        return
    if not reduces:
        raise ConfigError(
            f"torch.distributed has {count_ranks()} ranks, and gradients are not reduced; pass before_update=... that all-reduces "
            "every .grad; pass one that does nothing if ranks train apart"
        )
    if verifies:
        raise ConfigError(
            f"torch.distributed has {count_ranks()} ranks, and verify may run before_update more often on one of them; "
            "pass verify=False, and verify the step in a single process"
        )


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raise ConfigError for a planned loss of a model in a wrapper of `torch.distributed`, which a plan would leave out."""
    if (wrapper := _wrapper(model)) is not None:
        raise ConfigError(
            f"the model is wrapped in {wrapper}, whose communication a captured loss never runs; make the PlannedLoss of the "
            "module within it, and wrap that loss, as DistributedDataParallel(PlannedLoss(module, loss_fn))"
        )


def refuse_no_gradient(program: Program, name: str) -> None:
    """Raise CaptureError for a loss that has no gradient, so that `backward` would fail."""
    if program.tangent is None:
        raise CaptureError(
            f"the loss of {name} has no gradient, so backward fails in plain PyTorch too; look for detach(), no_grad, "
            "parameters that do not require a gradient, or a loss function without a return"
        )


def refuse_result(spec: pytree.TreeSpec) -> None:
    """Raise CaptureError for a loss function that returns neither the loss nor a tuple that begins with it."""
    if not spec.is_leaf() and spec.type not in (tuple, namedtuple):
        raise CaptureError(
            f"the loss function returns a {spec.type.__name__}, whose backward() fails in plain PyTorch too; return the loss, or "
            "a tuple of the loss and further results"
        )


def count_ranks() -> int:
    """Return the number of processes of `torch.distributed`; 1 without a process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def _wrapper(model: torch.nn.Module) -> str | None:
    """Return the name of the first wrapper in a model that communicates; FSDP2 adds its class to the class of each module."""
    names = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
    for module in model.modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in names), None)
        if wrapper is not None:
            return wrapper
    return None


def find_differentiated(graph: fx.Graph, owner: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters that have a gradient in a joint graph, whether or not anything reads it."""
    output = graph.output_node()
    returned: Any = output.args[0]
    return {
        id(get_attribute(owner, desc.grad_of.target))
        for node, desc in zip(returned, output.meta["desc"], strict=True)
        if node is not None and type(desc).__name__ == "GradAOTOutput" and hasattr(desc.grad_of, "target")
    }


_warned: dict[int, tuple[weakref.ref[torch.nn.Module], list[int]]] = {}
"""Models by id, with the ids of the parameters that the last such warning named."""


def warn_of_untrained(workload: Workload, program: Program, differentiated: set[int]) -> None:
    """Warn of gradients that a captured step does not compute, because no optimizer of the step reads them.

    `differentiated` are the ids of the parameters that have a gradient. Further captures of a model, as for other shapes of
    the batch, do not warn of the same parameters.
    """
    updates, model = program.updates, workload.model
    if updates is None:
        return
    untrained = {n: p for n, p in model.named_parameters() if id(p) in differentiated and not updates.owns(p)}
    names, ids = [*untrained], [*map(id, untrained.values())]
    warned, before = _warned.get(id(model), (None, []))
    if not names or (warned is not None and warned() is model and before == ids):
        return
    _warned[id(model)] = weakref.ref(model), ids
    reader = "before_update sees" if workload.loop.clip else "a planned step computes"
    warnings.warn(
        f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} require a gradient, and the optimizer does not train "
        f"them: {reader} no gradient of them. If another optimizer trains them, use PlannedLoss, whose backward() sets all "
        "gradients. Else freeze them by requires_grad_(False)",
        stacklevel=3,
    )
