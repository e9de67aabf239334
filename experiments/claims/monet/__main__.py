"""MONeT's table: five networks at its batches, the bytes of plain PyTorch, and the overhead at its budgets.

`python -m experiments.claims.monet [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.claims.monet.models import GoogLeNet, UNet, mobilenet_v2, vgg16
from experiments.common.cards import TESLA_P100, describe_rates
from experiments.common.paper_frontier import PaperFrontier, SmallRun
from experiments.common.simulated import FrontierPoint, draw_frontiers, image_workload

HERE = Path(__file__).parent
SOURCE = "utsaslab/MONeT, README (Shah et al. 2021)"
GIB = 2**30
BATCH = 4
"""Batch of the measured network."""


@dataclass(frozen=True, slots=True)
class Model:
    """Network of the paper: plain PyTorch's GB, then pairs of (GB, overhead in percent) of its schedules."""

    make: Callable[[], Workload]
    label: str
    plain: float
    published: tuple[tuple[float, float], ...]


def _resnet50() -> torch.nn.Module:
    return ZOO["resnet50"](batch=1).model


MODELS = {
    "resnet50": Model(
        image_workload(_resnet50, 184), "ResNet-50, batch 184", 15.06,
        ((10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95)),
    ),
    "googlenet": Model(
        image_workload(GoogLeNet, 320), "GoogLeNet, batch 320", 14.93,
        ((9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77)),
    ),
    "unet": Model(
        image_workload(UNet, 11, 416, 608), "UNet, batch 11", 14.32,
        ((10.01, -4.10), (9.01, -2.07), (8.02, -0.09), (7.00, 1.39), (6.01, 4.95), (5.01, 11.51)),
    ),
    "mobilenet_v2": Model(
        image_workload(mobilenet_v2, 272), "MobileNet-V2, batch 272", 14.46,
        ((10.02, 2.40), (9.01, 3.10), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72)),
    ),
    "vgg16": Model(
        image_workload(vgg16, 176), "VGG-16, batch 176", 14.12,
        ((9.71, -5.30), (8.66, -4.64), (7.88, -2.18), (6.82, 1.99), (5.90, 5.44), (5.51, 9.11)),
    ),
}  # fmt: skip
CLAIMED = (2, 5)
"""Indices of the schedules that are claims: the one near 8 GB and the smallest. `points.csv` has all."""
FASTER = "its kernels make the step faster than plain PyTorch; modelled costs know one kernel for each op"


def claims_of(name: str, points: Sequence[FrontierPoint]) -> list[Claim]:
    """Return plain PyTorch's bytes and the overhead at two budgets, or the smallest bytes where no plan fits a budget."""
    label, plain = MODELS[name].label, Figure(MODELS[name].plain)
    counted = "parameters, gradients and feature maps at full size, in GiB; no workspaces of cuDNN, no optimizer state"
    about = partial(Claim, source=SOURCE, unit="GB", headline=name == "resnet50")
    ours = Figure(points[0].peak_bytes / GIB)
    as_traced = f"the step as traced: {counted}"
    if name == "mobilenet_v2":
        as_traced += (
            "; the gradient of ReLU6 reads its result, as PyTorch's did in place then; today's keeps its input, too"
        )
    claims = [about(f"{label}: plain PyTorch", conditions=as_traced, published=plain, ours=ours, tolerance=0.05)]
    how = (
        f"all planners but offload: {counted}; {describe_rates(TESLA_P100)}, theirs measured on a GPU that is not named"
    )
    about = partial(about, conditions=how, sense="at most")
    for schedule in CLAIMED:
        (budget, theirs), point = MODELS[name].published[schedule], points[1 + schedule]
        if point.peak_bytes > budget * GIB:
            claims.append(about(f"{label}: bytes", published=Figure(budget), ours=Figure(point.peak_bytes / GIB)))
            continue
        claim = about(
            f"{label}: overhead at {budget:.2f} GB", unit="%", published=Figure(theirs),
            ours=Figure(point.overhead_percent), tolerance=0.1, transferred=True, why_not=FASTER if theirs < 0 else "",
            kind="modelled",
        )  # fmt: skip
        claims.append(claim)
    return claims


def all_claims(points: Mapping[str, Sequence[FrontierPoint]]) -> list[Claim]:
    """Return the claims of every network."""
    return [claim for name in MODELS for claim in claims_of(name, points[name])]


def make_small(batch: int) -> Workload:
    """Make the network that is measured."""
    return image_workload(_resnet50, batch)()


def small_run() -> SmallRun:
    """Return ResNet-50 at a small batch, at the paper's share of plain PyTorch's bytes."""
    model = MODELS["resnet50"]
    budget, percent = model.published[CLAIMED[0]]
    return SmallRun(
        "experiments.claims.monet.__main__:make_small", {"batch": BATCH}, budget / model.plain,
        Claim(
            f"ResNet-50, batch {BATCH}: overhead at {budget:.2f} of {model.plain} GB", SOURCE,
            f"their batch is 184, ours {BATCH}, at 224, SGD without state", "%", Figure(percent), None, headline=True,
        ),
    )  # fmt: skip


def draw(measured: Sequence[Claim]) -> None:
    """Draw overhead against bytes, one network beside the other."""
    published = {name: (model.label, ((model.plain, 0.0), *model.published)) for name, model in MODELS.items()}
    budget = MODELS["resnet50"].published[CLAIMED[0]][0]
    rows = [("resnet50", budget, claim.ours.value) for claim in measured if claim.ours]
    draw_frontiers(FRONTIER.picture("frontier"), FRONTIER.read_points(), published, GIB, by="MONeT", measured=rows)


FRONTIER = PaperFrontier(
    HERE, __doc__, {name: model.make for name, model in MODELS.items()}, TESLA_P100,
    lambda name, _: [int(budget * GIB) for budget, _ in MODELS[name].published], all_claims, small_run, draw,
)  # fmt: skip
claims = FRONTIER.claims


if __name__ == "__main__":
    FRONTIER.main()
