"""Refuse steps that a captured graph would run differently from eager: hooks, gradients of the batch, checkpoints."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autotune.capture.fx_nodes import tensor_storage, user_path
from autotune.capture.signature import has_hooks
from autotune.capture.values.batch_branches import memory_of, written_nodes
from autotune.capture.values.constant_values import DRAWS
from autotune.errors import CaptureError

if TYPE_CHECKING:
    from autotune.capture.program import Program


_OLDEST_TORCH = (2, 12)


def refuse_old_torch(version: str = torch.__version__) -> None:
    """Raise CaptureError for a torch that is too old: captures read side effects where later versions report them."""
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TORCH:
        raise CaptureError(
            f"torch is {version}, with which a capture may lose side effects of the step; install a supported one: "
            "pip install 'torch>=2.12,<2.14'"
        )


def refuse_gradients_of_the_batch(tensors: list[torch.Tensor]) -> None:
    """Raise CaptureError for a tensor of the batch that requires a gradient."""
    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            problem = "has an autograd graph" if tensor.grad_fn is not None else "requires a gradient"
            raise CaptureError(
                f"batch.{position} {problem}, and a captured step computes gradients of parameters only; pass it detached"
            )


def refuse_layouts(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise CaptureError for a sparse or nested tensor: a captured step has dense ones alone."""
    for name, tensor in tensors:
        if not is_dense(tensor):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").replace("_", " ")
            raise CaptureError(
                f"{name} is a {kind} tensor, and a captured step has dense ones alone; convert it with to_dense() or by padding, "
                "or train without a plan"
            )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has strides, and one shape."""
    return tensor.layout is torch.strided and not tensor.is_nested


def refuse_parameter_hooks(model: torch.nn.Module, loss_fn: object = None) -> None:
    """Raise CaptureError for a parameter of the model, or of a loss that is a module, with a hook on its gradient."""
    of_loss = loss_fn.named_parameters("loss_fn") if isinstance(loss_fn, torch.nn.Module) else ()
    for name, parameter in (*model.named_parameters(), *of_loss):
        if has_hooks(parameter):
            raise CaptureError(
                f"{name} has a hook on its gradient, which a captured step never calls; remove the hook, and do its work in "
                "the loss function or in before_update"
            )


def refuse_two_gradients(names: list[str]) -> None:
    """Raise CaptureError for a parameter with several gradients, each of which would be an update of its own."""
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise CaptureError(
            f"{twice} has several names in the model, and the trace has a gradient for each; give it one name, or report "
            "the model as a bug"
        )


def refuse_lost_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raise CaptureError for a trainable tensor that the loss function reads and that would get no gradient."""
    raise CaptureError(
        f"the loss function reads {name} of shape {tuple(tensor.shape)}, which requires a gradient and is no parameter of the "
        "model, so it would get none; register it as a parameter of the model, make the loss a module that holds it, or set "
        "requires_grad_(False) if it is not trained"
    )


