"""Read the joint trace of forward and backward: values that own their memory, ops, and the calls behind them."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.capture.capture_checks import (
    refuse_constant,
    refuse_loss,
    refuse_lost_gradient,
    refuse_part_views,
    refuse_shared_memory,
    refuse_sparse,
    refuse_two_gradients,
)
from autotune.capture.fx_nodes import (
    get_attribute,
    is_backward,
    is_tensor,
    layer_path,
    storage_of,
    target_name,
    tensor_storage,
    user_path,
)
from autotune.capture.graph_builder import GraphBuilder
from autotune.capture.inplace_kernels import find_overwritable
from autotune.capture.optimizers.update_ops import UpdateOps
from autotune.capture.optimizers.whole_update import make_updates
from autotune.capture.program import Call, Program, Read, View, reads, view_part
from autotune.capture.python.python_trace import FreeInput
from autotune.capture.python.step_trace import StepGuards
from autotune.capture.regions import renumber
from autotune.capture.rewrites import batch_norm, dropout, lstm, recurrent
from autotune.errors import CaptureError
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.workloads.workload import Workload

REDUCED_IN_PLACE = (
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
)
"""Losses whose kernels reduce a tensor of one loss per element to one number in the same memory, which stays as large."""
EMBEDDING_BAGS = (torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default)
"""Kernels whose second output is one element shorter than its memory."""


class JointTrace:
    """Reader of a joint trace: call `read`, then `program`."""

    def __init__(
        self,
        trace: fx.Graph,
        owner: torch.nn.Module,
        workload: Workload,
        batch_size: int,
        free: tuple[FreeInput, ...],
        *,
        returns_gradients: bool,
        open_layers: bool = False,
    ) -> None:
        """`batch_size` is the number of the batch's tensors; the inputs behind them are the free ones.

        `open_layers` reads the ops of recurrent layers one by one; by default those of a layer are one op.
        """
        self._trace = trace
        self._owner = owner
        self._name_of = {id(tensor): name for name, tensor in workload.model.named_parameters()}
        self._updates = (
            make_updates(workload.optimizer) if workload.loss_fn is not None and workload.optimizer else None
        )
        self._returns_gradients = returns_gradients
        self._open_layers = open_layers
        self._gradients: list[int] = []  # parameters of the last results
        self._builder = GraphBuilder()
        self._arguments: dict[fx.Node, Any] = {}  # the argument that stands for each node in calls
        self._tensors: dict[int, torch.Tensor] = {}
        self._batch: list[int] = []
        self._batch_size = batch_size
        self._free_inputs = free
        self._free: dict[int, Callable[[], torch.Tensor]] = {}
        self._free_values: dict[int, int] = {}  # of free inputs, by position among the inputs of the step
        self._tangent: int | None = None
        self._results: list[Any] = []
        self._value_of: dict[int, int] = {}  # of parameters, buffers and constants, by id of the tensor
        self._outside: dict[int, torch.Tensor] = {}  # tensor of each value that is no batch, at capture
        self.current_op = ""
        """Op that is being read, with its module, for error messages; empty between ops."""

    def program(
        self, name: str, spec: pytree.TreeSpec, device: torch.device, guards: StepGuards, *, recorded: bool
    ) -> Program:
        """Return the captured step. `spec` is the structure of its result."""
        grouped = self._builder.group(tuple(reads(self._results)))
        ids = grouped.new_ids
        results = renumber(tuple(self._results), ids)
        produced = {value for op in grouped.ops for value in op.outputs}
        graph = TrainGraph(
            name=name,
            ops=grouped.ops,
            values=grouped.values,
            inputs=tuple(value.id for value in grouped.values if value.id not in produced),
            outputs=tuple(dict.fromkeys(v for v in reads(results) if v in produced)),
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
            tuple(ids[value] for value in self._gradients),
            self._updates,
            device,
            guards,
            recorded,
        )

    def read(self) -> None:
        """Walk the trace: inputs, then the ops that an output needs, then commits of buffers and updates of parameters."""
        output = self._trace.output_node()
        returned: Any = output.args[0]
        outputs = list(zip(returned, output.meta["desc"], strict=True))
        self._drop_unused_gradients(output, outputs)
        for node in self._trace.nodes:
            self.current_op = f"{layer_path(node) or 'the step'}'s {node.name} ({node.target})"
            match node.op:
                case "placeholder":
                    self._read_input(node)
                case "get_attr":
                    self._read_constant(node)
                case "call_function":
                    self._read_call(node)
        self.current_op = ""
        self._read_outputs(outputs)

    def refuse_shared(self, batch: Sequence[torch.Tensor]) -> None:
        """Raise CaptureError for two tensors in the same memory, of the batch or from outside, if the step writes one."""
        tensors = self._outside | dict(zip(self._batch, batch, strict=True))
        written = {value for op in self._builder.ops for value in op.writes}
        used = written.union(*(op.inputs for op in self._builder.ops))
        values = self._builder.values
        refuse_shared_memory((values[v].name, tensor, v in written) for v, tensor in tensors.items() if v in used)

    def _drop_unused_gradients(self, output: fx.Node, outputs: list[tuple[Any, Any]]) -> None:
        """Remove gradients that neither an update nor the loop reads, and the ops that only they need."""
        used = []
        for node, desc in outputs:
            unused = type(desc).__name__ == "GradAOTOutput" and not self._is_trained(desc.grad_of)
            if unused and node is not None and self._returns_gradients:
                self._refuse_lost_gradient(desc.grad_of)
            used.append(None if unused else node)
        outputs[:] = [(node, desc) for node, (_, desc) in zip(used, outputs, strict=True)]
        output.args = (used,)
        # a draw whose result nobody reads still moves the generator
        self._trace.eliminate_dead_code(
            lambda node: node.is_impure() or dropout.draws(node.target, node.args, node.kwargs)
        )

    def _refuse_lost_gradient(self, desc: Any) -> None:
        if type(desc).__name__ == "PlainAOTInput" and (free := self._free_input(desc)) is not None:
            refuse_lost_gradient(free.name, free.example)

    def _is_trained(self, desc: Any) -> bool:
        if type(desc).__name__ != "ParamAOTInput":
            return False
        if self._updates is None:
            return self._returns_gradients  # a frozen parameter has no gradient in the trace
        return self._updates.owns(get_attribute(self._owner, desc.target))

    def _read_outputs(self, outputs: list[tuple[Any, Any]]) -> None:
        gradients = []
        for node, desc in outputs:
            match type(desc).__name__:
                case "PlainAOTOutput":
                    self._results.append(self._argument(node))
                case "InputMutationAOTOutput":
                    self._commit(desc.mutated_input, node)
                case "GradAOTOutput" if node is not None:
                    target = desc.grad_of.target
                    value = self._value_of[id(get_attribute(self._owner, target))]
                    gradients.append((node, self._parameter_name(target), value))
        refuse_two_gradients([name for _, name, _ in gradients])
        if self._returns_gradients:
            self._return_gradients(gradients)
            return
        position = {node: index for index, node in enumerate(self._trace.nodes)}
        readers = Counter(value for op in self._builder.ops for value in op.inputs)
        readers.update(value for node, *_ in gradients for value in reads(self._argument(node)))
        readers.update(reads(self._results))
        if self._updates is None:
            return
        updates = UpdateOps(self._builder, self._updates, self._tensors)
        for node, name, parameter in sorted(gradients, key=lambda gradient: position[gradient[0]]):
            gradient = self._argument(node)
            values = list(reads(gradient))
            for value in values:
                self._builder.mark_gradient(value, name)
            updates.add(name, parameter, gradient, any(readers[value] > 1 for value in values))
        updates.finish()

    def _return_gradients(self, gradients: list[tuple[fx.Node, str, int]]) -> None:
        """Add the gradients to the results, in the order of the model's parameters."""
        order = {name: position for position, name in enumerate(self._name_of.values())}
        for node, name, parameter in sorted(gradients, key=lambda gradient: order.get(gradient[1], len(order))):
            gradient = self._argument(node)
            for value in reads(gradient):
                self._builder.mark_gradient(value, name)
            self._results.append(gradient)
            self._gradients.append(parameter)

    def _parameter_name(self, target: str) -> str:
        """Return the model's first name for a parameter; the tracer may use another one for a tied parameter."""
        return self._name_of.get(id(get_attribute(self._owner, target)), user_path(target))

    def _read_input(self, node: fx.Node) -> None:
        desc = node.meta["desc"]
        match type(desc).__name__:
            case "ParamAOTInput":
                self._add_input(
                    node, self._parameter_name(desc.target), Role.PARAM, get_attribute(self._owner, desc.target)
                )
            case "BufferAOTInput":
                self._add_input(node, user_path(desc.target), Role.BUFFER, get_attribute(self._owner, desc.target))
            case "PlainAOTInput" if (free := self._free_input(desc)) is not None:
                self._read_free_input(node, desc.idx, free)
            case "PlainAOTInput":
                self._batch.append(self._add_input(node, f"batch.{desc.idx}", Role.BATCH))
            case "TangentAOTInput":
                self._read_tangent(node, desc)
            case kind:
                raise CaptureError(
                    f"the step needs an input of kind {kind}, which a captured graph cannot represent; pass its value in the "
                    "batch as a tensor"
                )

    def _read_tangent(self, node: fx.Node, desc: Any) -> None:
        if type(desc.output).__name__ == "InputMutationAOTOutput":
            raise CaptureError(
                f"the model changes {self._mutated_name(desc.output.mutated_input)} in place while it is trained, and "
                "backward would differentiate that change; do it between steps, or on a copy under torch.no_grad()"
            )
        refuse_loss(node.meta["val"], is_second=self._tangent is not None)
        self._tangent = self._add_input(node, "tangent", Role.BATCH)

    def _read_free_input(self, node: fx.Node, number: int, free: FreeInput) -> None:
        self._refuse_trained(free.example)
        value = self._free_values[number] = self._add_input(node, free.name, Role.BUFFER)
        self._free[value], self._outside[value] = free.read, free.example

    def _read_constant(self, node: fx.Node) -> None:
        tensor = get_attribute(self._trace.owning_module, str(node.target))
        refuse_constant(node, tensor)
        self._refuse_trained(tensor)
        self._add_input(node, node.name, Role.BUFFER, tensor)

    def _refuse_trained(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and self._updates is not None and self._updates.owns(tensor):
            raise CaptureError(
                f"the optimizer trains a tensor of shape {tuple(tensor.shape)} that the loss function reads and that is no "
                "parameter of the model, so it would get no gradient; register it as a parameter of the model"
            )

    def _add_input(self, node: fx.Node, name: str, role: Role, tensor: torch.Tensor | None = None) -> int:
        # the tracer has a tied weight twice: of two values one could be read, and a recomputation use it, after the
        # update of the other
        value = None if tensor is None else self._value_of.get(id(tensor))
        if value is None:
            value = self._builder.add_value(name, role, node.meta.get("val", tensor))
            if tensor is not None:
                self._value_of[id(tensor)] = value
                self._tensors[value] = self._outside[value] = tensor
        self._arguments[node] = Read(value)
        return value

    def _argument(self, argument: Any) -> Any:
        """Return an argument of the trace as an argument of a call."""
        return fx.node.map_arg(argument, lambda node: self._arguments[node])

    def _read_call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            whole: Any = node.args[0]
            part: Any = node.args[1]
            source = self._arguments[whole]
            self._arguments[node] = source[part] if isinstance(source, list) else view_part(source, part)
            return
        args, kwargs = (
            self._argument(node.args),
            tuple((key, self._argument(part)) for key, part in node.kwargs.items()),
        )
        result, parts = node.meta.get("val"), None  # an assertion returns nothing
        if isinstance(result, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            self._arguments[node] = View(target, args, kwargs)  # every reader computes it, as it does a view
            return
        if not isinstance(result, torch.Tensor):
            parts = list(result) if isinstance(result, (tuple, list)) else []
        read_storages = {storage_of(source) for source in node.all_input_nodes if is_tensor(source)}
        tensors = [part for part in (parts if parts is not None else [result]) if isinstance(part, torch.Tensor)]
        refuse_sparse(node, tensors)
        if tensors and all(tensor_storage(part) in read_storages for part in tensors):
            identity = node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
            self._arguments[node] = args[0] if identity else View(target, args, kwargs)
            return
        refuse_part_views(node, tensors, read_storages)
        self._add_op(node, args, kwargs, result if parts is None else parts)

    def _add_op(self, node: fx.Node, args: Any, kwargs: tuple[tuple[str, Any], ...], result: Any) -> None:
        """Add an op for a node; `result` is a tensor, or a list of the parts of a returned tuple."""
        target, result = lstm.with_workspace(node, result)
        self._builder.layer = layer_path(node) or self._builder.layer
        name = f"{self._builder.layer}.{node.name}"
        region = None if self._open_layers else node.meta.get(recurrent.REGION)
        in_place = None if region is None else recurrent.inplace_kernel(node)
        if region is not None:
            self._builder.join_region(region)
        if in_place is not None:
            target, outputs = in_place, None
            self._arguments[node] = args[0]
        else:
            outputs = self._add_outputs(node, name, result)
        random = dropout.draws(node.target, node.args, node.kwargs)
        alias = node.meta.get(batch_norm.SAME_BITS)
        self._builder.add_op(
            Call(target, args, kwargs, outputs),
            name=name,
            target=target_name(node.target),
            phase=Phase.BACKWARD if is_backward(node) else Phase.FORWARD,
            repeatable=not random and not node.is_impure(impure_random=False),
            random=random,
            inplace=self._same_size(find_overwritable(node, args), outputs) if isinstance(outputs, int) else (),
            alias_of=None if alias is None else self._arguments[alias][0].value,
        )

    def _add_outputs(self, node: fx.Node, name: str, result: Any) -> tuple[int | None, ...] | int | None:
        """Add the values of a node's result, with the bytes that its kernel allocates; return the outputs of the call."""
        if isinstance(result, list) and not result:
            return None
        if isinstance(result, list):
            outputs = tuple(
                self._builder.add_value(f"{name}.{index}", Role.ACTIVATION, part)
                if isinstance(part, torch.Tensor)
                else None
                for index, part in enumerate(result)
            )
            self._arguments[node] = [None if value is None else Read(value) for value in outputs]
            if node.target in EMBEDDING_BAGS and (bags := outputs[1]) is not None:
                nbytes = self._builder.values[bags].nbytes + result[1].dtype.itemsize
                self._builder.resize(bags, nbytes)  # the kernel counts in a buffer of one more element
            return outputs
        output = self._builder.add_value(name, Role.ACTIVATION, result)
        self._arguments[node] = Read(output)
        if node.target in REDUCED_IN_PLACE and not result.ndim:
            elements = max(source.meta["val"].numel() for source in node.all_input_nodes)
            self._builder.resize(output, elements * result.dtype.itemsize)
        return output

    def _same_size(self, values: tuple[int, ...], output: int) -> tuple[int, ...]:
        """Return those of the values that the step allocates itself and that are as large as the output."""
        values_by_id = self._builder.values
        nbytes = values_by_id[output].nbytes  # larger than the one number of a loss that is reduced in place
        return tuple(v for v in values if values_by_id[v].role is Role.ACTIVATION and values_by_id[v].nbytes == nbytes)

    def _free_input(self, desc: Any) -> FreeInput | None:
        number: int = desc.idx
        return None if number < self._batch_size else self._free_inputs[number - self._batch_size]

    def _mutated_name(self, desc: Any) -> str:
        if hasattr(desc, "target"):
            return self._parameter_name(desc.target)
        free = self._free_input(desc)
        return f"batch.{desc.idx}" if free is None else free.name

    def _mutated_value(self, desc: Any) -> int:
        if hasattr(desc, "target"):
            return self._value_of[id(get_attribute(self._owner, desc.target))]
        if desc.idx in self._free_values:
            return self._free_values[desc.idx]
        raise CaptureError(
            f"the model changes batch.{desc.idx} in place; let its first layer work on a copy: x = x.clone()"
        )

    def _commit(self, mutated: Any, node: fx.Node) -> None:
        """Write the new content of a buffer at the end of the step: until then forward ops can be recomputed."""
        buffer, name = self._mutated_value(mutated), self._mutated_name(mutated)
        self._builder.layer = name.rpartition(".")[0]
        call = Call(torch.ops.aten.copy_.default, (Read(buffer), self._argument(node)))
        self._builder.add_op(
            call, name=f"{name}.commit", target="commit", phase=Phase.UPDATE, writes=(buffer,), repeatable=False
        )
