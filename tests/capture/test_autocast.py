"""Under autocast a captured step casts as often as eager does, and ends at eager's bits under every plan."""

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners import make_plan
from autotune.runtime.op_profiler import profile
from autotune.workloads.workload import Workload
from tests.capture.twins import Beside, Twins, run_beside
from tests.support.eager import assert_equals_eager
from tests.support.kernel_counts import unexplained
from tests.support.kernel_models import Cells
from tests.support.planned import random_plan
from tests.support.small import Tied, make

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


class Pair(nn.Module):
    """A layer whose kernel casts inside, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(8, 8, 8), nn.Linear(8, 4)

    def forward(self, data: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            first = torch.tanh(self.pair(data, data))
        return self.head(self.pair(first, data))


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
    "pair": partial(make, Pair, (6, 8), loss_fn=region_loss),
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
    for calls in (1,) if options else (1, 2):
        CASES[f"{kind}_called_{calls}"] = partial(make, partial(Layered, layer, calls), (4, 3, 8), loss_fn=region_loss)
CASES["gru_bidirectional"] = partial(
    make, partial(Layered, partial(nn.GRU, 8, 4, bidirectional=True)), (4, 3, 8), loss_fn=region_loss
)


@cache
def beside(name: str) -> Beside:
    return run_beside(CASES[name])


@pytest.mark.parametrize("name", CASES, scope="module")
def test_three_steps_end_at_eagers_bits(name: str):
    beside(name).assert_equal()


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name != "checkpointed"],  # what eager runs again is planned
    scope="module",
)
def test_the_kernels_of_a_step_are_eagers(name: str):
    made = beside(name)
    assert made.eager.counts
    assert unexplained(made.eager.counts, made.traced.counts, name) == {}


PLANNED = ("shared", "three_uses", "nested_regions", "checkpointed", "tied", "pair", "gru_called_2", "rnn_called_1")


@pytest.mark.parametrize("name", PLANNED, scope="module")
def test_a_step_that_is_recomputed_ends_at_eagers_bits(name: str):
    twins = beside(name).twins
    twins.assert_equals_eager(
        make_plan(twins.graph, {"recompute": {"planner": "segments"}}, 0, Costs.unit(twins.graph))
    )


@pytest.mark.parametrize("name", PLANNED, scope="module")
def test_a_step_under_random_plans_ends_at_eagers_bits(name: str):
    twins = beside(name).twins
    costs = profile(twins.program)
    for seed in range(2):
        twins.assert_equals_eager(random_plan(twins.graph, costs, random.Random(seed)))


def casts(graph: TrainGraph, name: str) -> int:
    """How often the forward casts a parameter of this name."""
    value = next(value.id for value in graph.values if value.name == name)
    return sum("_to_copy" in op.target and value in op.inputs for op in graph.ops)


def test_a_weight_is_cast_once_in_a_region_for_all_its_readers():
    assert casts(beside("three_uses").twins.graph, "a.weight") == 1
    assert casts(beside("two_regions").twins.graph, "a.weight") == 2


def test_a_weight_is_cast_for_each_reader_where_the_cache_is_off_or_the_user_casts():
    for name in ("without_cache", "explicit_casts"):
        assert casts(beside(name).twins.graph, "a.weight") == 2
    torch.set_autocast_cache_enabled(False)
    try:
        twins = Twins(CASES["shared"])
        assert casts(twins.graph, "a.weight") == 2
        twins.assert_equals_eager()
    finally:
        torch.set_autocast_cache_enabled(True)


def test_a_capture_in_a_region_leaves_no_cast_to_eager():
    """There the end of the step's own region does not empty the cache."""
    net, data = CASES["shared"]().model, torch.ones(2, 8)
    expected = net(data)
    with autocast():
        capture(CASES["shared"]())
        assert torch.equal(net(data), expected)
        assert type(net.a(data)) is Tensor


def test_a_capture_that_fails_leaves_eager_as_it_was():
    before = torch.ones(2, 8), CASES["shared"]().model
    expected = before[1](before[0])

    def broken(model: nn.Module, batch: Any) -> Tensor:
        with autocast():
            model.a(batch[0])
            raise ZeroDivisionError

    with pytest.raises(CaptureError):
        capture(make(partial(Net, shared), (6, 8), loss_fn=broken))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(before[1](before[0]), expected)
    assert_equals_eager(CASES["shared"](), CASES["shared"](), steps=3)


def test_a_bilinear_layer_under_another_dtype_is_another_op():
    def loss(dtype: torch.dtype, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(batch[0]).float().square().mean()

    graphs = [capture(make(Pair, loss_fn=partial(loss, dtype))).graph for dtype in (BF16, BF16, torch.float16)]
    assert graphs[0].digest == graphs[1].digest != graphs[2].digest
    assert sum("trilinear_under_bfloat16" in op.target for op in graphs[0].ops) == 1
