"""Compare the steps of twins bit by bit: results, parameters, buffers, optimizer state, generator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.workloads.workload import Workload
from experiments.benchmarks.coverage.subject import Subject

STEPS = 4
SEED = 5
ROUNDING = 1e-3
"""Largest difference over the largest element of the tensor that counts as rounding."""

Snapshot = dict[str, Any]
"""What is compared after one step, by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two sequences of steps."""

    step: int
    """First step that differs; 0 is the first one."""
    name: str
    """First part that differs in that step."""
    worst: float
    """Largest difference in all steps, over the largest element of its tensor; infinity for other kinds of parts."""

    @property
    def is_rounding(self) -> bool:
        """Return whether the difference may come from another order of additions."""
        return self.worst <= ROUNDING

    def __str__(self) -> str:
        return f"step {self.step}: {self.name} (worst {self.worst:.2g})"


def run_eagerly(workload: Workload, batch: Any) -> Any:
    """Run one step in plain PyTorch; return what the loss function returns."""
    assert workload.loss_fn is not None
    assert workload.optimizer is not None
    results = workload.loss_fn(workload.model, batch)
    loss = results[0] if isinstance(results, tuple) else results
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)
    return results


def record(subject: Subject, workload: Workload, step: Callable[[Any], Any]) -> list[Snapshot]:
    """Run the steps of a subject from one seed; return a snapshot of each."""
    import numpy as np

    snapshots = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        np.random.seed(SEED)
        for number in range(STEPS):
            results = step(subject.batch(number))
            snapshots.append(dict(_parts(workload, results)))
    return snapshots


def _parts(workload: Workload, results: Any) -> Iterator[tuple[str, Any]]:
    assert workload.optimizer is not None
    yield "generator", torch.get_rng_state()
    for number, leaf in enumerate(pytree.tree_leaves(results)):
        yield f"result {number}", _copy(leaf)
    for name, tensor in workload.model.state_dict().items():
        yield name, _copy(tensor)
    for name, parameter in workload.model.named_parameters():
        for key, part in workload.optimizer.state.get(parameter, {}).items():
            yield f"{key} of {name}", _copy(part)


def _copy(part: Any) -> Any:
    return part.detach().clone() if isinstance(part, torch.Tensor) else part


def first_difference(wanted: list[Snapshot], actual: list[Snapshot]) -> Difference | None:
    """Return where two sequences of snapshots differ; None where every bit is equal."""
    first: tuple[int, str] | None = None
    worst = 0.0
    for number, (one, other) in enumerate(zip(wanted, actual, strict=True)):
        for name in one.keys() | other.keys():
            distance = _distance(one.get(name), other.get(name))
            if distance > 0:
                first = min(first or (number, name), (number, name))
                worst = max(worst, distance)
    return None if first is None else Difference(*first, worst)


def _distance(one: Any, other: Any) -> float:
    """Return the largest difference over the largest element; 0 for equal bits, infinity for parts of other kinds."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0 if type(one) is type(other) and one == other else float("inf")
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return float("inf")
    if torch.equal(one, other) or _have_equal_bytes(one, other):
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float("inf")
    distance = (one - other).abs().double().max() / one.abs().double().max().clamp_min(1e-30)
    return float(distance) if torch.isfinite(distance) else float("inf")


def _have_equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal bytes: a NaN equals no number."""
    pair = [part.contiguous().flatten().view(torch.uint8) if part.numel() else part for part in (one, other)]
    return torch.equal(*pair)
