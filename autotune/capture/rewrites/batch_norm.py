"""Batch normalization on a CPU as two ops: the statistics, and the result, which can be made of them again.

ATen's one kernel finds mean and deviation, in double precision, and then scales and shifts, and returns all of it. Backward
keeps the statistics, a few numbers for each channel, so that the result can be made again in the tenth of the time that the
whole takes. The op that finds them makes the result all the same; where the other runs right behind it, that is taken.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

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
"""With parameters in less than these the kernel rounds otherwise in training than in evaluation."""
MEAN, DEVIATION = 1, 2
"""What the whole returns behind its result; the deviation's inverse."""
GIVEN = "given"
"""Key in a node's meta: the node whose first part is the same bits."""


@cache
def normalizer(eps: float) -> Callable[..., torch.Tensor]:
    """Return what makes a training batch norm's result of its statistics, for the norm's own `eps`."""

    def normalize(
        data: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the bits of the training kernel's result from its statistics, one number for each channel.

        The kernel for evaluation takes a variance, of which the same inverse does not always come out. Of a variance of one it
        does, so the inverse goes into the weight, which the training kernel multiplies with it first, too. On data that
        is contiguous in no format the kernels subtract the mean first, so there the statistics are computed again.
        """
        if not _is_contiguous(data):
            training = aten._native_batch_norm_legit.no_stats
            whole: torch.Tensor = training(data, weight, bias, True, 0.0, eps)[0]
            return whole
        scale = inverse if weight is None else weight * inverse
        one = torch.ones_like(mean)
        made: torch.Tensor = aten._native_batch_norm_legit_no_training.default(data, scale, bias, mean, one, 0.0, 0.0)[
            0
        ]
        return made

    return normalize


def _is_contiguous(data: torch.Tensor) -> bool:
    """Whether the CPU kernels take their path for contiguous data."""
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(data.ndim, ())
    return data.is_contiguous() or any(data.is_contiguous(memory_format=one) for one in formats)


def correct_statistics(graph: fx.Graph) -> None:
    """Set the dtype of saved statistics that CPU kernels really make: float32 for half-precision data with float32 weights.

    The tracer's shape function has the data's dtype there, with half of the bytes and a dtype that backward refuses.
    """
    for node in graph.nodes:
        made = node.meta.get("val")
        if (
            node.target not in MIXED
            or made[0].device.type != "cpu"
            or made[0].dtype not in (torch.bfloat16, torch.float16)
        ):
            continue
        given = [part.meta["val"].dtype for part in node.args[1:5] if isinstance(part, fx.Node)]
        if torch.float32 not in given:
            continue
        with made[0].fake_mode:
            statistics = [torch.empty(made[part].shape, device=made[part].device) for part in (MEAN, DEVIATION)]
        _correct(node, (made[0], *statistics, *made[3:]))


def correct_gradients(graph: fx.Graph) -> None:
    """Lay out the data's gradient as the CPU kernel does: in the memory format of the data, never in its strides.

    The tracer's shape function takes the strides of what it computes with; ops behind it were profiled on another layout.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        made, data = node.meta["val"], node.args[1].meta["val"]
        if made[0] is not None and made[0].device.type == "cpu":
            with made[0].fake_mode:
                laid_out = torch.empty_like(made[0], memory_format=suggest_memory_format(data)).stride()
                gradient = made[0].as_strided(made[0].shape, laid_out)  # in its own storage, by which views are known
            _correct(node, (gradient, *made[1:]))


def _correct(node: fx.Node, parts: tuple[Any, ...]) -> None:
    """Set what an op makes."""
    node.meta["val"] = parts
    for part in node.users:
        if part.target is operator.getitem:
            part.meta["val"] = parts[part.args[1]]  # type: ignore[index]


def split_batch_norm(graph: fx.Graph) -> None:
    """Let everything that reads a training batch norm's result on a CPU read what `normalize` makes of its statistics."""
    for node in graph.find_nodes(op="call_function", target=WHOLE):
        parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
        made, mean = node.meta["val"][:2]
        training, kept = node.args[5], MEAN in parts and DEVIATION in parts  # for a backward, that is
        if training and kept and 0 in parts and made.device.type == "cpu" and made.dtype == mean.dtype in EXACT:
            _split(graph, node, parts)


def _split(graph: fx.Graph, node: fx.Node, parts: dict[Any, fx.Node]) -> None:
    data, weight, bias = node.args[:3]
    eps: Any = node.args[7]
    result = parts[0]
    with graph.inserting_before(result):
        # the trace may take the statistics out further down
        mean, inverse = (graph.node_copy(parts[part]) for part in (MEAN, DEVIATION))
        again = graph.call_function(normalizer(eps), (data, weight, bias, mean, inverse))
    again.meta = {**result.meta, GIVEN: node}
    result.replace_all_uses_with(again)
    graph.erase_node(result)
