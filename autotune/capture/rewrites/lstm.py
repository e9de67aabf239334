"""Run and measure the one kernel per layer and direction in which oneDNN runs `nn.LSTM`, as the trace has it."""

from typing import Any

import torch
from torch import fx
from torch.utils._mode_utils import no_dispatch

LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def run_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """`LAYER` as backward needs it: the kernel makes its workspace only while gradients are on."""
    detached = [part.detach() if isinstance(part, torch.Tensor) else part for part in arguments]
    with torch.enable_grad():
        made: tuple[torch.Tensor, ...] = LAYER(*detached)
    return made


def workspace(node: fx.Node) -> torch.Tensor:
    """The workspace of a traced layer, whose shape function does not know its size: run once, on zeros."""
    with no_dispatch():
        arguments = fx.node.map_arg(
            node.args, lambda read: torch.zeros(read.meta["val"].shape, dtype=read.meta["val"].dtype)
        )
        return run_layer(*arguments)[3]
