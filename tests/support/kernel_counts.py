"""Count the ATen kernels of an eager step and of the captured step, by the layouts they read, and report what differs."""

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = frozenset(
    [
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "diagonal",
        "expand",
        "getitem",
        "lift_fresh",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsqueeze",
        "view",
        "view_as_real",
        "view_as_complex",
        "_unsafe_view",
        "_reshape_alias",
        "unsafe_chunk",
        "real",
        "imag",
        "movedim",
    ]
)
MARKS = frozenset(("_record_function_enter_new", "_record_function_exit", "profiler::_record_function_exit"))
"""Marks of the profiler around an optimizer's step; nothing is computed."""
ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize"])


class Kernels(TorchDispatchMode):
    """Count the ops dispatched below autograd, by the name that their in-place and `out=` forms share.

    `layouts` counts them by name and by shape and strides of the tensors they read: a kernel takes another path for others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.layouts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = kernel_name(func)
        if name not in VIEWS and name not in ALLOCATIONS and name not in MARKS:
            self.counts[name] += 1
            leaves = pytree.tree_leaves((args, kwargs or {}))
            tensors = [(tuple(x.shape), x.stride()) for x in leaves if isinstance(x, torch.Tensor)]
            self.layouts[name, str(tensors)] += 1
        return func(*args, **(kwargs or {}))


def kernel_name(func: Any) -> str:
    """Name of an overload without its namespace, overload and in-place mark."""
    name = func._schema.name.split("::")[1]
    return name.removesuffix("_") if not name.startswith("__") and name != "_" else name


ALLOWED = {
    "ones_like": "the gradient of the loss is made once, not in every step",
    "_to_copy": "the mask of a split dropout is converted for each of its two products",
    "div": "a split dropout scales its mask for the forward and again for the backward",
    "stack": "final states that nothing reads are not computed",
    "copy": "running statistics are written back by an op of their own at the end of the step",
    "_native_batch_norm_legit": "instance norm calls the batch norm kernel under a schema without statistics",
    "native_batch_norm": "batch norm on a CPU is split into statistics and result",
    "_native_batch_norm_legit_functional": "batch norm on a CPU is split into statistics and result",
    "_native_batch_norm_legit_no_training": "batch norm on a CPU is split into statistics and result",
}
"""Kernels whose number may differ from eager's, each with the reason."""


BY_MODEL = {
    "gpt2": (
        "all arange cat cumsum eq ne sub _local_scalar_dense",
        "transformers reads in eager that no sequences are packed into one; in the trace that is a constant",
    ),
    "bert": ("all arange _local_scalar_dense", "transformers reads in eager that the mask holds ones alone"),
    "segformer": (
        "addcmul lerp",
        "autograd copies a gradient into the strides of its parameter; updates by element need no copy",
    ),
}
"""Kernels of one model that may differ, by the model's name: the kernels and the reason."""


def unexplained(eager: Counter[str], traced: Counter[str], model: str = "") -> dict[str, tuple[int, int]]:
    """Kernels by name whose number differs without a listed reason: how often eager and the trace run them."""
    allowed = {*ALLOWED, *BY_MODEL.get(model, ("", ""))[0].split()}
    names = sorted(eager.keys() | traced.keys())
    return {n: (eager[n], traced[n]) for n in names if eager[n] != traced[n] and n not in allowed}


def other_layouts(eager: Kernels, traced: Kernels, model: str = "") -> list[tuple[str, str]]:
    """Kernels that run as often as in eager, but read tensors of another shape or other strides."""
    allowed = {*ALLOWED, *BY_MODEL.get(model, ("", ""))[0].split()}
    differing = (eager.layouts - traced.layouts) + (traced.layouts - eager.layouts)
    return sorted(key for key in differing if key[0] not in allowed)
