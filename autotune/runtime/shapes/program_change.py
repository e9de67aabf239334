"""Describe how a step's program for another batch shape differs from the first one, so that another process may capture it.

Guards, parameters and the optimizer belong to the process that trains. What a shape changes is plain data: sizes in
arguments, bytes of values, and the form of results.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.capture.program import Call, Program
from autotune.capture.python.guards import GuardFailure, Guards, other_branch
from autotune.capture.values.batch_branches import BatchBranch
from autotune.ir.graph import TrainGraph
from autotune.runtime.shapes.step_costs import has_same_structure


@dataclass(frozen=True)
class ProgramChange:
    """Differences of a program for another shape of the batch."""

    graph: TrainGraph
    calls: Mapping[int, tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], Any]]
    """Arguments, keyword arguments and outputs of the calls that differ, by op."""
    metas: tuple[Any, ...]
    results: tuple[Any, ...]
    branches: tuple[BatchBranch, ...]
    """Branches on the batch's numbers, whose conditions may contain sizes."""
    constants: Mapping[int, torch.Tensor]
    """Tensors of the graph's constants that differ, by value."""

    def apply(self, first: Program) -> Program:
        """Return the program for the other shape. It has the conditions, parameters and updates of the first one."""
        calls = list(first.calls)
        for op, (args, kwargs, outputs) in self.calls.items():
            calls[op] = replace(calls[op], args=args, kwargs=kwargs, outputs=outputs)
        tensors = {**first.tensors, **self.constants}
        assert isinstance(first.guards, Guards)
        return replace(
            first, graph=self.graph, calls=tuple(calls), metas=self.metas, results=self.results, tensors=tensors,
            guards=ShapeGuards(first.guards, _stand_ins(first), self.branches),
        )  # fmt: skip


class ShapeGuards:
    """The first program's guards, for batches of another shape.

    Dynamo compares the shapes of the batch too, so its conditions are checked with stand-ins of the first shape, whose
    memory is never touched.
    """

    def __init__(self, first: Guards, stand_ins: list[torch.Tensor], branches: tuple[BatchBranch, ...]) -> None:
        self._first, self._stand_ins, self._branches = first, stand_ins, branches

    def hold(self, tensors: list[torch.Tensor], constants: list[Any]) -> bool:
        """Return whether all conditions hold for a step on the batch's parts."""
        kinds = zip(tensors, self._stand_ins, strict=True)
        return (
            all(_is_same_kind(*kind) for kind in kinds)
            and self._first.values_hold(self._stand_ins, constants)
            and all(branch.holds(tensors) for branch in self._branches)
        )

    def first_failure(self, tensors: list[torch.Tensor], constants: list[Any]) -> GuardFailure | None:
        """Return the first value that differs from its value at capture; None where all conditions hold."""
        for number, (tensor, stand_in) in enumerate(zip(tensors, self._stand_ins, strict=True)):
            if not _is_same_kind(tensor, stand_in):
                name = f"batch.{number}"
                return GuardFailure(name, name, f"{name} being a plain tensor", None, "")
        return self._first.changed_value(self._stand_ins, constants) or other_branch(self._branches, tensors)


def _is_same_kind(tensor: torch.Tensor, stand_in: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(stand_in)


def _is_portable(branch: BatchBranch) -> bool:
    """Return whether a branch depends on the batch alone."""
    compute = branch.compute
    return isinstance(compute, fx.GraphModule) and not compute.graph.find_nodes(op="get_attr")


def _stand_ins(program: Program) -> list[torch.Tensor]:
    metas = (program.metas[value] for value in program.batch)
    return [
        torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        for meta in metas
        if meta is not None
    ]


def describe_change(first: Program, other: Program) -> ProgramChange | str:
    """Return the change from one program to another of the same step, or in words why there is none.

    Both were captured in this process from the same objects. The guards of the first must hold the other, too: a shape for
    which the step reads other Python values needs guards of its own.
    """
    if other.recorded or first.recorded:
        return "Dynamo cannot trace the step"
    if first.free or other.free:
        return "the step reads tensors from outside of model and batch"
    if not has_same_structure(first.graph, other.graph):
        return "the step has other ops for this shape"
    if (first.batch, first.tangent, first.gradients, first.result_spec) != (
        other.batch,
        other.tangent,
        other.gradients,
        other.result_spec,
    ):
        return "the results have another structure for this shape"
    if not isinstance(first.guards, Guards) or not isinstance(other.guards, Guards):
        return "the step has guards of another kind"
    if not all(map(_is_portable, other.guards.branches)):
        return "a condition of the step reads a tensor of the model"
    if first.guards.conditions != other.guards.conditions:
        return "the step reads other Python values for this shape"
    if any(
        _target(first, call) != _target(other, other_call)
        for call, other_call in zip(first.calls, other.calls, strict=True)
    ):
        return "the step runs other kernels for this shape"
    calls = {
        op: (changed.args, changed.kwargs, changed.outputs)
        for op, (call, changed) in enumerate(zip(first.calls, other.calls, strict=True))
        if (call.args, call.kwargs, call.outputs) != (changed.args, changed.kwargs, changed.outputs)
    }
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(list(calls.values()))):
        return "the gradients of parameters are other parts of values for this shape"
    constants = {value: tensor for value, tensor in other.tensors.items() if tensor is not first.tensors.get(value)}
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in constants.values()):
        return "the step trains other parameters for this shape"
    return ProgramChange(other.graph, calls, other.metas, other.results, other.guards.branches, constants)


def dump(change: Any) -> bytes:
    """Return a change as bytes; PyTorch's ops are stored by name.

    Raises an exception of pickle where a part is neither data nor an importable function.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(change)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, part: Any) -> Any:
        """Store an op of PyTorch by its name."""
        if isinstance(part, torch._ops.OpOverload):
            namespace, _, name = part._schema.name.partition("::")
            return _find_op, (namespace, name, part._overloadname)
        return NotImplemented


def _find_op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _target(program: Program, call: Call) -> Any:
    """Return the target of a call; a method of the program's updates by its name."""
    if getattr(call.target, "__self__", None) is program.updates and program.updates is not None:
        return call.target.__name__
    return call.target
