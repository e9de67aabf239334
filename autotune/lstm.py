"""Keep `nn.LSTM` one op each way: tracing would take it apart into thousands of slow ones."""

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


def keep_lstm_whole(module: fx.GraphModule) -> None:
    """Replace each LSTM call in a captured forward by the kernels that eager runs, layer by layer."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "lstm":
            node.target = lstm
    module.recompile()


def lstm(  # noqa: PLR0917 - torch.lstm's own arguments
    data: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    weights: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `torch.lstm` does with oneDNN on a CPU: one call a layer and direction."""
    hidden, cell = state
    if not _one_kernel(data, state, has_biases):
        return torch.lstm(data, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    directions = 2 if bidirectional else 1
    layer_input = (data.transpose(0, 1) if batch_first else data).contiguous()
    hidden, cell = hidden.contiguous(), cell.contiguous()
    last_hidden, last_cell = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w_input, w_hidden, b_input, b_hidden = weights[4 * index : 4 * index + 4]
            output, h, c, _ = LAYER(
                layer_input, w_input, w_hidden, b_input, b_hidden, hidden[index], cell[index], direction == 1, [],
                2, hidden.size(2), 1, True, False, False, train,
            )  # fmt: skip
            outputs.append(output)
            last_hidden.append(h)
            last_cell.append(c)
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout > 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    result = layer_input.transpose(0, 1) if batch_first else layer_input
    return result, torch.stack(last_hidden), torch.stack(last_cell)


def _one_kernel(data: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], has_biases: bool) -> bool:
    """Whether eager would take oneDNN's kernel: on a CPU, in float32, without a projection."""
    hidden, cell = state
    return (
        data.device.type == "cpu"
        and data.dtype == torch.float32
        and has_biases
        and hidden.size(2) == cell.size(2)
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )
