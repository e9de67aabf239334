"""Trace the ATen ops that eager dispatches, without the Python decompositions that torch registers only for tracing.

While the Python dispatcher is on, an overload's entry in `py_kernels` replaces its C++ kernel above autograd. Eager never
runs these entries, so a step that is traced through them runs other kernels, often with other bits. Views computed in
Python differ in the strides of dimensions of size 1, by which convolutions and linear layers choose kernels.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._library import simple_registry
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import traceback
from torch.fx.node import _side_effectful_functions

from autotune.capture.fake.kernel_strides import kernel_strides
from autotune.capture.values import ctc_loss

aten = torch.ops.aten
_DECOMPOSED = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Dispatch keys of decompositions above autograd."""

KEPT: dict[str, str] = {
    "aten::native_batch_norm": "its schema hides that it writes the running statistics, so the trace would lose them; "
    "the decomposition calls the same kernel under a schema that names the writes",
    "aten::cudnn_batch_norm": "its schema hides the writes, too; the decomposition runs torch's kernel instead of cuDNN's, "
    "which is slower on a GPU and rounds differently, but never loses the running statistics",
}
"""Decompositions that stay, by operator, each with its reason."""


def _dropout(data: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Trace a dropout as one op that draws; as in eager, nothing is drawn for empty tensors and a `p` of 0 or 1."""
    if train and 0 < p < 1 and data.numel() > 0:
        dropped: torch.Tensor = aten.native_dropout.default(data, p, train)[0]
        return dropped
    whole: torch.Tensor = _in_cpp(aten.dropout.default, data, p, train)
    return whole


def _one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Scatter ones into zeros, as eager does; the C++ kernel compares fake tensors with a range instead.

    The scatter raises for a class out of range, so eager's check of the data needs no op of its own.
    """
    if num_classes < 1 or classes.numel() == 0:
        encoded: torch.Tensor = _in_cpp(aten.one_hot.default, classes, num_classes)
        return encoded
    zeros = torch.zeros((*classes.shape, num_classes), dtype=classes.dtype, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


def _in_cpp(op: torch._ops.OpOverload, *arguments: Any) -> Any:
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *arguments)


REPLACED: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    aten.one_hot.default: _one_hot,
}
"""Decompositions that replace torch's, or a C++ kernel that treats fake tensors differently."""


IN_PLACE = "autotune_in_place"
"""Key among a traced node's annotations: the in-place overload that eager dispatches."""

_ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg, aten._linalg_check_errors.default}
"""Ops that only raise; the tracer removes those that it does not list as having a side effect."""


VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Views that fake tensors compute in Python, where dimensions of size 1 get other strides than from the kernel."""


def _view(mode: FakeTensorMode, op: torch._ops.OpOverload, data: FakeTensor, *shape: Any) -> Any:
    """Compute a view of a fake tensor by the C++ kernel; its strides decide which kernels eager runs next."""
    if not all(isinstance(size, int) for size in (*data.shape, *data.stride(), *shape[0])):
        return fake_impls._view_meta(mode, op, data, *shape)
    with in_kernel_invocation_manager(mode):
        viewed = op(data, *shape)
    return FakeTensor(mode, viewed, data.device)


SHAPES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    **dict.fromkeys(VIEWS, _view),
    **ctc_loss.SHAPES,
}
"""Shape functions that replace or complete torch's."""


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace without Python decompositions of ATen ops; other threads of the process must not trace meanwhile."""
    saved = {op: dict(op.py_kernels) for op in _decomposed()}
    functionalize = FunctionalTensorMode.__torch_dispatch__
    shapes = {op: fake_impls.op_implementations_dict.get(op) for op in SHAPES}
    unmarked = _ASSERTIONS - _side_effectful_functions
    try:
        _side_effectful_functions.update(unmarked)
        FunctionalTensorMode.__torch_dispatch__ = _annotate_in_place(functionalize)  # type: ignore[method-assign]
        fake_impls.op_implementations_dict.update(SHAPES)
        for op in saved:
            for key in _DECOMPOSED:
                op.py_kernels.pop(key, None)
                if op in REPLACED:
                    op.py_kernels[key] = REPLACED[op]
            if _is_view(op):
                op.py_kernels.pop(DispatchKey.Meta, None)
            op._dispatch_cache.clear()
        with kernel_strides(), _without_tokens(aten._linalg_check_errors.default):
            yield
    finally:
        for op, shape in shapes.items():
            if shape is None:
                fake_impls.op_implementations_dict.pop(op)
            else:
                fake_impls.op_implementations_dict[op] = shape
        FunctionalTensorMode.__torch_dispatch__ = functionalize  # type: ignore[method-assign]
        _side_effectful_functions.difference_update(unmarked)
        for op, kernels in saved.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


@contextmanager
def _without_tokens(op: torch._ops.OpOverload) -> Iterator[None]:
    """Trace a check without the tokens that order it among other effects: they would be inputs and results of the step."""
    holder = simple_registry.singleton.find(op._name).effect
    effect = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)


def _annotate_in_place(functionalize: Callable[..., Any]) -> Callable[..., Any]:
    """Annotate the nodes of the forward with the in-place overload that eager dispatches there."""

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with traceback.annotate({IN_PLACE: func if _overwrites(func) else None}):
            return functionalize(mode, func, types, args, kwargs)

    return dispatch


def _overwrites(func: Any) -> bool:
    """Return whether an overload writes to its first argument and to nothing else."""
    arguments = func._schema.arguments
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    return bool(written) and written[0] and not any(written[1:])


def in_place_overload(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the in-place overload that eager runs where the trace has the functional one; None where there is none."""
    # the tracer copies a forward node's annotation to the backward nodes of the same call
    if node.meta.get("partitioner_tag") != "is_forward" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    overload: torch._ops.OpOverload | None = node.meta.get("custom", {}).get(IN_PLACE)
    if overload is None or overload._schema.name != node.target._schema.name + "_":
        return None
    return overload if overload._overloadname == node.target._overloadname else None


def _decomposed() -> list[torch._ops.OpOverload]:
    """Return the ATen overloads with a decomposition above autograd; torch registers them on import."""
    replaceable = (op for op in _aten_overloads() if any(key in op.py_kernels for key in _DECOMPOSED) or _is_view(op))
    return [*REPLACED, *replaceable]


@functools.cache
def _aten_overloads() -> tuple[torch._ops.OpOverload, ...]:
    """Return the ATen overloads whose kernels a trace may replace. They are looked up once: there are thousands of ops."""
    names = (qualified.partition("::") for qualified in torch._C._dispatch_get_all_op_names() if qualified not in KEPT)
    ops = []
    for namespace, _, rest in names:
        name, _, overload = rest.partition(".")
        if namespace == "aten":
            op = getattr(getattr(aten, name, None), overload or "default", None)
            if op is not None and op not in REPLACED:
                ops.append(op)
    return tuple(ops)


def _is_view(op: torch._ops.OpOverload) -> bool:
    """Return whether the C++ kernel computes the result's strides only from the argument's strides, on any device."""
    return op.is_view or op in VIEWS
