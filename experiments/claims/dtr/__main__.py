"""DTR: the overhead of four of its models at its budgets.

`python -m experiments.claims.dtr [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload
from experiments.claims.dtr.models import Pair, Recurrent, cifar_resnet, densenet121
from experiments.common.cards import TITAN_V, describe_rates
from experiments.common.paper_frontier import PaperFrontier, SmallRun
from experiments.common.simulated import FrontierPoint, draw_frontiers, image_workload

HERE = Path(__file__).parent
SOURCE = "uwsampl/dtr-prototype, data_files (Kirisame et al. 2021)"
GB = 1e9
BATCH = 2
"""Batch of the measured network."""


@dataclass(frozen=True, slots=True)
class Model:
    """Network of the paper with pairs of (GB, time over plain PyTorch's) at all its budgets."""

    make: Callable[[], Workload]
    label: str
    plain: float
    """GB of plain PyTorch in the data file (`total_mem` of its baseline)."""
    published: tuple[tuple[float, float], ...]


def _make_workload(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Workload:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, _sum_output, optimizer, tuple(torch.randn(shape) for shape in shapes))


def _sum_output(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(*batch).sum()


MODELS = {
    "resnet1202": Model(
        image_workload(partial(cifar_resnet, 1202), 64, 32, 32, momentum=0.9), "ResNet-1202, batch 64, 32 x 32",
        8.91, ((8.0, 1.28), (6.0, 1.35), (4.0, 1.42), (2.0, 1.47)),
    ),
    "densenet121": Model(
        image_workload(densenet121, 84, momentum=0.9), "DenseNet-121, batch 84",
        11.03, ((10.0, 1.16), (8.0, 1.22), (6.0, 1.29), (4.0, 1.52)),
    ),
    "transformer": Model(
        partial(_make_workload, Pair, (512, 10, 512), (20, 10, 512)), "Transformer, batch 10",
        9.87, ((8.0, 1.11), (6.0, 1.14), (4.0, 1.19), (2.0, 1.59)),
    ),
    "lstm": Model(
        partial(_make_workload, partial(Recurrent, 512, 1700), (256, 512, 512)), "LSTM, 256 steps",
        11.12, ((10.0, 1.23), (8.0, 1.25), (6.0, 1.29), (4.0, 1.41)),
    ),
}  # fmt: skip


def claims_of(name: str, points: Sequence[FrontierPoint]) -> list[Claim]:
    """Return plain PyTorch's bytes, and the overhead at each budget's share of them, or the bytes where no plan keeps it."""
    label, theirs, plain = MODELS[name].label, MODELS[name].plain, points[0].peak_bytes / GB
    counted = "its own sizes, float32, SGD with momentum: parameters, momentum, gradients, feature maps"
    about = partial(Claim, source=SOURCE, sense="at most")
    claims = [
        about(
            f"{label}: plain PyTorch", conditions=f"the step as traced: {counted}", unit="GB", published=Figure(theirs),
            ours=Figure(plain), tolerance=0.05, sense="equal",
        )
    ]  # fmt: skip
    for (budget, ratio), point in zip(MODELS[name].published, points[1:], strict=True):
        share = budget / theirs
        how = f"a plan for {share:.1%} of the {plain:.2f} GB as traced: {counted}; {describe_rates(TITAN_V)}, theirs measured on one"
        if point.peak_bytes > share * plain * GB:
            ours = Figure(point.peak_bytes / points[0].peak_bytes)
            claims.append(
                about(f"{label}: share of the bytes", conditions=how, unit="x", published=Figure(share), ours=ours)
            )
            continue
        claim = about(
            f"{label}: overhead at {budget:g} of {theirs:g} GB", conditions=how, unit="%", published=Figure(100 * (ratio - 1)),
            ours=Figure(point.overhead_percent), tolerance=0.1, transferred=True, headline=point is points[-1],
            kind="modelled",
        )  # fmt: skip
        claims.append(claim)
    return claims


def all_claims(points: Mapping[str, Sequence[FrontierPoint]]) -> list[Claim]:
    """Return the claims of every network."""
    return [claim for name in MODELS for claim in claims_of(name, points[name])]


def make_small(batch: int) -> Workload:
    """Make the network that is measured."""
    return image_workload(densenet121, batch, momentum=0.9)()


def small_run() -> SmallRun:
    """Return DenseNet-121 at a small batch, at the paper's smallest budget as a share of plain PyTorch's bytes."""
    model = MODELS["densenet121"]
    budget, ratio = model.published[-1]
    return SmallRun(
        "experiments.claims.dtr.__main__:make_small", {"batch": BATCH}, budget / model.plain,
        Claim(
            f"DenseNet-121, batch {BATCH}: overhead at {budget:g} of {model.plain:g} GB", SOURCE,
            f"their batch is 84, ours {BATCH}, at 224", "%", Figure(100 * (ratio - 1)), None, headline=True,
        ),
    )  # fmt: skip


def draw(measured: Sequence[Claim]) -> None:
    """Draw overhead against our bytes, one network beside the other; DTR's at the same shares."""
    scales = {name: FRONTIER.read_points(name)[0].peak_bytes / GB / model.plain for name, model in MODELS.items()}
    published = {
        name: (model.label, [(budget * scales[name], 100 * (ratio - 1)) for budget, ratio in model.published])
        for name, model in MODELS.items()
    }
    budget = MODELS["densenet121"].published[-1][0] * scales["densenet121"]
    rows = [("densenet121", budget, claim.ours.value) for claim in measured if claim.ours]
    picture = FRONTIER.picture("frontier")
    draw_frontiers(picture, FRONTIER.read_points(), published, GB, by="DTR at the same share", measured=rows)


FRONTIER = PaperFrontier(
    HERE, __doc__, {name: model.make for name, model in MODELS.items()}, TITAN_V,
    lambda name, traced_bytes: [int(budget / MODELS[name].plain * traced_bytes) for budget, _ in MODELS[name].published],
    all_claims, small_run, draw,
)  # fmt: skip
claims = FRONTIER.claims


if __name__ == "__main__":
    FRONTIER.main()
