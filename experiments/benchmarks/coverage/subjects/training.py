"""Plain torch: ways to train, such as mixed precision, checkpoints, experts, second models, and optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.benchmarks.coverage.subject import Optimizer, Subject, adamw, sgd
from experiments.benchmarks.coverage.subjects.layers import (
    CLASSES,
    ROWS,
    WIDTH,
    Layers,
    classify,
    labelled,
)


def make_layers(width: int = WIDTH, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES)
    )


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def _under_autocast(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.autocast("cpu", dtype):
        return classify(model, batch)


def _run_mixed(self: Any, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.first(inputs)
        with torch.autocast("cpu", enabled=False):
            hidden = self.middle(hidden.float())
        hidden = self.last(hidden)
    outputs: Tensor = hidden.float()
    return outputs


def _mixed() -> nn.Module:
    return Layers(
        _run_mixed,
        first=nn.Linear(WIDTH, 32),
        middle=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()),
        last=nn.Linear(32, CLASSES),
    )


def _run_dtypes(self: Any, inputs: Tensor) -> Tensor:
    hidden = self.first(inputs.bfloat16()).float()
    hidden = self.middle(hidden.double()).half().float()
    outputs: Tensor = self.last(hidden)
    return outputs


def _dtypes() -> nn.Module:
    return Layers(
        _run_dtypes,
        first=nn.Linear(WIDTH, 32).bfloat16(),
        middle=nn.Linear(32, 32).double(),
        last=nn.Linear(32, CLASSES),
    )


def _run_checkpointed(self: Any, inputs: Tensor) -> Tensor:
    hidden = self.first(inputs)
    for block in self.blocks:
        hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
    outputs: Tensor = self.last(hidden)
    return outputs


def _checkpointed() -> nn.Module:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)
    )
    return Layers(_run_checkpointed, first=nn.Linear(WIDTH, 32), blocks=blocks, last=nn.Linear(32, CLASSES))


def _route_densely(self: Any, inputs: Tensor) -> Tensor:
    weights, chosen = self.router(inputs).softmax(1).topk(2, dim=1)
    gates = torch.zeros(inputs.shape[0], len(self.experts)).scatter(1, chosen, weights)
    outputs: Tensor = torch.stack([expert(inputs) for expert in self.experts], 1).mul(gates[..., None]).sum(1)
    return outputs


def _route_by_index(self: Any, inputs: Tensor) -> Tensor:
    weights, chosen = self.router(inputs).softmax(1).max(1)
    outputs = torch.zeros(inputs.shape[0], CLASSES)
    for number, expert in enumerate(self.experts):
        (rows,) = torch.where(chosen == number)
        outputs = outputs.index_add(0, rows, expert(inputs[rows]) * weights[rows, None])
    return outputs


def _experts(route: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Layers(route, router=nn.Linear(WIDTH, 4), experts=nn.ModuleList(make_layers(dropout=0.0) for _ in range(4)))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.scale = scale
        return (inputs * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (inputs,) = ctx.saved_tensors
        return gradients[0] * (inputs.abs() < 2), None


def _custom() -> nn.Module:
    return Layers(
        lambda self, inputs: self.last(_Round.apply(self.first(inputs), 8.0)),
        first=nn.Linear(WIDTH, 32),
        last=nn.Linear(32, CLASSES),
    )


def _frozen() -> nn.Module:
    model = make_layers()
    model[0].requires_grad_(False)
    return model


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.weight = self.first.weight
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.last(self.first(self.entry(inputs)).relu()))
        return outputs


def _twice(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with two groups of parameters, of which one has another rate."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        both = list(parameters)
        made = optimizer(both[:2])
        made.add_param_group({"params": both[2:], "lr": 1e-4, "weight_decay": 0.0})
        return made

    return make


def _subject(name: str, what: str, make: Callable[[], nn.Module], draw: Any = None, loss: Any = classify, *, optimizer: Optimizer = adamw, follows_data: bool = False) -> Subject:  # fmt: skip
    return Subject(name, what, make, draw or labelled(ROWS, WIDTH), loss, optimizer, follows_data=follows_data)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    made: torch.optim.Optimizer = Adafactor(list(parameters))
    return made


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": partial(torch.optim.Adam, lr=1e-3, amsgrad=True, weight_decay=0.01),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "adafactor_transformers": _adafactor,
    "groups": _twice(partial(torch.optim.AdamW, lr=1e-3)),
}
"""Optimizers of the MLP."""

SUBJECTS: tuple[Subject, ...] = (
    _subject("autocast_bfloat16", "autocast to bfloat16 in the loss", make_layers, loss=_under_autocast),
    _subject("autocast_float16", "autocast to float16 in the loss", make_layers, loss=partial(_under_autocast, dtype=torch.float16)),
    _subject("autocast_batch_norm", "autocast to bfloat16 with batch norms", _images, labelled(ROWS, 3, 8, 8), _under_autocast, optimizer=sgd),
    _subject("autocast_nested", "autocast in the forward, off for one layer", _mixed),
    _subject("bfloat16", "weights in bfloat16", lambda: make_layers().bfloat16(), lambda g: (torch.randn(ROWS, WIDTH, generator=g).bfloat16(), torch.randint(CLASSES, (ROWS,), generator=g))),
    _subject("dtypes", "layers in bfloat16, float32 and float64", _dtypes),
    _subject("checkpoints", "gradient checkpoints with dropout inside", _checkpointed),
    _subject("experts_dense", "experts, each run on every row", partial(_experts, _route_densely)),
    _subject("experts_by_index", "experts, each run on its rows", partial(_experts, _route_by_index), follows_data=True),
    _subject("autograd_function", "custom autograd function", _custom),
    _subject("frozen", "frozen first layer", _frozen),
    _subject("tied", "two layers with one weight", _Tied),
    _subject("channels_last", "convolutions in channels_last", lambda: _images().to(memory_format=torch.channels_last), labelled(ROWS, 3, 8, 8)),
    *(_subject(f"optimizer_{name}", f"MLP with {name}", make_layers, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()),
)  # fmt: skip