def refuse_writes_in_backward(graph: fx.Graph) -> None:
    """Raise CaptureError for a tensor that only the backward pass changes in place, such as a buffer in a custom function."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = node.args[0]
        if isinstance(written, fx.Node) and written.op == "placeholder":
            name = getattr(written.meta.get("desc"), "target", None)
            raise CaptureError(
                f"the backward pass changes {user_path(name) if name else 'a tensor'} in place, which a captured step does not "
                "repeat; do that in the forward pass, or after the step"
            )


def refuse_scripted(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raise CaptureError for a module of TorchScript, whose Python cannot be traced."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a module of TorchScript, which cannot be captured; pass the Python module that "
                "it was made from"
            )


def refuse_loss(loss: torch.Tensor, *, is_second: bool) -> None:
    """Raise CaptureError for a loss of several elements, and for a second result to differentiate."""
    if is_second:
        raise CaptureError(
            "the loss function returns several tensors to differentiate; return one loss, or (loss, extras) with "
            "detached extras"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss has {loss.numel()} elements, and backward needs one number; reduce it, for example with loss.mean()"
        )


def refuse_dataclasses(leaves: Iterable[object], function: str) -> None:
    """Raise CaptureError for a result in a dataclass that torch does not look into. `function` names what returned it."""
    for leaf in leaves:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            kind = type(leaf).__name__
            raise CaptureError(
                f"the {function} returns a {kind}, in which torch looks for no tensors; return them in a tuple or a "
                f"dict, or register the class with torch.utils._pytree.register_dataclass({kind})"
            )


def refuse_constant(node: fx.Node, constant: object) -> None:
    """Raise CaptureError for a constant of the trace that is no tensor: the graph of an op, or a generator."""
    if isinstance(constant, torch.Tensor):
        return
    if isinstance(constant, fx.GraphModule):
        op = next(iter(node.users), node).target
        raise CaptureError(
            f"{op} runs a function as a graph of its own, which a captured step does not support; write it as plain operations, "
            "such as torch.where for torch.cond, or scaled_dot_product_attention for flex_attention"
        )
    raise CaptureError("the step draws from a torch.Generator; draw from the default one, or before the step")


def refuse_sparse(node: fx.Node, results: Iterable[torch.Tensor]) -> None:
    """Raise CaptureError for an op with a sparse result."""
    if any(result.layout is not torch.strided for result in results):
        raise CaptureError(
            f"{node.target} makes a sparse tensor, which a captured step does not support; use the dense form, such as "
            "Embedding(sparse=False)"
        )


def refuse_part_views(node: fx.Node, results: Iterable[torch.Tensor], storages: set[int]) -> None:
    """Raise CaptureError for an op that returns a view of an input and a new tensor. `storages` has those of the inputs."""
    if any(tensor_storage(result) in storages for result in results):
        raise CaptureError(
            f"{node.target} returns a view of its input and a new tensor at once, which a captured step does not support; "
            "replace it in the model by two operations"
        )


class MemoryCheck:
    """Refuse calls of a captured step whose tensors share memory that it writes: they may have come to do so since the capture."""

    def __init__(self, program: "Program") -> None:
        ops = program.graph.ops
        self._program = program
        self._written = {value for op in ops for value in op.writes}
        self._used = self._written.union(*(op.inputs for op in ops))
        self._static = {value: tensor for value, tensor in program.tensors.items() if value in self._used}
        self._places: list[int] = []
        """Addresses of the static tensors in the last call that was checked in full."""
        self._storages: set[int] = set()

    def refuse(self, batch: Sequence[torch.Tensor]) -> None:
        """Raise CaptureError for two tensors in the same bytes, of the model, the batch or from outside, where the step writes one."""
        places = [tensor.data_ptr() for tensor in self._static.values()]
        free = {value: read() for value, read in self._program.free}
        passed = dict(zip(self._program.batch, batch, strict=True)) | free
        storages = [tensor_storage(tensor) for tensor in passed.values()]
        # of the passed tensors the step writes only those from outside, so others may share memory where it writes none
        are_apart = self._written.isdisjoint(free) or len(set(storages)) == len(storages)
        if are_apart and places == self._places and self._storages.isdisjoint(storages):
            return
        values = self._program.graph.values
        refuse_shared_memory(
            (values[v].name, tensor, v in self._written)
            for v, tensor in (self._static | passed).items()
            if v in self._used
        )
        self._places, self._storages = places, set(map(tensor_storage, self._static.values()))


class _Span(NamedTuple):
    """Bytes of a storage between the first and the last of a tensor."""

    start: int
    end: int
    number: int
    tensor: torch.Tensor
    name: str
    is_written: bool


def refuse_shared_memory(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """Raise CaptureError for two tensors in the same bytes, where the step writes one: a plan takes them as independent.

    `tensors` has for each tensor its name, the tensor, and whether the step writes it. Each tensor is another object.
    """
    spans: dict[int, list[_Span]] = defaultdict(list)
    for number, (name, tensor, is_written) in enumerate(tensors):
        if tensor.numel():
            spans[tensor_storage(tensor)].append(_Span(*_byte_range(tensor), number, tensor, name, is_written))
    for sharing in spans.values():
        sharing.sort()
        for position, span in enumerate(sharing):
            for other in islice(sharing, position + 1, None):
                if other.start >= span.end:
                    break
                if (span.is_written or other.is_written) and _share_bytes(span, other):
                    raise CaptureError(
                        f"{span.name} and {other.name} are two tensors in the same memory, and the step writes to it, so a plan "
                        "may change one before the other is read; make them one parameter, or give one its own memory: .clone()"
                    )


def _share_bytes(first: _Span, second: _Span) -> bool:
    """Return True if two tensors have a byte in common; columns of one matrix have none, though their spans overlap."""
    start = min(first.start, second.start)
    used = np.zeros(max(first.end, second.end) - start, np.bool_)

    def bytes_of(span: _Span) -> np.ndarray[Any, np.dtype[np.bool_]]:
        tensor, itemsize = span.tensor, span.tensor.itemsize
        strides = (*(int(stride) * itemsize for stride in tensor.stride()), 1)
        return np.lib.stride_tricks.as_strided(used[span.start - start :], (*tensor.shape, itemsize), strides)

    bytes_of(first)[...] = True
    return bool(bytes_of(second).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _graph_modules(module: torch.nn.Module) -> Iterator[fx.GraphModule]:
    """Yield a graph module and those within it: a checkpoint's body is one, and may contain other checkpoints."""
    return (part for part in module.modules() if isinstance(part, fx.GraphModule))


