"""What a few steps leave behind, told by name, and how far that is from a reference."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.harness.eager import Eager, OnGradient
from autotune.harness.reference import Reference

STEPS = 2
"""Steps whose results are compared: the second runs on what the first wrote."""

Step = Callable[[], list[torch.Tensor]]
LastStep = Callable[[OnGradient], list[torch.Tensor]]


def tell_results(own: Eager, step: Step, last: LastStep, tell: OnGradient) -> None:
    """Run the compared steps from the initial state, each on another batch, and tell each result by name."""
    own.restore()
    first = own.workload.batch
    for number in range(STEPS):
        own.workload.batch = pytree.tree_map(partial(_shifted, by=number), first)
        made = step() if number < STEPS - 1 else last(lambda name, gradient: tell(f"gradient.{name}", gradient))
        for index, tensor in enumerate(made):
            tell(f"step {number}.result {index}", tensor)
        del made
    own.workload.batch = first
    for name, tensor in own.named_tensors():
        tell(name, tensor)


def compare(own: Eager, step: Step, last: LastStep, directory: Path) -> dict[str, Any]:
    """The largest error against the reference in a directory, and where it is."""
    reference = Reference(directory)
    errors: dict[str, float] = {}

    def tell(name: str, tensor: torch.Tensor) -> None:
        errors[name] = max(errors.get(name, 0.0), reference.error(name, tensor))

    tell_results(own, step, last, tell)
    missing = reference.names - errors.keys()
    errors |= dict.fromkeys(missing, float("inf"))
    worst = max(errors, key=lambda name: errors[name])
    where = f"{worst} {'was never made' if worst in missing else f'is off by {errors[worst]:.3g}'}"
    return {"max_error": errors[worst], "detail": where if errors[worst] else ""}


def _shifted(leaf: Any, by: int) -> Any:
    """Another batch of the same look: a step that remembers the first one's data shows itself."""
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim or not by:
        return leaf
    return torch.empty_like(leaf).copy_(leaf.roll(by, 0))
