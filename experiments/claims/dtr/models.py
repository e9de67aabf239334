"""DTR's models in plain torch: ResNet-1202 for CIFAR, DenseNet-121, and a recurrent net of long, wide cells."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    """Two convolutions; where the shape changes, the input is subsampled and padded with zero channels (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.more = width - channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        shortcut = F.pad(images[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2)) if self.more else images
        return F.relu(self.body(images) + shortcut)


def cifar_resnet(layers: int) -> nn.Module:
    """Make a ResNet of 6n + 2 layers in three stages of 16, 32 and 64 channels."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for _ in range((layers - 2) // 6):
            blocks.append(Basic(channels, width, 1 if width == channels else 2))
            channels = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Dense(nn.Module):
    """Layers that read all earlier layers of the block, 32 channels each (Huang et al. 2016)."""

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
        features = [images]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet121() -> nn.Module:
    """Make DenseNet-121 with 8.0 million parameters."""
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
    """Cells of a tree LSTM along a line: gates for input, output and value, and a forget gate from separate products."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.from_input, self.state = nn.Linear(inputs, 3 * width), nn.Linear(width, 3 * width, bias=False)
        self.forget_from_input, self.forget_state = nn.Linear(inputs, width), nn.Linear(width, width, bias=False)
        self.width = width

    def forward(self, steps: Tensor) -> Tensor:
        cell = hidden = steps.new_zeros(1, self.width)
        for step in steps.unbind(0):
            input_gate, output_gate, value = (self.from_input(step) + self.state(cell)).chunk(3, 1)
            remembered = torch.sigmoid(self.forget_from_input(step) * self.forget_state(hidden))
            cell = torch.sigmoid(input_gate) * torch.tanh(value) + remembered
            hidden = torch.sigmoid(output_gate) * torch.tanh(cell)
        return cell


class Pair(nn.Module):
    """Encoder and decoder of `nn.Transformer(nhead=16, num_encoder_layers=12)`, layer by layer.

    `nn.Transformer` copies its first layer, and fake tensors cannot be copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(512, 16) for _ in range(12))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(512, 16) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(512) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.encoder:
            source = layer(source)
        memory = self.norms[0](source)
        for layer in self.decoder:
            target = layer(target, memory)
        return self.norms[1](target)
