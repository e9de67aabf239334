"""Chen et al. 2016: bytes that grow slower than depth, up to 1,001 layers; and pytorch-memonger's ResNet-152.

`python experiments/sublinear/run.py [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from autotune.ir.check import check
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS
from autotune.planners.recompute.segments import Segments
from autotune.predict.simulate import simulate
from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured import claim_of, measured, run
from simulated import Made, captured, classified, overhead, picture, planned, read_rows, traced, write_rows

HERE = Path(__file__).parent
POINTS = HERE / "results" / "points.csv"
CHEN = "Chen et al. 2016, abstract"
MEMONGER = "Lyken17/pytorch-memonger, README"
BATCH = 32
STAGES = {101: (2, 6, 23, 2), 200: (4, 11, 47, 4), 401: (8, 21, 96, 8), 1001: (20, 53, 240, 20)}
"""Bottlenecks of each stage by layers, shared out as in ResNet-152."""
SHARE = 7 / 48
"""Of the bytes, that the paper's 1,000 layers are left."""
RESNET152 = (3, 8, 36, 3)
SHRUNK = 2455 / 5459
"""Of the bytes, that pytorch-memonger leaves ResNet-152."""
MEASURED_BATCH = 4
SLOWER = 100 * (2.9258 / 2.6273 - 1)
"""Percent that pytorch-memonger's step takes longer, from its steps per second."""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of one net."""

    layers: int
    plan: str
    peak_bytes: int
    mean_bytes: int
    static_bytes: int
    overhead_percent: float


def resnet(stages: tuple[int, ...]) -> nn.Module:
    """Of bottlenecks, so many in each stage."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [256, 512, 1024, 2048]
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=64, hidden_sizes=sizes, depths=list(stages), layer_type="bottleneck", num_labels=1000
        )
    )


def net(stages: tuple[int, ...], batch: int) -> Made:
    """Its training step at 224."""
    return captured(classified(partial(resnet, stages), batch), f"resnet{2 + 3 * sum(stages)}")


def small(batch: int) -> Workload:
    """The net that is measured."""
    return classified(partial(resnet, RESNET152), batch)()


def grown(layers: int) -> list[Point]:
    """As traced, in the square root of its layers of pieces, and by our planners in as few bytes as those and as the paper."""
    graph, costs = net(STAGES[layers], BATCH)
    before = traced(graph, costs)
    plan = KINDS["update"]["with_gradient"]().plan(graph, Plan.traced(graph), 0, costs)
    pieces = Segments(math.isqrt(layers)).plan(graph, plan, 0, costs)
    check(graph, pieces)
    made = {
        "as traced": before,
        "segments": simulate(graph, lower(graph, pieces), costs),
        "ours": planned(graph, costs, int(SHARE * before.peak_bytes))[1],
    }
    return [
        Point(layers, name, seen.peak_bytes, seen.mean_bytes, graph.static_bytes, overhead(seen, costs))
        for name, seen in made.items()
    ]


def memonger() -> tuple[float, float, float]:
    """ResNet-152 at batch 16: MiB as traced and under a plan for the same part of that, and its overhead in percent."""
    graph, costs = net(RESNET152, 16)
    before = traced(graph, costs)
    after = planned(graph, costs, int(SHRUNK * before.peak_bytes))[1]
    return before.peak_bytes / 2**20, after.peak_bytes / 2**20, overhead(after, costs)


