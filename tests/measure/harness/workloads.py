"""Tiny workloads, one of them with a switch that makes its next step go wrong."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from autotune import Workload

# many processes at once on few cores: threads that wait for each other would take many times as long
torch.set_num_threads(1)


def wide(batch: int = 1 << 17, width: int = 16, depth: int = 8) -> Workload:
    """At the default batch each layer keeps 8 MiB for its backward; its weights are next to nothing."""
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())]
    layers += [nn.BatchNorm1d(width), nn.Dropout(0.1)]
    return _trained(nn.Sequential(*layers), batch, width)


def fixed() -> Workload:
    """Like `wide` at a small batch that nobody can make smaller."""
    return wide(batch=64)


def convolutions(batch: int = 4, flat: bool = False) -> Workload:
    """Images through two convolutions; `flat`: no weight of four dimensions at all."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 14 * 14, 4)) if not flat else nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, *((16,) if flat else (3, 16, 16)))
    return Workload(model, lambda model, images: model(images).square().mean(), optimizer, images)


def distilled(width: int = 16) -> Workload:
    """A student whose loss is a module with state of its own."""
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, Distillation(width), optimizer, torch.randn(64, width))


class Distillation(nn.Module):
    """A loss with a frozen teacher, a trained scale, and a moving center of the teacher's outputs, which it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.teacher = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("center", torch.zeros(width))

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(batch)
            target = taught - self.center
            self.center.mul_(0.9).add_(taught.mean(0), alpha=0.1)
        return (model(batch) * self.scale - target).square().mean()


def switched(switch: str) -> Workload:
    """The step that finds a word in the file `switch` removes the file and does what the word says."""
    return _trained(nn.Sequential(nn.Linear(32, 32), _Trip(switch), nn.Linear(32, 32)), 4, 32)


def sliced(rows: int = 64) -> Workload:
    """Like `wide`, with a batch that is a slice of a data set of so many rows."""
    workload = wide(batch=8)
    workload.batch = tuple(part.repeat(rows // 8, *[1] * (part.ndim - 1))[8:16] for part in workload.batch)
    return workload


def bags() -> Workload:
    """Bags of different sizes, whose offsets begin at 0."""
    model = nn.EmbeddingBag(16, 4)
    batch = (torch.arange(9) + 1, torch.tensor([0, 2, 3, 7]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(model, lambda model, batch: model(*batch).square().mean(), optimizer, batch)


def lazy() -> Workload:
    """A layer whose weight has no shape before the first step."""
    return _trained(nn.Sequential(nn.LazyLinear(4)), 2, 4)


def tells_threads() -> Workload:
    """No workload, but what a child's environment says of threads."""
    print("about to fail")
    raise ValueError(f"OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS')}")


def refuses_backward() -> Workload:
    """A step whose loss raises."""

    def refuses_backward(model: nn.Module, batch: object) -> torch.Tensor:
        raise ValueError("no loss today")

    model = nn.Linear(4, 4)
    return Workload(model, refuses_backward, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(2, 4))


def misreturns(kind: str) -> Workload:
    """A step whose loss function returns no loss."""
    losses = {
        "nothing": lambda model, batch: None,
        "dict": lambda model, batch: {"loss": model(batch).mean()},
        "number": lambda model, batch: model(batch).mean().item(),
        "extras first": lambda model, batch: ("extra", model(batch).mean()),
        "vector": lambda model, batch: model(batch).mean(1),
        "constant": lambda model, batch: model(batch).mean().detach(),
    }
    model = nn.Linear(4, 4)
    return Workload(model, losses[kind], torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(2, 4))


def _trained(model: nn.Module, batch: int, width: int) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = (torch.randn(batch, width), torch.randn(batch, width))
    return Workload(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), optimizer, data)


class _Trip(nn.Module):
    def __init__(self, switch: str) -> None:
        super().__init__()
        self.switch = switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.autotune_tests.trip(x, self.switch)


@torch.library.custom_op("autotune_tests::trip", mutates_args=())
def trip(x: torch.Tensor, switch: str) -> torch.Tensor:
    file = Path(switch)
    word = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    print("tripping", word)  # a model may print: nothing must take it for an answer
    match word:
        case "raise":
            raise ValueError("the loss went through the roof")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "wrong":
            return x * 1.25
    return x.clone()


@trip.register_fake
def _(x: torch.Tensor, switch: str) -> torch.Tensor:
    return torch.empty_like(x)


trip.register_autograd(lambda ctx, gradient: (gradient, None))