def _find_checkpoints(forward: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Any]]:
    """Yield every checkpoint, also those within others, with the module that holds its body."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    for module in _graph_modules(forward):
        for node in module.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
            yield module, node


def refuse_checkpoints_that_write(forward: fx.GraphModule) -> None:
    """Raise CaptureError for a checkpoint that changes a buffer: eager changes it once more as it recomputes."""
    for owner, node in _find_checkpoints(forward):
        body: fx.GraphModule = getattr(owner, str(node.args[0].target))
        writers = list(_writers_of_inputs(body.graph))
        if writers:
            name = "batch_norm" if "batch_norm" in writers else writers[0]
            raise CaptureError(
                f"a checkpoint contains {name}, which changes a buffer: eager changes it again as it recomputes, and a captured "
                "step does not; leave torch.utils.checkpoint out, as a plan chooses what to recompute, or that layer out of it"
            )
        names = [_target_name(inner) for module in _graph_modules(body) for inner in module.graph.nodes]
        drawing = [name for name in names if DRAWS.search(name) and "empty" not in name]
        if drawing and node.kwargs.get("preserve_rng_state") is False:
            raise CaptureError(
                f"a checkpoint with preserve_rng_state=False contains {drawing[0]}: eager draws other numbers as it recomputes, and "
                "a captured step does not; leave preserve_rng_state out"
            )


def _writers_of_inputs(body: fx.Graph) -> Iterator[str]:
    """Yield the names of ops of a checkpoint's body that change a tensor from outside of it, or a part of one."""
    inputs = body.find_nodes(op="placeholder")
    memories = {memory for node in inputs if (memory := memory_of(node)) is not None}
    for node in body.nodes:
        name = _target_name(node)
        if name in ("batch_norm", "instance_norm"):
            told = node.kwargs.get("training", node.kwargs.get("use_input_stats", name == "instance_norm"))
            if not (node.args[5] if len(node.args) > 5 else told):
                continue
        if any(each.op == "placeholder" or memory_of(each) in memories for each in written_nodes(node)):
            yield name


def _target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def refuse_reentrant_checkpoints(forward: fx.GraphModule) -> None:
    """Raise CaptureError for a reentrant checkpoint without an input that requires a gradient; eager trains nothing in it."""
    for _, node in _find_checkpoints(forward):
        # the inputs follow the block, and then the parameters in its closure
        inputs = [source for source in node.all_input_nodes if source.op != "get_attr" and not _is_parameter(source)]
        if node.kwargs.get("use_reentrant") is not False and not any(map(_requires_grad, inputs)):
            raise CaptureError(
                "a checkpoint with use_reentrant=True has no input that requires a gradient, so eager computes no gradient for "
                "its parameters, and a captured step would; pass use_reentrant=False to torch.utils.checkpoint"
            )


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _requires_grad(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    parts = example if isinstance(example, (tuple, list)) else (example,)
    return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)
