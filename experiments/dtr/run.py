"""DTR: the overhead of four of its models at its budgets.

`python experiments/dtr/run.py [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from models import Pair, Recurrent, cifar_resnet, densenet121
from torch import nn

from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured import claim_of, measured, run
from simulated import Point, classified, draw_frontiers, frontier, read_rows, write_rows

HERE = Path(__file__).parent
SOURCE = "uwsampl/dtr-prototype, data_files (Kirisame et al. 2021)"
POINTS = HERE / "results" / "points.csv"
GB = 1e9
BATCH = 2
"""Of what is measured."""


@dataclass(frozen=True, slots=True)
class Model:
    """One of its networks with (GB, seconds over plain PyTorch's) at its budgets."""

    make: Callable[[], Workload]
    label: str
    published: tuple[tuple[float, float], ...]


def _trained(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Workload:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, _sum, optimizer, tuple(torch.randn(shape) for shape in shapes))


def _sum(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(*batch).sum()


MODELS = {
    "resnet1202": Model(
        classified(partial(cifar_resnet, 1202), 64, 32, 32, momentum=0.9), "ResNet-1202, batch 64, 32 x 32",
        ((6.0, 1.35), (4.0, 1.42), (2.0, 1.47)),
    ),
    "densenet121": Model(
        classified(densenet121, 84, momentum=0.9), "DenseNet-121, batch 84", ((8.0, 1.22), (4.0, 1.52))
    ),
    "transformer": Model(
        partial(_trained, Pair, (512, 10, 512), (20, 10, 512)), "Transformer, batch 10", ((4.0, 1.19), (2.0, 1.59))
    ),
    "lstm": Model(
        partial(_trained, partial(Recurrent, 512, 1700), (256, 512, 512)), "LSTM, 256 steps", ((6.0, 1.29), (4.0, 1.41))
    ),
}  # fmt: skip


def points(name: str) -> list[Point]:
    """The traced step, then a plan for each published budget."""
    return frontier(MODELS[name].make, name, lambda _: [int(budget * GB) for budget, _ in MODELS[name].published])


def claims_of(name: str, found: Sequence[Point]) -> list[Claim]:
    """The overhead at its budgets; where no plan of ours keeps one, the bytes of the smallest."""
    label, plain = MODELS[name].label, found[0].peak_bytes / GB
    how = (
        "its own sizes and budgets, float32, SGD with momentum: parameters, momentum, gradients, feature maps, "
        f"{plain:.2f} GB as traced; time by modelled costs, theirs measured on a GPU"
    )
    about = partial(Claim, source=SOURCE, conditions=how, sense="at most")
    made = []
    for (budget, ratio), point in zip(MODELS[name].published, found[1:], strict=True):
        if point.peak_bytes > budget * GB:
            ours = Figure(point.peak_bytes / GB)
            made.append(about(f"{label}: bytes", unit="GB", published=Figure(budget), ours=ours))
            continue
        why = f"our traced step takes {plain:.2f} GB: next to nothing is to be done" if plain <= 1.05 * budget else ""
        claim = about(
            f"{label}: overhead at {budget:g} GB", unit="%", published=Figure(100 * (ratio - 1)),
            ours=Figure(point.overhead_percent), tolerance=0.1, transferred=True, why_not=why, headline=point is found[-1],
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
    return classified(densenet121, batch, momentum=0.9)()


def measured_claims() -> list[Claim]:
    """The overhead at the share of the bytes that the smaller budget is of the step as traced at its own batch."""
    budget, ratio = MODELS["densenet121"].published[-1]
    plain = next(point.peak_bytes for point in read_rows(POINTS, Point) if point.net == "densenet121") / GB
    return [
        claim_of(
            Claim(
                f"DenseNet-121, batch {BATCH}: overhead at {budget:g} of {plain:.2f} GB", SOURCE,
                f"its batch is 84, ours {BATCH}, at 224; the bytes without its evictions are ours, simulated at 84", "%",
                Figure(100 * (ratio - 1)), None, headline=True,
            ),
            measured(f"{HERE / 'run.py'}:small", {"batch": BATCH}, budget / plain),
        )
    ]  # fmt: skip


def simulate() -> list[Claim]:
    """What is simulated, and the points behind it."""
    write_rows(POINTS, found := every())
    return all_claims(found)


def draw(seen: Sequence[Claim]) -> None:
    """Overhead against bytes, a net beside the other."""
    theirs = {
        name: (model.label, [(budget, 100 * (ratio - 1)) for budget, ratio in model.published])
        for name, model in MODELS.items()
    }
    budget = MODELS["densenet121"].published[-1][0]
    ours = [("densenet121", budget, claim.ours.value) for claim in seen if claim.ours]
    draw_frontiers(HERE / "results" / "frontier.png", read_rows(POINTS, Point), theirs, GB, by="DTR", seen=ours)


if __name__ == "__main__":
    run(HERE, __doc__, simulate, measured_claims, draw)
