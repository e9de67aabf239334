"""Small models, each with kernels of another kind, by name: a factory and the shape of its data."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factory = Callable[[], nn.Module]


class Of(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.between = between

    def forward(self, data: Tensor) -> Tensor:
        return self.last(self.between(self.first(data)))


class UNet(nn.Module):
    """One level down and up again."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.down, self.inside = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.norm, self.mode = nn.Conv2d(8, 3, 3, padding=1), nn.BatchNorm2d(4), mode

    def forward(self, data: Tensor) -> Tensor:
        skip = torch.relu(self.norm(self.down(data)))
        low = F.interpolate(self.inside(F.max_pool2d(skip, 2)), scale_factor=2, mode=self.mode)
        return self.up(torch.cat([skip, low], 1))


class Cells(nn.Module):
    """A loop over a cell."""

    def __init__(self, cell: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = cell(8, 8), nn.Linear(8, 4)

    def forward(self, data: Tensor) -> Tensor:
        state = data[0]
        for step in data:
            state = self.cell(step, state)
        return self.head(state)


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, data: Tensor) -> Tensor:
        grid = self.conv(data).permute(0, 2, 3, 1).tanh()
        return F.grid_sample(data, grid, align_corners=False)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(16, 8), nn.Linear(8, 4)

    def forward(self, data: Tensor) -> Tensor:
        return self.head(self.bag((data.abs() * 4).long()))


def attend(data: Tensor) -> Tensor:
    mask = torch.ones(data.shape[0], data.shape[0], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(data[None], data[None], data[None], attn_mask=mask)[0]


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Factory, tuple[int, ...]]] = {
    "unet_nearest": (lambda: UNet("nearest"), (2, 3, 8, 8)),
    "unet_bilinear": (lambda: UNet("bilinear"), (2, 3, 8, 8)),
    "unet_bicubic": (lambda: UNet("bicubic"), (2, 3, 8, 8)),
    "gru": (lambda: nn.GRU(8, 16, 2, dropout=0.3, batch_first=True), (3, 5, 8)),
    "gru_bidirectional": (lambda: nn.GRU(8, 16, 2, dropout=0.3, bidirectional=True), (3, 5, 8)),
    "rnn_tanh": (lambda: nn.RNN(8, 16, 2, dropout=0.3), (3, 5, 8)),
    "rnn_relu": (lambda: nn.RNN(8, 16, 2, nonlinearity="relu"), (3, 5, 8)),
    "lstm_two_layers": (lambda: nn.LSTM(8, 16, 2, dropout=0.3), (3, 5, 8)),
    "lstm_without_bias": (lambda: nn.LSTM(8, 16, 2, bias=False), (3, 5, 8)),
    "lstm_projected": (lambda: nn.LSTM(8, 16, 2, proj_size=4), (3, 5, 8)),
    "gru_cells": (lambda: Cells(nn.GRUCell), (4, 2, 8)),
    "rnn_cells": (lambda: Cells(nn.RNNCell), (4, 2, 8)),
    "group_norm": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), (2, 3, 8, 8)),
    "instance_norm": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)), (2, 3, 8, 8)),
    "layer_norm": (lambda: sequence(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), (6, 8)),
    "pixel_shuffle": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.Conv2d(2, 2, 3)), (2, 3, 8, 8)),
    "average_pools": (
        lambda: sequence(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(2)),
        (2, 3, 8, 8),
    ),
    "maximum_pools": (
        lambda: sequence(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.AdaptiveMaxPool2d(2)),
        (2, 3, 8, 8),
    ),
    "grid_sample": (Sampled, (2, 3, 6, 6)),
    "conv1d": (lambda: sequence(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 2, 3)), (2, 3, 8)),
    "conv3d": (
        lambda: sequence(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2, 2)),
        (2, 1, 4, 8, 8),
    ),
    "embedding_bag": (Bag, (6, 8)),
    "masked_attention": (lambda: Of(attend), (6, 8)),
    "multihead_encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), (3, 5, 8)),
    "shrinks": (lambda: Of(lambda x: F.hardshrink(x, 0.1) + F.softshrink(x, 0.1)), (6, 8)),
    "activations": (lambda: Of(lambda x: F.mish(x) + F.elu(x) + F.softplus(x) + F.glu(torch.cat([x, x], 1))), (6, 8)),
}


def square_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean square of the output, of a recurrent layer that of its sequence."""
    made = model(batch[0])
    return (made[0] if isinstance(made, tuple) else made).square().mean()
