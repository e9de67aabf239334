"""Present forward and loss of a step as one module, for a tracer."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.capture_checks import is_dense, refuse_layouts
from autotune.workloads.batch import FlatBatch, flatten_batch, ignores_list_type, make_build
from autotune.workloads.workload import LossFn, Workload, infer

CONSTANTS = "L['self'].constants"
"""Dynamo's expression for the batch's parts without tensors."""


class StepModule(torch.nn.Module):
    """Forward and loss of a step: takes the batch's tensors, returns the loss and detached extras."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.training = workload.model.training
        self.model = workload.model
        self.loss_fn = workload.loss_fn
        flat = flatten_for_step(workload.batch, workload.loss_fn)
        # kept here, the batch's own tensors would be traced as constants: every later batch would be the first
        self.constants = list(flat.constants)
        """Parts of the batch without tensors; a tracer guards those that the step reads."""
        self._build = make_build(flat.structure)
        self._names = flat.names()[1]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run `forward` without torch's hooks for every module: they would change the loss once more than in eager."""
        return self.forward(*tensors)

    def forward(self, *tensors: torch.Tensor) -> Any:
        batch = self._build(tensors, self.constants)
        if self.loss_fn is not None:
            result = self.loss_fn(self.model, batch)
            return like_tuple(result, (result[0], *_detach(result[1:]))) if isinstance(result, tuple) else result
        return infer(self.model, batch)

    def spell(self, source: str) -> str:
        """Replace Dynamo's expression for a part of the batch by the user's."""
        return re.sub(rf"{re.escape(CONSTANTS)}\[(\d+)\]", lambda match: self._names[int(match[1])], source)

    def named_constants(self) -> Iterable[tuple[str, Any]]:
        """Return the batch's parts without tensors, by the user's names."""
        return zip(self._names, self.constants, strict=True)

    def numbers_only(self, sources: frozenset[str]) -> frozenset[str]:
        """Return the sources without parts of the batch that are no floats; a batch of another structure has other parts."""
        floats = {f"{CONSTANTS}[{i}]" for i, part in enumerate(self.constants) if type(part) is float}
        return frozenset(source for source in sources if not source.startswith(CONSTANTS) or source in floats)


def flatten_for_step(batch: Any, loss_fn: LossFn | None) -> FlatBatch:
    """Return the parts of a batch; a list counts as a tuple where the loss function cannot distinguish them.

    Raises CaptureError for a sparse or nested tensor.
    """
    flat = flatten_batch(batch, list_as_tuple=type(batch) is list and ignores_list_type(loss_fn))
    if not all(map(is_dense, flat.tensors)):
        refuse_layouts(zip(flat.names()[0], flat.tensors, strict=True))
    return flat


def like_tuple(template: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values as a named tuple of the template's type; as a plain tuple where the template is one."""
    return type(template)(*values) if hasattr(template, "_fields") else values


def _detach(tree: Any) -> Any:
    return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, tree)
