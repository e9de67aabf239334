"""Under autocast a captured step casts as often as eager does, and ends at eager's bits under every plan."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.apply import TrainStep
from autotune.autocast import cached_casts
from autotune.capture import capture
from autotune.errors import CaptureError, ConfigError
from autotune.profile import profile
from autotune.workload import Workload, infer
from tests.eager import assert_equals_eager, eager_step
from tests.kernel_counts import kernels_of, unexplained
from tests.kernel_models import Cells
from tests.planned import random_plan
from tests.small import Tied, make

BF16 = torch.bfloat16
autocast = partial(torch.autocast, "cpu", BF16)


class Net(nn.Module):
    """Two layers of one shape and a head."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.c = nn.Conv1d(8, 8, 3, padding=1)
        self.run = forward

    def forward(self, data: Tensor) -> Tensor:
        return self.run(self, data)


class Language(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, data: Tensor) -> Tensor:
        tokens = (data.abs() * 5).long() % 12
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


class Layered(nn.Module):
    """A recurrent layer, called once or twice, and a head."""

    def __init__(self, layer: Callable[[], nn.Module], calls: int = 1) -> None:
        super().__init__()
        self.layer, self.calls = layer(), calls
        self.head = nn.Linear(8, 4)

    def forward(self, data: Tensor) -> Tensor:
        for _ in range(self.calls):
            data = self.layer(data)[0]
        return self.head(data)


def two_regions(net: Any, data: Tensor) -> Tensor:
    """Each region casts for itself; the gradients of both meet in float32."""
    with autocast():
        first = net.a(torch.tanh(net.a(data)))
    with autocast():
        return net.head(net.a(torch.tanh(net.a(first.float()))))


def nested_regions(net: Any, data: Tensor) -> Tensor:
    """The inner region's end leaves the casts; where autocast is off the weight itself is read."""
    with autocast():
        first = net.a(data)
        with autocast():
            second = net.a(first)
        with torch.autocast("cpu", enabled=False):
            third = net.a(second.float())
        return net.head(net.a(third))


def without_cache(net: Any, data: Tensor) -> Tensor:
    with autocast(cache_enabled=False):
        return net.head(net.a(torch.tanh(net.a(data))))


def some_without_cache(net: Any, data: Tensor) -> Tensor:
    with autocast():
        first = net.a(net.a(data))
        with autocast(cache_enabled=False):
            second = net.a(net.a(first))
        return net.head(net.a(second))


def flag_off(net: Any, data: Tensor) -> Tensor:
    torch.set_autocast_cache_enabled(False)
    with autocast():
        made = net.head(net.a(net.a(data)))
    torch.set_autocast_cache_enabled(True)
    return made


def explicit_casts(net: Any, data: Tensor) -> Tensor:
    """Eager casts a weight as often as the user does."""
    data = data.to(BF16)
    return net.head((data @ net.a.weight.to(BF16)).tanh().float() + (data @ net.a.weight.to(BF16)).float())


def explicit_and_implicit_casts(net: Any, data: Tensor) -> Tensor:
    with autocast():
        return net.head(net.a(torch.tanh(net.a(data))) @ net.a.weight.to(BF16) @ net.a.weight.bfloat16())


def in_no_grad_first(net: Any, data: Tensor) -> Tensor:
    """A cast made under no_grad has no gradient; eager's cache leaves none of it to later readers."""
    with autocast():
        with torch.no_grad():
            scale = net.a(data).abs().mean()
        return net.head(net.b(net.a(data)) * scale)


def views_of_weights(net: Any, data: Tensor) -> Tensor:
    """The cache keeps no casts of views."""
    with autocast():
        half = net.a.weight[:4]
        return net.head(torch.cat([F.linear(data, half), F.linear(data, half)], -1))


def convolved(net: Any, data: Tensor) -> Tensor:
    with autocast():
        return net.head(net.c(torch.relu(net.c(data[:, :, None])))[:, :, 0])


def checkpointed(net: Any, data: Tensor) -> Tensor:
    with autocast():
        made = checkpoint(lambda x: net.a(torch.tanh(net.a(x))), data, use_reentrant=False)
        return net.head(net.a(made))


def three_uses(net: Any, data: Tensor) -> Tensor:
    with autocast():
        return net.head(net.a(torch.tanh(net.a(net.b(torch.tanh(net.a(data)))))))


def shared(net: Any, data: Tensor) -> Tensor:
    with autocast():
        return net.head(net.a(torch.tanh(net.a(data))))


@torch.autocast("cpu", BF16)
def decorated(net: Any, data: Tensor) -> Tensor:
    return net.head(net.a(torch.tanh(net.a(data))))


def in_half(net: Any, data: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return net.head(net.a(torch.tanh(net.a(data))))


FORWARDS = (
    shared,
    three_uses,
    two_regions,
    nested_regions,
    without_cache,
    some_without_cache,
    flag_off,
    explicit_casts,
    explicit_and_implicit_casts,
    in_no_grad_first,
    views_of_weights,
    convolved,
    checkpointed,
    decorated,
    in_half,
)


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().square().mean()


def region_loss(model: nn.Module, batch: Any) -> Tensor:
    """The whole forward is one region, as in most training loops."""
    with autocast():
        made = model(batch[0])
    return made.float().square().mean()


CASES: dict[str, Callable[[], Workload]] = {
    **{forward.__name__: partial(make, partial(Net, forward), (6, 8), loss_fn=plain_loss) for forward in FORWARDS},
    "in_both": partial(make, partial(Net, shared), (6, 8), loss_fn=region_loss),
    "tied": partial(make, Tied, (6, 8), loss_fn=region_loss),
    "language": partial(make, Language, (3, 5), loss_fn=region_loss),
    "cells": partial(make, partial(Cells, nn.GRUCell), (4, 2, 8), loss_fn=region_loss),
    "rnn_cells": partial(make, partial(Cells, nn.RNNCell), (4, 2, 8), loss_fn=region_loss),
    "attention": partial(
        make, lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (3, 5, 8), loss_fn=region_loss
    ),
}
for kind, options in {
    "gru": {}, "gru_two": {"num_layers": 2, "dropout": 0.3}, "gru_first": {"batch_first": True}, "rnn": {}, "rnn_relu": {"nonlinearity": "relu"},
    "lstm": {},
}.items():  # fmt: skip
    layer = partial({"gru": nn.GRU, "rnn": nn.RNN, "lstm": nn.LSTM}[kind.partition("_")[0]], 8, 8, **options)
    for calls in (1, 2):
        CASES[f"{kind}_called_{calls}"] = partial(make, partial(Layered, layer, calls), (4, 3, 8), loss_fn=region_loss)
CASES["gru_bidirectional"] = partial(
    make, partial(Layered, partial(nn.GRU, 8, 4, bidirectional=True)), (4, 3, 8), loss_fn=region_loss
)


@pytest.mark.parametrize("name", CASES)
def test_three_steps_end_at_eagers_bits(name: str):
    assert_equals_eager(CASES[name](), CASES[name](), steps=3)
