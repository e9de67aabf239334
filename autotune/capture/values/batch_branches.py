"""Decide branches on the batch's numbers from the batch that is traced, and check them before each step.

Dynamo refuses `if mask.all():`. Where the condition depends on tensors of the batch alone, or on constants, its value is
computed from the real batch. The ops behind it become a condition of the captured step: a batch for which it differs needs
another capture.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autotune.capture.values.constant_values import DRAWS, WITH_STATISTICS, schema_of, writes, written_arguments
from autotune.workloads.factory import innermost_user_line

_TRACING_CHECKS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Modules whose `is_tracing` lets them build a mask of ones, with which attention runs another kernel than in eager."""


_BEFORE_MATCH = ("PUSH_EXC_INFO", "LOAD_", "BUILD_", "COPY", "SWAP", "NOP")
"""Beginnings of the instructions that precede, in an exception handler, the one that only `except` has."""
RAISE_LENGTH = 100
"""Maximum number of instructions that build and raise an error."""


@dataclass(frozen=True, slots=True)
class BatchBranch:
    """A branch that was taken because of the batch's numbers."""

    compute: Callable[..., torch.Tensor]
    """Function from the batch's tensors to the condition."""
    value: bool
    """Value of the condition in the capture."""
    inputs: tuple[int, ...]
    """Positions of the tensors that the condition reads."""
    line: str
    """File, number and text of the user's line; empty if unknown."""

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether the step takes the same branch for these tensors of a batch."""
        with torch.no_grad():
            return bool(self.compute(*(tensors[i] for i in self.inputs))) == self.value


@contextmanager
def decide_batch_branches(tensors: list[torch.Tensor]) -> Iterator[list[BatchBranch]]:
    """Let Dynamo take branches on the batch's numbers as eager does for `tensors`; collect them.

    Fake tensors have no numbers: with them Dynamo refuses such branches, and libraries avoid them.
    """
    branches: list[BatchBranch] = []
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        yield branches
        return
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.tensor import TensorVariable

    with ExitStack() as stack:
        read_item = _read_item(TensorVariable.method_item, tensors, branches)
        stack.enter_context(mock.patch.object(TensorVariable, "method_item", read_item))
        for kind in _with_subclasses(InstructionTranslatorBase):
            table = [_decide(step, tensors, branches) for step in kind.dispatch_table]
            stack.enter_context(mock.patch.object(kind, "dispatch_table", table))
        for name in _TRACING_CHECKS:
            if hasattr(library := sys.modules.get(name), "is_tracing"):
                stack.enter_context(mock.patch.object(library, "is_tracing", is_not_tracing))
        for library in _models_with_checks():
            stack.enter_context(mock.patch.object(library, "is_torchdynamo_compiling", _is_not_compiling))
        yield branches


def _is_not_compiling() -> bool:
    """Stand in for such a function; guards compare the arguments' defaults, so it has none."""
    return False


def _models_with_checks() -> list[Any]:
    """Return the modules of models that do without a mask, or add in another order, while Dynamo traces."""
    models = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.")]
    return [module for module in models if "is_torchdynamo_compiling" in vars(module)]


def tracing_checks() -> set[Any]:
    """Return the functions by which libraries avoid branches on the batch while a tracer runs."""
    libraries: list[Any] = [sys.modules.get(name) for name in _TRACING_CHECKS]
    return {library.is_tracing for library in libraries if hasattr(library, "is_tracing")}


def is_not_tracing(tensor: Any = None) -> bool:
    """Stand in for such a function."""
    del tensor
    return False


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(below for child in kind.__subclasses__() for below in _with_subclasses(child))]


def _decide(step: Any, tensors: list[torch.Tensor], branches: list[BatchBranch]) -> Any:
    """Return Dynamo's function for an instruction, for jumps one that decides by the batch what Dynamo refuses."""
    from torch._dynamo.exc import Unsupported

    if getattr(step, "__qualname__", "") != "generic_jump.<locals>.inner":
        return step

    def jump(translator: Any, instruction: Any) -> Any:
        condition = translator.stack[-1]
        try:
            return step(translator, instruction)
        except Unsupported:
            value = _avoid_error(condition, translator, instruction)
            if value is None:
                branch = _branch(condition, translator, tensors)
                if branch is None:
                    raise
                if branch.inputs:  # a condition on constants stays as it is
                    branches.append(branch)
                value = branch.value
        if ("IF_TRUE" in instruction.opname) is value:
            if "OR_POP" in instruction.opname:
                translator.push(condition)
            translator.jump(instruction)
        return None

    return jump


def _branch(condition: Any, translator: Any, tensors: list[torch.Tensor]) -> BatchBranch | None:
    """Return the branch on a traced tensor; None where it depends on more than the batch."""
    from torch._dynamo.variables.tensor import TensorVariable

    if not isinstance(condition, TensorVariable):
        return None
    graph = fx.Graph()
    inputs: list[int] = []
    if not _copy_condition(condition.as_proxy().node, graph, inputs):
        return None
    compute = fx.GraphModule(torch.nn.Module(), graph)
    with torch.no_grad():
        value = bool(compute(*(tensors[i] for i in inputs)))
    return BatchBranch(compute, value, tuple(inputs), innermost_user_line(_frames(translator)))


