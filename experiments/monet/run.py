"""MONeT's table: five networks at its batches, the bytes of plain PyTorch, and the overhead at its budgets.

`python experiments/monet/run.py [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from models import GoogLeNet, UNet, mobilenet_v2, vgg16

from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured import claim_of, measured, run
from simulated import Point, classified, draw_frontiers, frontier, read_rows, write_rows

HERE = Path(__file__).parent
SOURCE = "utsaslab/MONeT, README (Shah et al. 2021)"
POINTS = HERE / "results" / "points.csv"
GIB = 2**30
BATCH = 4
"""Of what is measured."""


@dataclass(frozen=True, slots=True)
class Model:
    """One of its networks: plain PyTorch's GB, then (GB, overhead in percent) of its schedules."""

    make: Callable[[], Workload]
    label: str
    plain: float
    published: tuple[tuple[float, float], ...]


def _resnet50() -> torch.nn.Module:
    return ZOO["resnet50"](batch=1).model


MODELS = {
    "resnet50": Model(
        classified(_resnet50, 184), "ResNet-50, batch 184", 15.06,
        ((10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95)),
    ),
    "googlenet": Model(
        classified(GoogLeNet, 320), "GoogLeNet, batch 320", 14.93,
        ((9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77)),
    ),
    "unet": Model(
        classified(UNet, 11, 416, 608), "UNet, batch 11", 14.32,
        ((10.01, -4.10), (9.01, -2.07), (8.02, -0.09), (7.00, 1.39), (6.01, 4.95), (5.01, 11.51)),
    ),
    "mobilenet_v2": Model(
        classified(mobilenet_v2, 272), "MobileNet-V2, batch 272", 14.46,
        ((10.02, 2.40), (9.01, 3.10), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72)),
    ),
    "vgg16": Model(
        classified(vgg16, 176), "VGG-16, batch 176", 14.12,
        ((9.71, -5.30), (8.66, -4.64), (7.88, -2.18), (6.82, 1.99), (5.90, 5.44), (5.51, 9.11)),
    ),
}  # fmt: skip
CLAIMED = (2, 5)
"""Of each model's schedules, which are claims of their own: the one near 8 GB and the smallest; all are in `points.csv`."""
FASTER = "its kernels make the step faster than plain PyTorch; modelled costs know one kernel for each op"


def points(name: str) -> list[Point]:
    """The traced step, then a plan for each published budget."""
    return frontier(MODELS[name].make, name, lambda _: [int(budget * GIB) for budget, _ in MODELS[name].published])


def claims_of(name: str, found: Sequence[Point]) -> list[Claim]:
    """Plain PyTorch's bytes, and the overhead at two of its budgets; where no plan of ours keeps one, the bytes of the smallest."""
    label, plain = MODELS[name].label, Figure(MODELS[name].plain)
    counted = "parameters, gradients and feature maps at full size, in GiB; no workspaces of cuDNN, no optimizer state"
    about = partial(Claim, source=SOURCE, unit="GB", headline=name == "resnet50")
    ours = Figure(found[0].peak_bytes / GIB)
    as_traced = f"the step as traced: {counted}"
    if name == "mobilenet_v2":
        as_traced += (
            "; the gradient of ReLU6 reads its result, as PyTorch's did in place then; today's keeps its input, too"
        )
    made = [about(f"{label}: plain PyTorch", conditions=as_traced, published=plain, ours=ours, tolerance=0.05)]
    how = f"all planners but offload: {counted}; time by modelled costs, theirs measured on a GPU"
    about = partial(about, conditions=how, sense="at most")
    for at in CLAIMED:
        (budget, theirs), point = MODELS[name].published[at], found[1 + at]
        if point.peak_bytes > budget * GIB:
            made.append(about(f"{label}: bytes", published=Figure(budget), ours=Figure(point.peak_bytes / GIB)))
            continue
        claim = about(
            f"{label}: overhead at {budget:.2f} GB", unit="%", published=Figure(theirs),
            ours=Figure(point.overhead_percent), tolerance=0.1, transferred=True, why_not=FASTER if theirs < 0 else "",
            kind="modelled",
        )  # fmt: skip
        made.append(claim)
    return made


def every() -> list[Point]:
    """Every net at every budget."""
    return [point for name in MODELS for point in points(name)]


def all_claims(found: Sequence[Point]) -> list[Claim]:
    """Of every net."""
    return [claim for name in MODELS for claim in claims_of(name, [point for point in found if point.net == name])]


def claims() -> list[Claim]:
    """Everything that is simulated, made anew."""
    return all_claims(every())


def small(batch: int) -> Workload:
    """The net that is measured."""
    return classified(_resnet50, batch)()


def measured_claims() -> list[Claim]:
    """The overhead at the same share of the bytes, as far as this machine goes."""
    model = MODELS["resnet50"]
    budget, theirs = model.published[CLAIMED[0]]
    return [
        claim_of(
            Claim(
                f"ResNet-50, batch {BATCH}: overhead at {budget:.2f} of {model.plain} GB", SOURCE,
                f"their batch is 184, ours {BATCH}, at 224, SGD without state", "%", Figure(theirs), None, headline=True,
            ),
            measured(f"{HERE / 'run.py'}:small", {"batch": BATCH}, budget / model.plain),
        )
    ]  # fmt: skip


def simulate() -> list[Claim]:
    """The same, and the points behind it."""
    write_rows(POINTS, found := every())
    return all_claims(found)


def draw(seen: Sequence[Claim]) -> None:
    """Overhead against bytes, a net beside the other."""
    theirs = {name: (model.label, ((model.plain, 0.0), *model.published)) for name, model in MODELS.items()}
    budget = MODELS["resnet50"].published[CLAIMED[0]][0]
    ours = [("resnet50", budget, claim.ours.value) for claim in seen if claim.ours]
    draw_frontiers(HERE / "results" / "frontier.png", read_rows(POINTS, Point), theirs, GIB, by="MONeT", seen=ours)


if __name__ == "__main__":
    run(HERE, __doc__, simulate, measured_claims, draw)
