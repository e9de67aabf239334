"""Run oneDNN's kernel for a layer of `nn.LSTM` in one direction, and measure its workspace and cuDNN's."""

from typing import Any

import torch
from torch import fx
from torch.utils._mode_utils import no_dispatch

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
CUDNN = torch.ops.aten._cudnn_rnn.default
RESERVE = 3
"""Position of the bytes that cuDNN's forward saves for its backward."""


def run_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Run the kernel with its workspace, which backward reads and which exists only while gradients are on."""
    detached = [part.detach() if isinstance(part, torch.Tensor) else part for part in arguments]
    with torch.enable_grad():
        outputs: tuple[torch.Tensor, ...] = LAYER(*detached)
    return outputs


def with_workspace(node: fx.Node, result: Any) -> tuple[Any, Any]:
    """Return the target of a traced op and its result, with the bytes that a layer's kernel saves for backward."""
    if node.target is LAYER:
        return run_layer, [*result[:3], workspace(node)]
    if node.target is CUDNN:
        return CUDNN, [*result[:RESERVE], measure_reserve(node, result[RESERVE]), *result[RESERVE + 1 :]]
    return node.target, result


def workspace(node: fx.Node) -> torch.Tensor:
    """Return the workspace of a traced layer by a run on zeros; the kernel's shape function has a wrong size for it."""
    with no_dispatch():
        arguments = fx.node.map_arg(
            node.args, lambda read: torch.zeros(read.meta["val"].shape, dtype=read.meta["val"].dtype)
        )
        return run_layer(*arguments)[3]


def measure_reserve(node: fx.Node, traced: torch.Tensor) -> torch.Tensor:
    """Return what a traced cuDNN layer saves for backward, by a run on zeros; its shape function returns no bytes.

    Without a GPU, as in a trace of fake tensors, the size is unknown and the traced tensor is returned.
    """
    if not torch.cuda.is_available():
        return traced
    with no_dispatch():
        arguments = fx.node.map_arg(node.args, lambda read: _zeros(read.meta["val"]))
        reserve: torch.Tensor = CUDNN(*arguments)[RESERVE]
    return reserve


def _zeros(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
