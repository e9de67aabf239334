"""Chains of layers from hypothesis: built otherwise than `random_models`, and shrunk to the smallest that fails.

A chain is data alone, a list of links that suit any width, so that hypothesis may leave out or simplify each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from autotune.workloads.workload import Workload
from tests.support.small import batch_of

SIDE = 6
"""Height and width of the images at the start."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "relu_": partial(nn.ReLU, True), "gelu": nn.GELU, "silu_": partial(nn.SiLU, True), "mish": nn.Mish,
    "relu6": nn.ReLU6, "sigmoid": nn.Sigmoid, "softmax": partial(nn.Softmax, 1), "prelu": nn.PReLU, "hardswish": nn.Hardswish,
}  # fmt: skip
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 1), "instance": partial(nn.InstanceNorm2d, affine=True),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.003, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}


@dataclass(frozen=True)
class Chain:
    """Links, and what they are trained with; its `repr` makes it again."""

    links: tuple[Any, ...]
    count: int
    channels: int
    optimizer: str
    smoothing: float

    def make(self) -> Workload:
        """Make the training step; two calls give twins."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            body, width = _body(self.links, self.channels)
            model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
        return Workload(model, self._loss, OPTIMIZERS[self.optimizer](model.parameters()), self.batch(0))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Images and labels of one step."""
        return batch_of(self.count, self.channels, SIDE, SIDE, seed=number)

    def runs_in_eager(self) -> bool:
        """Try one step; an in-place layer may overwrite what backward needs."""
        workload = self.make()
        try:
            self._loss(workload.model, workload.batch)[0].backward()
        except RuntimeError:
            return False
        return True

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1], label_smoothing=self.smoothing), {"scores": scores}


class Residual(nn.Module):
    """The sum of a body of equal width and what it reads."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.body(inputs)


class Branches(nn.Module):
    """Two bodies of one input, joined along the channels; the second reads a view."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.first(inputs), self.second(inputs.transpose(2, 3))], 1)


class Overwrite(nn.Module):
    """A copy whose first channels are scaled in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        copied = inputs.clone()
        copied[:, : (inputs.shape[1] + 1) // 2] *= 0.5
        return copied


def _body(links: tuple[Any, ...], width: int) -> tuple[nn.Module, int]:
    """Layers for links, and the number of channels behind them. Height and width stay equal, so that branches can be joined."""
    layers: list[nn.Module] = []
    for kind, *details in links:
        match kind, *details:
            case "conv", to:
                layers.append(nn.Conv2d(width, to, 3, padding=1))
                width = to
            case "depthwise", bias:
                layers.append(nn.Conv2d(width, width, 3, padding=1, groups=width, bias=bias))
            case "norm", name:
                layers.append(NORMS[name](width))
            case "activation", name:
                layers.append(ACTIVATIONS[name]())
            case "dropout", channelwise, p:
                layers.append((nn.Dropout2d if channelwise else nn.Dropout)(p))
            case "pool", _:
                layers.append(nn.MaxPool2d(3, stride=1, padding=1))
            case "overwrite", _:
                layers.append(Overwrite())
            case "twice", _:
                layer = nn.Conv2d(width, width, 1)
                layers += [layer, nn.Tanh(), layer]
            case "residual", inner:
                body, to = _body(inner, width)
                layers.append(Residual(nn.Sequential(body, nn.Conv2d(to, width, 1))))
            case "branches", inner, other:
                (first, one), (second, two) = _body(inner, width), _body(other, width)
                layers.append(Branches(first, second))
                width = one + two
    return nn.Sequential(*layers), width


_SIMPLE = st.one_of(
    st.tuples(st.just("activation"), st.sampled_from(list(ACTIVATIONS))),
    st.tuples(st.just("conv"), st.integers(1, 8)),
    st.tuples(st.just("norm"), st.sampled_from(list(NORMS))),
    st.tuples(st.just("dropout"), st.booleans(), st.sampled_from((0.0, 0.2, 1.0))),
    st.tuples(st.just("depthwise"), st.booleans()),
    st.tuples(st.sampled_from(("pool", "overwrite", "twice")), st.none()),
)


def _nested(links: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    inner = st.lists(links, max_size=3).map(tuple)
    return st.tuples(st.just("residual"), inner) | st.tuples(st.just("branches"), inner, inner)


def chains() -> st.SearchStrategy[Chain]:
    """Draw a chain of up to eight links, some of which hold chains themselves."""
    links = st.lists(st.recursive(_SIMPLE, _nested, max_leaves=6), min_size=1, max_size=8).map(tuple)
    return st.builds(
        Chain, links, st.integers(1, 3), st.integers(1, 4), st.sampled_from(list(OPTIMIZERS)), st.sampled_from((0.0, 0.1))
    )  # fmt: skip
