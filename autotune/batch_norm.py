"""Batch normalization on a CPU as two ops: the statistics, and the result, which can be made of them again.

ATen's one kernel finds mean and deviation, in double precision, and then scales and shifts, and returns all of it. Backward
keeps the statistics, a few numbers for each channel, so that the result can be made again in the tenth of the time that the
whole takes. The op that finds them makes the result all the same; where the other runs right behind it, that is taken.
"""

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
WHOLE = aten._native_batch_norm_legit_functional.default
EXACT = (torch.float32, torch.float64)
"""With parameters in less than these the kernel rounds otherwise in training than in evaluation."""
MEAN, DEVIATION = 1, 2
"""What the whole returns behind its result; the deviation's inverse."""
GIVEN = "given"
"""Key in a node's meta: the node whose first part is the same bits."""


def normalize(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse: torch.Tensor,
) -> torch.Tensor:
    """The bits of the training kernel's result, of its statistics (one number for each channel).

    The kernel for evaluation takes a variance, of which the same inverse does not always come out; of a variance of one it
    does, so the inverse goes into the weight, which the training kernel multiplies with it first, too.
    """
    scale = inverse if weight is None else weight * inverse
    one = torch.ones_like(mean)
    made: torch.Tensor = aten._native_batch_norm_legit_no_training.default(data, scale, bias, mean, one, 0.0, 0.0)[0]
    return made


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
    result = parts[0]
    with graph.inserting_before(result):
        # the trace may take the statistics out further down
        mean, inverse = (graph.node_copy(parts[part]) for part in (MEAN, DEVIATION))
        again = graph.call_function(normalize, (data, weight, bias, mean, inverse))
    again.meta = {**result.meta, GIVEN: node}
    result.replace_all_uses_with(again)
    graph.erase_node(result)
