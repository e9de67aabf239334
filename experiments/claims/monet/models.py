"""MONeT's models in plain torch: VGG-16, GoogLeNet with both side classifiers, its UNet and MobileNet-V2."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000


def vgg16() -> nn.Module:
    """Make VGG-16 (Simonyan and Zisserman 2014) without BatchNorm: 138 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(4096, CLASSES))


def _convolved(channels: int, width: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding, bias=False), nn.BatchNorm2d(width, eps=1e-3), nn.ReLU()
    )


class Inception(nn.Module):
    """Four branches over one input, concatenated: a convolution, two pairs of convolutions, and a pool with a convolution."""

    def __init__(self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _convolved(channels, one, 1),
                nn.Sequential(_convolved(channels, three[0], 1), _convolved(*three, 3, padding=1)),
                # of 3 x 3, as torchvision has had it since its beginning
                nn.Sequential(_convolved(channels, five[0], 1), _convolved(*five, 3, padding=1)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _convolved(channels, pooled, 1)),
            ]
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in self.branches], dim=1)


def _side_classifier(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), _convolved(channels, 128, 1), nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(),
        nn.Dropout(0.7), nn.Linear(1024, CLASSES),
    )  # fmt: skip


class GoogLeNet(nn.Module):
    """GoogLeNet (Szegedy et al. 2014) with BatchNorm, as torchvision trains it: logits, and those of two side classifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolved(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True), _convolved(64, 64, 1),
            _convolved(64, 192, 3, padding=1), nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(192, 64, (96, 128), (16, 32), 32), Inception(256, 128, (128, 192), (32, 96), 64),
            nn.MaxPool2d(3, 2, ceil_mode=True), Inception(480, 192, (96, 208), (16, 48), 64),
        )  # fmt: skip
        self.middle = nn.Sequential(
            Inception(512, 160, (112, 224), (24, 64), 64), Inception(512, 128, (128, 256), (24, 64), 64),
            Inception(512, 112, (144, 288), (32, 64), 64),
        )  # fmt: skip
        self.last = nn.Sequential(
            Inception(528, 256, (160, 320), (32, 128), 128), nn.MaxPool2d(2, 2, ceil_mode=True),
            Inception(832, 256, (160, 320), (32, 128), 128), Inception(832, 384, (192, 384), (48, 128), 128),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, CLASSES),
        )  # fmt: skip
        self.sides = nn.ModuleList([_side_classifier(512), _side_classifier(528)])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        begun = self.stem(images)
        further = self.middle(begun)
        return self.last(further), self.sides[1](further), self.sides[0](begun)


def _twice(channels: int, middle: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for given, made in ((channels, middle), (middle, width)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """UNet (Ronneberger et al. 2015) with BatchNorm and 17 million parameters, upsampled as in MONeT."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _twice(3, 64, 64)
        self.down = nn.ModuleList(_twice(w, v, v) for w, v in ((64, 128), (128, 256), (256, 512), (512, 512)))
        self.up = nn.ModuleList(_twice(w, w // 2, v) for w, v in ((1024, 256), (512, 128), (256, 64), (128, 64)))
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = [self.first(images)]
        for block in self.down:
            levels.append(block(F.max_pool2d(levels[-1], 2)))
        made = levels.pop()
        for block in self.up:
            beside = levels.pop()
            made = block(torch.cat([beside, F.adaptive_avg_pool2d(made, beside.shape[-2:])], dim=1))
        return self.head(made)


def _thin(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
    )


class Inverted(nn.Module):
    """Inverted bottleneck, wide inside and narrow outside, with a residual where input and output have one shape."""

    def __init__(self, channels: int, width: int, stride: int, factor: int) -> None:
        super().__init__()
        middle = channels * factor
        self.added = stride == 1 and channels == width
        self.body = nn.Sequential(
            _thin(channels, middle, 1) if factor > 1 else nn.Identity(),
            _thin(middle, middle, 3, stride, groups=middle),
            nn.Conv2d(middle, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        return images + self.body(images) if self.added else self.body(images)


def mobilenet_v2() -> nn.Module:
    """Make MobileNet-V2 (Sandler et al. 2018): 3.5 million parameters."""
    layers: list[nn.Module] = [_thin(3, 32, 3, 2)]
    channels = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for factor, width, count, first in stages:
        for number in range(count):
            layers.append(Inverted(channels, width, first if number == 0 else 1, factor))
            channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*layers, _thin(320, 1280, 1), *head)
