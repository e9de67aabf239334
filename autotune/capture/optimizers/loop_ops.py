"""Change a captured step to hand its gradients to a loop, instead of updating each parameter at once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autotune.capture.bindings import Bindings
from autotune.capture.optimizers.loop_updates import LoopUpdates, copy_to_layout, gradient_strides, has_layout
from autotune.capture.optimizers.optimizer import GradientUse
from autotune.capture.program import Call, Meta, Program, Read, argument_text, hash_signature, reads
from autotune.ir.allocation import allocated_bytes
from autotune.ir.graph import Op, Phase, Role, Value
from autotune.workloads.loop import Loop


def apply_loop(base: Program, loop: Loop) -> Program:
    """Return a captured step as a loop runs it; `base` is the step that updates each parameter at once.

    Values keep their ids, and new ones follow them. Without accumulation a gradient lives until the last op, which lets
    the loop update. With accumulation an op adds each gradient to a sum that lives between steps, as optimizer state does.
    """
    if base.updates is None or not loop.needs_all_gradients:
        return base
    return _LoopOps(base, loop).program()


class _LoopOps:
    """Ops, calls and values of a step in a loop."""

    def __init__(self, base: Program, loop: Loop) -> None:
        self._base, self._loop = base, loop
        self._updates = LoopUpdates(base, loop)
        self._values = list(base.graph.values)
        self._metas = list(base.metas)
        self._ops: list[Op] = []
        self._calls: list[Call] = []

    def program(self) -> Program:
        """Return the step with the loop's ops."""
        graph = self._base.graph
        updates = dict(self._update_ops())
        waiting: dict[int, list[GradientUse]] = {}
        for uses in updates.values():
            for use in uses:
                producers = [graph.producer[value] for value in reads(use.gradient)]
                waiting.setdefault(max((op for op in producers if op is not None), default=-1), []).append(use)
        complete = [self._take(use) for use in waiting.get(-1, ())]
        for op in graph.ops:
            if op.id not in updates:
                self._add(op, self._base.calls[op.id])
            complete += [self._take(use) for use in waiting.get(op.id, ())]
        self._finish(complete, [graph.ops[op] for op in updates])
        sums = tuple(self._updates.accumulated)
        return replace(
            self._base,
            graph=replace(
                graph, ops=tuple(self._ops), values=tuple(self._values), inputs=tuple(sorted((*graph.inputs, *sums)))
            ),
            calls=tuple(self._calls),
            metas=tuple(self._metas),
            updates=self._updates,
            opened=None,  # regions are made of `base`
        )

    def _update_ops(self) -> Iterator[tuple[int, list[GradientUse]]]:
        assert self._base.updates is not None
        for op, call in enumerate(self._base.calls):
            if uses := self._base.updates.gradient_uses(call.target, call.args):
                yield op, uses

    def _take(self, use: GradientUse) -> GradientUse:
        """Add the op that a gradient needs as soon as it exists; return the gradient for the last op."""
        if self._loop.accumulates:
            self._accumulate(use)
            return replace(use, gradient=None, shared=False)
        if self._needs_copy(use):
            return replace(use, gradient=self._copy(use), shared=False)
        return use

    def _accumulate(self, use: GradientUse) -> None:
        parameter = self._base.tensors[use.parameter.value]
        nbytes = _tensor_bytes(parameter)
        total = self._add_value(f"{use.name}.grad.sum", nbytes, Role.STATE, None)
        self._updates.accumulated[total] = parameter
        op = self._op(
            f"{use.name}.accumulate", "accumulate", Phase.BACKWARD, (*reads(use.gradient), total), use.gradient
        )
        self._add(
            replace(op, layer=use.name.rpartition(".")[0], writes=(total,)),
            Call(self._updates.accumulate, (use.name, parameter, use.gradient)),
        )

    def _copy(self, use: GradientUse) -> Read:
        parameter = self._base.tensors[use.parameter.value]
        shape, strides = tuple(parameter.shape), gradient_strides(parameter)
        nbytes = _tensor_bytes(parameter)
        meta = Meta(shape, strides, parameter.dtype, parameter.device)
        copied = self._add_value(f"{use.name}.grad.copy", nbytes, Role.GRAD, meta)
        arguments = (use.gradient, shape, strides)
        op = self._op(f"{use.name}.copy", "gradient_copy", Phase.BACKWARD, tuple(reads(use.gradient)), arguments)
        self._add(
            replace(op, layer=use.name.rpartition(".")[0], outputs=(copied,), repeatable=True),
            Call(copy_to_layout, arguments, (), copied),
        )
        return Read(copied)

    def _needs_copy(self, use: GradientUse) -> bool:
        """Return True for a gradient that others read too, is a part of a value, or lies otherwise than in `.grad`."""
        values = set(reads(use.gradient))
        if use.shared or len(values) != 1:
            return True
        parameter = self._base.tensors[use.parameter.value]
        example = Bindings(self._base.metas).example(use.gradient)
        is_whole = _tensor_bytes(example) == self._values[values.pop()].nbytes
        return not is_whole or not has_layout(example, tuple(parameter.shape), gradient_strides(parameter))

    def _finish(self, uses: list[GradientUse], updates: list[Op]) -> None:
        """Add the last op, in which the loop updates: after all gradients, buffers and random numbers of the step."""
        assert self._base.updates is not None
        written = dict.fromkeys(value for op in updates for value in op.writes)
        buffers = [value for op in self._ops for value in op.writes if value not in self._updates.accumulated]
        fields = list(self._fields(uses))
        names, parameters, gradients, shared = ([each[column] for each in fields] for column in range(4))
        read = dict.fromkeys((*written, *reads(gradients), *self._updates.accumulated, *buffers))
        settings = [(op.target, op.signature) for op in updates]
        op = self._op("optimizer.step", f"loop.{self._loop.kind}", Phase.UPDATE, tuple(read), settings)
        self._add(
            replace(op, layer="optimizer", writes=tuple(written), random=True),
            Call(self._updates.finish, (names, parameters, gradients, shared)),
        )

    def _fields(self, uses: list[GradientUse]) -> Iterator[tuple[Any, ...]]:
        """Yield the fields of each gradient's use, in the order in which the base updates."""
        order = {use.name: position for _, uses in self._update_ops() for position, use in enumerate(uses)}
        for use in sorted(uses, key=lambda use: order[use.name]):
            yield use.name, use.parameter, use.gradient, use.shared

    def _op(self, name: str, target: str, phase: Phase, inputs: tuple[int, ...], described: Any) -> Op:
        signature = hash_signature((target, argument_text(described, self._metas)))
        inputs = tuple(dict.fromkeys(inputs))
        return Op(len(self._ops), name, target, inputs, (), phase, "", signature, repeatable=False)

    def _add(self, op: Op, call: Call) -> None:
        self._ops.append(replace(op, id=len(self._ops)))
        self._calls.append(call)

    def _add_value(self, name: str, nbytes: int, role: Role, meta: Meta | None) -> int:
        self._values.append(Value(len(self._values), name, nbytes, role))
        self._metas.append(meta)
        return len(self._values) - 1


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a block for a tensor's elements."""
    return allocated_bytes(tensor.numel() * tensor.element_size(), tensor.device.type)
