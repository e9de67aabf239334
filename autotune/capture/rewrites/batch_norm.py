"""Split batch normalization into two ops: the statistics, and the result, which can be recomputed from them.

ATen's kernel computes mean and deviation in double precision, scales and shifts, and returns all of it. Backward keeps the
statistics, a few numbers for each channel. From them the result is recomputed in a tenth of the kernel's time. The op of
the statistics computes the result, too: where the second op runs directly after it, that result is reused.

On a GPU, the training kernel and `batch_norm_elemt` compute the result by one function (Normalization.cu).
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
WHOLE = aten._native_batch_norm_legit_functional.default
MIXED = (
    WHOLE,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit.default,
    aten.native_batch_norm.default,
)
"""Training kernels that take parameters in float32 beside data in half precision."""
EXACT = (torch.float32, torch.float64)
"""Dtypes of parameters with which the kernel rounds in training as in evaluation."""
MEAN, DEVIATION = 1, 2
"""Positions of the statistics in the kernel's output; the deviation is stored as its inverse."""
REMADE_BY = "remade_by"
"""Name of a function's attribute: the function that returned it, with its arguments, for a process that needs it too."""

SAME_BITS = "same_bits"
"""Key in a node's meta: the node whose first output has the same bits."""


@cache
def make_normalize(eps: float) -> Callable[..., torch.Tensor]:
    """Return a function that computes a training batch norm's result from its statistics, for an `eps`."""

    def normalize(
        data: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the result with the bits of the training kernel from its statistics, one number for each channel.

        The kernel for evaluation reads a variance, and may compute another inverse from it. With a variance of one it does not,
        so the inverse is multiplied into the weight, as the training kernel does first, too. On data that is contiguous in no
        format the kernels subtract the mean first, so there the statistics are recomputed.
        """
        if not _is_contiguous(data):
            training = aten._native_batch_norm_legit.no_stats
            whole: torch.Tensor = training(data, weight, bias, True, 0.0, eps)[0]
            return whole
        scale = inverse if weight is None else weight * inverse
        ones = torch.ones_like(mean)
        evaluation = aten._native_batch_norm_legit_no_training.default
        normalized: torch.Tensor = evaluation(data, scale, bias, mean, ones, 0.0, 0.0)[0]
        return normalized

    setattr(normalize, REMADE_BY, (make_normalize, (eps,)))
    return normalize


def _is_contiguous(data: torch.Tensor) -> bool:
    """Return whether the CPU kernels use their code for contiguous data."""
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(data.ndim, ())
    return data.is_contiguous() or any(data.is_contiguous(memory_format=channels_last) for channels_last in formats)


def correct_statistics(graph: fx.Graph) -> None:
    """Set the true dtype of the statistics of CPU kernels: float32 for half-precision data with float32 weights.

    The tracer's shape function returns the data's dtype, with half of the bytes, and backward refuses that dtype.
    """
    for node in graph.nodes:
        outputs = node.meta.get("val")
        if (
            node.target not in MIXED
            or outputs[0].device.type != "cpu"
            or outputs[0].dtype not in (torch.bfloat16, torch.float16)
        ):
            continue
        dtypes = [part.meta["val"].dtype for part in node.args[1:5] if isinstance(part, fx.Node)]
        if torch.float32 not in dtypes:
            continue
        with outputs[0].fake_mode:
            statistics = [torch.empty(outputs[part].shape, device=outputs[part].device) for part in (MEAN, DEVIATION)]
        _set_outputs(node, (outputs[0], *statistics, *outputs[3:]))


def _set_outputs(node: fx.Node, parts: tuple[Any, ...]) -> None:
    """Set the traced outputs of an op."""
    node.meta["val"] = parts
    for part in node.users:
        if part.target is operator.getitem:
            part.meta["val"] = parts[part.args[1]]  # type: ignore[index]


def split_batch_norm(graph: fx.Graph) -> None:
    """Let every reader of a training batch norm's result read the output of an op that computes it from the statistics."""
    for node in graph.find_nodes(op="call_function", target=WHOLE):
        parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
        result, mean = node.meta["val"][:2]
        training, saved = node.args[5], MEAN in parts and DEVIATION in parts  # for a backward
        if not (training and saved and 0 in parts):
            continue
        if result.device.type == "cpu" and result.dtype == mean.dtype in EXACT:
            _split(graph, node, parts, make_normalize(node.args[7]), ())
        elif result.device.type == "cuda" and node.args[0].meta["val"].is_contiguous() and result.is_contiguous():
            _split(graph, node, parts, aten.batch_norm_elemt.default, (node.args[7],))


def _split(
    graph: fx.Graph, node: fx.Node, parts: dict[Any, fx.Node], normalize: Callable[..., Any], options: tuple[Any, ...]
) -> None:
    data, weight, bias = node.args[:3]
    result = parts[0]
    with graph.inserting_before(result):
        # the trace may select the statistics only further down
        mean, inverse = (graph.node_copy(parts[part]) for part in (MEAN, DEVIATION))
        normalized = graph.call_function(normalize, (data, weight, bias, mean, inverse, *options))
    normalized.meta = {**result.meta, SAME_BITS: node}
    result.replace_all_uses_with(normalized)
    graph.erase_node(result)
