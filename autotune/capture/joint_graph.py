"""Read the joint trace of forward and backward: values that own their memory, ops, and the calls behind them."""

import hashlib
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.capture import regions
from autotune.capture.fx_nodes import (
    _attribute,
    _layer,
    _own_name,
    _shown_target,
    _storage,
    is_backward,
    is_tensor,
    storage_of,
)
from autotune.capture.inplace_kernels import overwritable
from autotune.capture.optimizers.whole_update import WholeUpdates, updates_of
from autotune.capture.program import Call, Meta, Program, Read, View, reads
from autotune.capture.python.guards import Guards
from autotune.capture.python.python_trace import FreeInput
from autotune.capture.rewrites import batch_norm, dropout, lstm, recurrent
from autotune.errors import CaptureError
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from autotune.workloads.workload import Workload

REDUCED_IN_PLACE = (
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
)
"""Losses whose kernels shrink a tensor of every element's loss to the one number: its memory stays as large."""


EMBEDDING_BAGS = (torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default)
"""Kernels whose second output is one element shorter than its memory."""


class JointTrace:
    """The trace of forward and backward, on its way to values, ops and calls."""

    def __init__(
        self, trace: fx.Graph, owner: fx.GraphModule, workload: Workload, batch: int, free: tuple[FreeInput, ...]
    ) -> None:
        """`batch` counts the batch's tensors; the inputs behind them are the free ones."""
        self._trace = trace
        self._owner = owner
        self._name_of = {id(tensor): name for name, tensor in workload.model.named_parameters()}
        self._updates = updates_of(workload.optimizer) if workload.loss_fn is not None and workload.optimizer else None
        self._argument: dict[fx.Node, Any] = {}  # what a node is to those that read it
        self._values: list[Value] = []
        self._metas: list[Meta | None] = []
        self._ops: list[Op] = []
        self._calls: list[Call] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._batch: list[int] = []
        self._batch_size = batch
        self._free_inputs = free
        self._free: dict[int, Callable[[], torch.Tensor]] = {}
        self._tangent: int | None = None
        self._results: list[Any] = []
        self._layer = "loss"
        self._inputs: dict[str, int] = {}  # parameters and buffers by name
        self.reading = ""
        """Op that is being read, and the module that it is of: for an error's message."""
        self._regions: dict[str, list[int]] = {}  # ops by the region that they belong to
        self._late: list[tuple[str, int, Any, bool]] = []  # of one step for all parameters, each one's part

    def program(self, name: str, spec: pytree.TreeSpec, device: torch.device, guards: Guards) -> Program:
        """What was read."""
        grouped = regions.group(
            self._ops, self._calls, self._values, self._metas, self._regions, kept=reads(self._results), describe=_shown
        )
        ids = grouped.renumbered
        results = regions.renumber(tuple(self._results), ids)
        made = {value for op in grouped.ops for value in op.outputs}
        graph = TrainGraph(
            name=name,
            ops=grouped.ops,
            values=grouped.values,
            inputs=tuple(value.id for value in grouped.values if value.id not in made),
            outputs=tuple(dict.fromkeys(v for v in reads(results) if v in made)),
        )
        return Program(
            graph,
            grouped.calls,
            grouped.metas,
            {ids[value]: tensor for value, tensor in self._tensors.items()},
            tuple(ids[value] for value in self._batch),
            tuple((ids[value], read) for value, read in self._free.items()),
            None if self._tangent is None else ids[self._tangent],
            results,
            spec,
            self._updates,
            device,
            guards,
        )

    def read(self) -> None:
        """Walk the trace: inputs, then ops that something needs, then what the outputs ask for."""
        output = self._trace.output_node()
        returned: Any = output.args[0]
        wanted = list(zip(returned, output.meta["desc"], strict=True))
        self._drop_dead(output, wanted)
        for node in self._trace.nodes:
            self.reading = f"{_layer(node) or 'the step'}'s {node.name} ({node.target})"
            match node.op:
                case "placeholder":
                    self._read_input(node)
                case "get_attr":
                    self._read_constant(node)
                case "call_function":
                    self._read_call(node)
        self.reading = ""
        gradients = []
        for node, desc in wanted:
            match type(desc).__name__:
                case "PlainAOTOutput":
                    self._results.append(self._of(node))
                case "InputMutationAOTOutput":
                    self._commit(self._mutated(desc.mutated_input), node)
                case "GradAOTOutput" if node is not None:
                    gradients.append((node, self._parameter_name(desc.grad_of.target)))
        position = {node: index for index, node in enumerate(self._trace.nodes)}
        readers = Counter(value for op in self._ops for value in op.inputs)
        readers.update(value for node, _ in gradients for value in reads(self._of(node)))
        readers.update(reads(self._results))
        for node, target in sorted(gradients, key=lambda pair: position[pair[0]]):
            shared = any(readers[value] > 1 for value in reads(self._of(node)))
            self._update(target, node, shared)
        self._update_whole()

    def _drop_dead(self, output: fx.Node, wanted: list[tuple[Any, Any]]) -> None:
        """Gradients that nobody updates with, and what only they need, are not computed."""
        kept = []
        for node, desc in wanted:
            unused = type(desc).__name__ == "GradAOTOutput" and not self._has_update(desc.grad_of)
            kept.append(None if unused else node)
        wanted[:] = [(node, desc) for node, (_, desc) in zip(kept, wanted, strict=True)]
        output.args = (kept,)
        # a draw whose result nobody reads still moves the generator
        self._trace.eliminate_dead_code(lambda node: node.is_impure() or _draws(node.target, node.args, node.kwargs))

    def _has_update(self, desc: Any) -> bool:
        if type(desc).__name__ != "ParamAOTInput" or self._updates is None:
            return False
        return self._updates.owns(_attribute(self._owner, desc.target))

    def _parameter_name(self, target: str) -> str:
        """The model's first name for a parameter; the tracer may know a tied one by another."""
        return self._name_of.get(id(_attribute(self._owner, target)), _own_name(target))

    def _read_input(self, node: fx.Node) -> None:
        desc = node.meta["desc"]
        match type(desc).__name__:
            case "ParamAOTInput":
                name = self._parameter_name(desc.target)
                self._inputs[name] = self._add_input(node, name, Role.PARAM, _attribute(self._owner, desc.target))
            case "BufferAOTInput":
                name = _own_name(desc.target)
                self._inputs[name] = self._add_input(node, name, Role.BUFFER, _attribute(self._owner, desc.target))
            case "PlainAOTInput" if (free := self._free_input(desc)) is not None:
                self._read_free_input(node, free)
            case "PlainAOTInput":
                self._batch.append(self._add_input(node, f"batch.{desc.idx}", Role.BATCH))
            case "TangentAOTInput":
                if type(desc.output).__name__ == "InputMutationAOTOutput":
                    raise CaptureError(
                        f"the model changes {self._changed(desc.output.mutated_input)} in place while it is trained; do "
                        "that between steps, or under no_grad on a copy"
                    )
                if self._tangent is not None:
                    raise CaptureError(
                        "the loss function returns several tensors to differentiate; return (loss, extras)"
                    )
                if node.meta["val"].numel() != 1:
                    raise CaptureError(
                        f"the loss has {node.meta['val'].numel()} elements; a step needs one number, as of loss.mean()"
                    )
                self._tangent = self._add_input(node, "tangent", Role.BATCH)
            case kind:
                raise CaptureError(
                    f"the step needs an input of kind {kind}, which a plan cannot hold; pass it in the batch"
                )

    def _read_free_input(self, node: fx.Node, free: FreeInput) -> None:
        self._refuse_trained(free.example)
        value = self._add_input(node, free.name, Role.BUFFER)
        self._free[value] = free.read
        self._inputs[free.name] = value

    def _read_constant(self, node: fx.Node) -> None:
        tensor = _attribute(self._trace.owning_module, str(node.target))
        self._refuse_trained(tensor)
        self._add_input(node, node.name, Role.BUFFER, tensor)

    def _refuse_trained(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and self._updates is not None and self._updates.owns(tensor):
            raise CaptureError(
                f"the optimizer trains a tensor of {tuple(tensor.shape)} that the loss function brings along; make it a "
                "parameter of the model, else it would get no gradient"
            )

    def _add_input(self, node: fx.Node, name: str, role: Role, tensor: torch.Tensor | None = None) -> int:
        # the tracer has a tied weight twice: as two values one could be read, and computed with again, after the
        # update of the other
        value = next((known for known, other in self._tensors.items() if other is tensor), None)
        if value is None:
            value = self._add_value(name, role, node.meta.get("val", tensor))
        self._argument[node] = Read(value)
        if tensor is not None:
            self._tensors[value] = tensor
        return value

    def _add_value(self, name: str, role: Role, tensor: Any) -> int:
        meta = Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
        self._values.append(Value(len(self._values), name, tensor.untyped_storage().nbytes(), role))
        self._metas.append(meta)
        return len(self._values) - 1

    def _of(self, argument: Any) -> Any:
        """An argument of the trace as an argument of a call."""
        return fx.node.map_arg(argument, lambda node: self._argument[node])

    def _read_call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            whole: Any = node.args[0]
            part: Any = node.args[1]
            source = self._argument[whole]
            self._argument[node] = source[part] if isinstance(source, list) else _part(source, part)
            return
        args, kwargs = self._of(node.args), tuple((key, self._of(part)) for key, part in node.kwargs.items())
        made, parts = node.meta.get("val"), None  # an assertion makes nothing
        if isinstance(made, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            self._argument[node] = View(target, args, kwargs)  # computed by every reader, as a view is
            return
        if not isinstance(made, torch.Tensor):
            parts = list(made) if isinstance(made, (tuple, list)) else []
        if any(isinstance(part, torch.Tensor) and part.layout is not torch.strided for part in (parts or [made])):
            raise CaptureError(f"{node.target} makes a sparse tensor, as of Embedding(sparse=True); make it dense")
        read_storages = {storage_of(source) for source in node.all_input_nodes if is_tensor(source)}
        tensors = [part for part in (parts if parts is not None else [made]) if isinstance(part, torch.Tensor)]
        if tensors and all(_storage(part) in read_storages for part in tensors):
            identity = node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
            self._argument[node] = args[0] if identity else View(target, args, kwargs)
            return
        if any(_storage(part) in read_storages for part in tensors):
            raise CaptureError(f"{node.target} returns a view and a fresh tensor at once; leave it out of the model")
        self._add_op(node, args, kwargs, made if parts is None else parts)

    def _add_op(self, node: fx.Node, args: Any, kwargs: tuple[tuple[str, Any], ...], made: Any) -> None:
        target: Any = node.target
        self._layer = _layer(node) or self._layer
        name = f"{self._layer}.{node.name}"
        region = node.meta.get(recurrent.REGION)
        in_place = None if region is None else recurrent.overwritten(node)
        if region is not None:
            self._regions.setdefault(region, []).append(len(self._ops))
        if target is lstm.LAYER:
            target, made = lstm.run_layer, [*made[:3], lstm.workspace(node)]
        outputs: Any
        if in_place is not None:
            target, outputs = in_place, None
            self._argument[node] = args[0]
        elif made == []:
            outputs = None
        elif isinstance(made, list):
            outputs = tuple(
                self._add_value(f"{name}.{index}", Role.ACTIVATION, part) if isinstance(part, torch.Tensor) else None
                for index, part in enumerate(made)
            )
            self._argument[node] = [None if value is None else Read(value) for value in outputs]
            if target in EMBEDDING_BAGS and outputs[1] is not None:  # its kernel counts in a buffer of one more
                bags = self._values[outputs[1]]
                self._values[outputs[1]] = replace(bags, nbytes=bags.nbytes + made[1].dtype.itemsize)
        else:
            outputs = self._add_value(name, Role.ACTIVATION, made)
            self._argument[node] = Read(outputs)
            if target in REDUCED_IN_PLACE and not made.ndim:
                whole = max(source.meta["val"].numel() for source in node.all_input_nodes) * made.dtype.itemsize
                self._values[outputs] = replace(self._values[outputs], nbytes=whole)
        random = _draws(node.target, node.args, node.kwargs)
        given = node.meta.get(batch_norm.GIVEN)
        self._append(
            Call(target, args, kwargs, outputs),
            name=name,
            target=_shown_target(node.target),
            phase=Phase.BACKWARD if is_backward(node) else Phase.FORWARD,
            repeatable=not random and not node.is_impure(impure_random=False),
            random=random,
            inplace=self._taken(overwritable(node, args), outputs) if isinstance(outputs, int) else (),
            given=None if given is None else self._argument[given][0].value,
        )

    def _taken(self, values: tuple[int, ...], output: int) -> tuple[int, ...]:
        """Of the values those that are the step's own, not the user's, and of the output's bytes."""
        nbytes = self._values[output].nbytes  # what a loss is summed up in place in is larger than its one number
        made = [value for value in values if self._values[value].role is Role.ACTIVATION]
        return tuple(value for value in made if self._values[value].nbytes == nbytes)

    def _append(self, call: Call, *, name: str, target: str, phase: Phase, writes: tuple[int, ...] = (), extra: tuple[int, ...] = (),
                repeatable: bool = True, random: bool = False, detail: str = "", covered: Any = None,
                inplace: tuple[int, ...] = (), given: int | None = None) -> None:  # fmt: skip
        """`covered`: what the signature tells apart, if that is not all arguments."""
        made = call.outputs if isinstance(call.outputs, tuple) else (call.outputs,)
        inputs = tuple(dict.fromkeys((*reads(call.args), *reads([part for _, part in call.kwargs]), *extra)))
        arguments = call.args if covered is None else covered
        shown = repr((target, detail, _shown(arguments, self._metas), _shown(call.kwargs, self._metas)))
        self._ops.append(
            Op(
                id=len(self._ops),
                name=name,
                target=target,
                inputs=inputs,
                outputs=tuple(value for value in made if value is not None),
                phase=phase,
                layer=self._layer,
                signature=hashlib.sha256(shown.encode()).hexdigest()[:24],
                repeatable=repeatable,
                random=random,
                writes=writes,
                inplace=inplace,
                given=given,
            )
        )
        self._calls.append(call)

    def _changed(self, desc: Any) -> str:
        if hasattr(desc, "target"):
            return self._parameter_name(desc.target)
        free = self._free_input(desc)
        return f"batch.{desc.idx}" if free is None else free.name

    def _free_input(self, desc: Any) -> FreeInput | None:
        number: int = desc.idx
        return None if number < self._batch_size else self._free_inputs[number - self._batch_size]

    def _mutated(self, desc: Any) -> str:
        if type(desc).__name__ == "PlainAOTInput":
            if (free := self._free_input(desc)) is not None:
                return free.name
            raise CaptureError(
                f"the model changes batch.{desc.idx} in place; give its first layer a copy: x = x.clone()"
            )
        return _own_name(desc.target)

    def _commit(self, target: str, node: fx.Node) -> None:
        """Write a buffer's new content at the end of the step: until then forward ops can be run again."""
        buffer = self._inputs[target]
        self._layer = target.rpartition(".")[0]
        call = Call(torch.ops.aten.copy_.default, (Read(buffer), self._of(node)))
        self._append(
            call, name=f"{target}.commit", target="commit", phase=Phase.UPDATE, writes=(buffer,), repeatable=False
        )

    def _update(self, target: str, node: fx.Node, shared: bool) -> None:
        assert self._updates is not None
        parameter = self._inputs[target]
        gradient = self._of(node)
        for value in reads(gradient):
            if self._values[value].role is Role.ACTIVATION:
                old = self._values[value]
                self._values[value] = Value(old.id, f"{target}.grad", old.nbytes, Role.GRAD)
        if isinstance(self._updates, WholeUpdates):
            self._late.append((target, parameter, gradient, shared))
            return
        state_bytes = sum(self._updates.state_sizes(self._tensors[parameter]))
        state = len(self._values)
        self._values.append(Value(state, f"{target}.state", state_bytes, Role.STATE))
        self._metas.append(None)
        self._layer = target.rpartition(".")[0]
        optimizer = self._updates.optimizer
        self._append(
            Call(self._updates.update, (target, Read(parameter), gradient, shared)),
            name=f"{target}.update",
            target=f"update.{type(optimizer).__name__}",
            detail=repr(sorted((k, str(v)) for k, v in optimizer.defaults.items() if k != "lr")),
            phase=Phase.UPDATE,
            extra=(state,),
            writes=(parameter, state),
            repeatable=False,
            covered=(Read(parameter), gradient, shared and self._updates.writes_gradients),
        )

    def _update_whole(self) -> None:
        """Add one op for all parameters, after every gradient, where the optimizer looks across them."""
        if not self._late or not isinstance(self._updates, WholeUpdates):
            return
        names, parameters, gradients, shared = (list(column) for column in zip(*self._late, strict=True))
        self._updates.expect([self._tensors[parameter] for parameter in parameters])
        state = len(self._values)
        state_bytes = sum(self._updates.state_sizes(self._tensors[parameters[0]]))
        self._values.append(Value(state, "optimizer.state", state_bytes, Role.STATE))
        self._metas.append(None)
        self._layer = "optimizer"
        held = [Read(parameter) for parameter in parameters]
        self._append(
            Call(self._updates.update_all, (names, held, gradients, shared)),
            name="optimizer.step",
            target=f"step.{self._updates.label}",
            detail=self._updates.settings,
            phase=Phase.UPDATE,
            extra=(state,),
            writes=(*parameters, state),
            repeatable=False,
            random=self._updates.draws,
            covered=(held, gradients, [one and self._updates.writes_gradients for one in shared]),
        )


def _part(source: Any, number: int) -> View:
    """View one part of a tensor; a reader of one part of `unbind` would make all of them."""
    match source:
        case View(torch.ops.aten.unbind.int, (tensor, *dim), ()):
            return View(torch.ops.aten.select.int, (tensor, dim[0] if dim else 0, number))
    return View(operator.getitem, (source, number))


def _draws(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op draws from the generator: it is tagged so, and its probability is not zero."""
    if target in (dropout.draw_mask, dropout.draw_over):
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    named = dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | dict(kwargs)
    chance = next((named[key] for key in ("p", "dropout_p") if key in named), None)
    if chance is None and any(argument.name == "dropout_p" for argument in target._schema.arguments):
        return False  # left at its default of zero
    return chance is None or chance > 0


def _shown(argument: Any, metas: list[Meta | None]) -> str:
    """An argument as text that is the same for tensors of one shape, dtype and layout."""
    match argument:
        case Read(value):
            meta = metas[value]
            return f"<{meta.dtype}{meta.shape}{meta.stride}{meta.device.type}>" if meta else "<state>"
        case View(target, args, kwargs):
            return f"{target}{_shown(args, metas)}{_shown(kwargs, metas)}"
        case tuple() | list():
            return "(" + ",".join(_shown(part, metas) for part in argument) + ")"
        case torch.nn.Parameter():
            return "<parameter>"
        case _:
            return repr(argument)