def _avoid_error(condition: Any, translator: Any, instruction: Any) -> bool | None:
    """Trace `if condition: raise` as an assertion; return the value that does not raise.

    None for another branch, and for an error that the same function catches.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    is_jump = isinstance(condition, TensorVariable) and "OR_POP" not in instruction.opname
    if not is_jump or _is_caught(translator, instruction):
        return None
    raises_on_jump = _only_raises(translator.instructions, translator.indexof[instruction.target])
    if raises_on_jump == _only_raises(translator.instructions, translator.instruction_pointer):
        return None
    value = ("IF_TRUE" in instruction.opname) is not raises_on_jump
    call = translator.output.create_proxy
    valid = condition.as_proxy() if value else call("call_function", torch.logical_not, (condition.as_proxy(),), {})
    line = innermost_user_line(_frames(translator))
    message = f"the step raised an error{f' at {line}' if line else ''}, as its code checks a tensor"
    call("call_function", torch._assert_async, (valid, message), {})
    return value


def _is_caught(translator: Any, instruction: Any) -> bool:
    """Return whether an `except` of the same function may catch an error; `with` and `finally` raise it again."""
    while (entry := instruction.exn_tab_entry) is not None:
        instruction = entry.target
        handler = translator.instructions[translator.indexof[instruction] :]
        first = next((each.opname for each in handler if not each.opname.startswith(_BEFORE_MATCH)), "")
        if first in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_TOP"):
            return True
    return False


def _only_raises(instructions: list[Any], start: int) -> bool:
    """Return whether the code from a position raises an error and does nothing else."""
    for instruction in instructions[start : start + RAISE_LENGTH]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(
            ("STORE", "RETURN", "DELETE", "POP_EXCEPT", "RERAISE")
        ):
            return False
    return False


def _read_item(
    read: Callable[..., Any], tensors: list[torch.Tensor], branches: list[BatchBranch]
) -> Callable[..., Any]:
    """Return Dynamo's function for `.item()` and `bool()`, which decides truth values by the batch."""
    from torch._dynamo.variables.constant import ConstantVariable

    def read_item(variable: Any, translator: Any, *arguments: Any, **named: Any) -> Any:
        branch = _branch(variable, translator, tensors) if variable.dtype is torch.bool else None
        if branch is None:
            return read(variable, translator, *arguments, **named)
        if branch.inputs:
            branches.append(branch)
        return ConstantVariable.create(branch.value)

    return read_item


def _frames(translator: Any) -> list[Any]:
    """Return the frames of the traced code, outermost first."""
    frames: list[Any] = []
    while translator is not None:
        frames.insert(0, translator.frame_summary())
        translator = translator.parent
    return frames


def _copy_condition(condition: fx.Node, graph: fx.Graph, inputs: list[int]) -> bool:
    """Copy the ops behind a condition; return False where one of them reads anything but the batch, or draws, or writes."""
    behind = {condition}
    for node in reversed(condition.graph.nodes):
        if node in behind:
            behind.update(node.all_input_nodes)
    memories = {memory for node in behind if (memory := memory_of(node)) is not None}
    copies: dict[fx.Node, fx.Node] = {}
    for node in condition.graph.nodes:
        if node not in behind:
            if any(each in behind or memory_of(each) in memories for each in written_nodes(node)):
                return False
        elif node.op == "placeholder":
            if (position := _batch_position(node)) is None:
                return False
            inputs.append(position)
            copies[node] = graph.placeholder(node.name)
        elif node.op in ("call_function", "call_method") and not written_nodes(node) and not _draws(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            return False
    graph.output(copies[condition])
    return True


def _batch_position(node: fx.Node) -> int | None:
    """Return the position of the batch's tensor that an input stands for; None for any other input."""
    argument = node.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", "")
    number = name.removeprefix("L['tensors'][").removesuffix("]")
    return int(number) if number != name and number.isdigit() else None


def _target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a call of Dynamo's graph may change in place."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = _target_name(node)
    if (schema := schema_of(node.target)) is not None and schema.is_mutable:
        parts: Any = written_arguments(schema, node.args, node.kwargs)
    elif name in WITH_STATISTICS:  # behind the input
        parts = node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")
    elif writes(name, node.kwargs, node.target, node.args):
        parts = node.args[:1], node.kwargs.get("out"), node.kwargs.get("input")
    else:
        return []
    return [part for part in pytree.tree_leaves(parts) if isinstance(part, fx.Node)]


def memory_of(node: fx.Node) -> int | None:
    """Return the identity of a tensor's storage, which its views share; None for what is no tensor."""
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else None


def _draws(node: fx.Node) -> bool:
    """Return whether an op may draw random numbers."""
    return DRAWS.search(_target_name(node)) is not None