def slope(found: Sequence[Point], plan: str) -> float:
    """Exponent of the bytes beside the static ones in the layers, fitted to all depths."""
    points = [point for point in found if point.plan == plan]
    xs = [math.log(point.layers) for point in points]
    ys = [math.log(point.peak_bytes - point.static_bytes) for point in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def claims_of(found: Sequence[Point], small: tuple[float, float, float]) -> list[Claim]:
    """Everything; `small` as `memonger` gives it."""
    at = {(point.layers, point.plan): point for point in found}
    deepest = max(STAGES)
    size = f"ResNets of bottlenecks at 224, batch {BATCH}, float32, SGD; the abstract names neither blocks nor batch"
    fitted = (
        f"{size}; {min(STAGES)} to {deepest} layers, parameters not counted; as traced {slope(found, 'as traced'):.2f}"
    )
    about = partial(Claim, source=CHEN, tolerance=0.1, sense="at most")
    made = [
        about(
            "bytes grow with depth to the power of", conditions=fitted, unit="", published=Figure(0.5),
            ours=Figure(slope(found, "segments")), headline=True,
        )
    ]  # fmt: skip
    before = at[deepest, "as traced"].peak_bytes / 1e9
    for plan, words in (("segments", f"{math.isqrt(deepest)} segments"), ("ours", "our planners")):
        point = at[deepest, plan]
        about = partial(about, conditions=f"{size}; time by modelled costs", headline=plan == "ours")
        bytes_of = Figure(point.peak_bytes / 1e9, before)
        made.append(about(f"1,001 layers, {words}: bytes", unit="GB", published=Figure(7, 48), ours=bytes_of))
        slower = Figure(point.overhead_percent)
        made.append(
            about(
                f"1,001 layers, {words}: overhead",
                unit="%",
                published=Figure(30),
                ours=slower,
                transferred=True,
                kind="modelled",
            )
        )
    how = "ResNet-152 at 224: parameters, gradients, feature maps, not the GPU's context nor what its allocator keeps; time modelled"
    about = partial(about, source=MEMONGER, conditions=how, headline=True)
    net = "ResNet-152, batch 16"
    return [
        *made,
        about(f"{net}: bytes", unit="MiB", published=Figure(2455, 5459), ours=Figure(small[1], small[0])),
        about(
            f"{net}: overhead",
            unit="%",
            published=Figure(SLOWER),
            ours=Figure(small[2]),
            transferred=True,
            kind="modelled",
        ),
    ]


def claims() -> list[Claim]:
    """Everything that is simulated, made anew."""
    return claims_of([point for layers in STAGES for point in grown(layers)], memonger())


def measured_claims() -> list[Claim]:
    """pytorch-memonger's overhead at its own share of the bytes, as far as this machine goes."""
    return [
        claim_of(
            Claim(
                f"ResNet-152, batch {MEASURED_BATCH}: overhead at 2455 of 5459 MiB", MEMONGER,
                f"their batch is 16, ours {MEASURED_BATCH}, at 224, SGD without state", "%", Figure(SLOWER), None,
                headline=True,
            ),
            measured(f"{HERE / 'run.py'}:small", {"batch": MEASURED_BATCH}, SHRUNK),
        )
    ]  # fmt: skip


def simulated() -> list[Claim]:
    """What is simulated, and the points behind it."""
    found = [point for layers in STAGES for point in grown(layers)]
    write_rows(POINTS, found)
    return claims_of(found, memonger())


def draw(seen: Sequence[Claim]) -> None:
    """Bytes and overhead against layers."""
    found = read_rows(POINTS, Point)
    with picture(HERE / "results" / "depth.png", 2) as (left, right):
        for plan in dict.fromkeys(point.plan for point in found):
            points = [point for point in found if point.plan == plan]
            xs = [point.layers for point in points]
            left.plot(xs, [point.peak_bytes / 1e9 for point in points], "o-", label=plan)
            right.plot(xs, [point.overhead_percent for point in points], "o-", label=plan)
        right.plot([152], [SLOWER], "kx", label="pytorch-memonger, measured")
        for claim in seen:
            if claim.ours:
                right.plot(
                    [152], [claim.ours.value], "r*", markersize=12, label=f"ours, batch {MEASURED_BATCH}, measured"
                )
        left.set(xscale="log", yscale="log", xlabel="layers", ylabel="peak, GB", title=f"ResNets at 224, batch {BATCH}")
        right.set(xlabel="layers", ylabel="overhead, %, modelled where not measured")
        left.legend()
        right.legend()


if __name__ == "__main__":
    run(HERE, __doc__, simulated, measured_claims, draw)
