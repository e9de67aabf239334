"""DTR's models in plain torch: ResNet-1202 for CIFAR, DenseNet-121, and a recurrent net of long, wide cells."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    """Two convolutions; where the shape changes the input is thinned out and padded with channels of zeros (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.more = width - channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        kept = F.pad(images[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2)) if self.more else images
        return F.relu(self.body(images) + kept)


def cifar_resnet(layers: int) -> nn.Module:
    """Of 6n + 2 layers in three stages of 16, 32 and 64 channels."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for _ in range((layers - 2) // 6):
            blocks.append(Basic(channels, width, 1 if width == channels else 2))
            channels = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Dense(nn.Module):
    """Layers that read all before them in the block, 32 channels each (Huang et al. 2016)."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 128, 1, bias=False),
                nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1, bias=False),
            )
            for width in range(channels, channels + 32 * count, 32)
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        made = [images]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1)


def densenet121() -> nn.Module:
    """Of 8.0 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = 64
    for count in (6, 12, 24, 16):
        if channels > 64:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        layers.append(Dense(channels, count))
        channels += 32 * count
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Recurrent(nn.Module):
    """Cells of a tree's LSTM along a line: a gate for input, output and value, and one that forgets, by products of their own."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.seen, self.state = nn.Linear(given, 3 * width), nn.Linear(width, 3 * width, bias=False)
        self.forget_seen, self.forget_state = nn.Linear(given, width), nn.Linear(width, width, bias=False)
        self.width = width

    def forward(self, steps: Tensor) -> Tensor:
        cell = hidden = steps.new_zeros(1, self.width)
        for step in steps.unbind(0):
            chosen, shown, value = (self.seen(step) + self.state(cell)).chunk(3, 1)
            kept = torch.sigmoid(self.forget_seen(step) * self.forget_state(hidden))
            cell = torch.sigmoid(chosen) * torch.tanh(value) + kept
            hidden = torch.sigmoid(shown) * torch.tanh(cell)
        return cell


class Pair(nn.Module):
    """What `nn.Transformer(nhead=16, num_encoder_layers=12)` is, its layers made one by one: it copies a first one, which
    fake tensors cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(512, 16) for _ in range(12))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(512, 16) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(512) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.encoder:
            source = layer(source)
        seen = self.norms[0](source)
        for layer in self.decoder:
            target = layer(target, seen)
        return self.norms[1](target)
