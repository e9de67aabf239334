"""Chen et al. 2016: bytes that grow slower than depth, up to 1,001 layers; and pytorch-memonger's ResNet-152.

`python -m experiments.claims.sublinear [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

import math
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
from experiments.common.cards import TITAN_X, describe_rates
from experiments.common.measured import build_measured_claim, measure_plan, run_parts
from experiments.common.simulated import (
    GraphAndCosts,
    capture_step,
    image_workload,
    open_figure,
    overhead_percent,
    plan_for_budget,
    read_rows,
    simulate_traced,
    write_rows,
)

HERE = Path(__file__).parent
POINTS = HERE / "results" / "points.csv"
CHEN = "Chen et al. 2016, abstract"
MEMONGER = "Lyken17/pytorch-memonger, README"
BATCH = 32
STAGES = {101: (2, 6, 23, 2), 200: (4, 11, 47, 4), 401: (8, 21, 96, 8), 1001: (20, 53, 240, 20)}
"""Bottlenecks of each stage by number of layers, distributed as in ResNet-152."""
SHARE = 7 / 48
"""Share of the bytes that the paper's 1,000 layers need."""
RESNET152 = (3, 8, 36, 3)
SHRUNK = 2455 / 5459
"""Share of the bytes that pytorch-memonger leaves ResNet-152."""
MEASURED_BATCH = 4
SLOWER = 100 * (2.9258 / 2.6273 - 1)
"""Overhead of pytorch-memonger's step in percent, from its steps per second."""


@dataclass(frozen=True, slots=True)
class DepthPoint:
    """Plan of a network with this number of layers."""

    layers: int
    plan: str
    peak_bytes: int
    mean_bytes: int
    static_bytes: int
    overhead_percent: float


def make_resnet(stages: tuple[int, ...]) -> nn.Module:
    """Make a ResNet of bottlenecks with this number of blocks in each stage."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [256, 512, 1024, 2048]
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=64, hidden_sizes=sizes, depths=list(stages), layer_type="bottleneck", num_labels=1000
        )
    )


def capture_resnet(stages: tuple[int, ...], batch: int) -> GraphAndCosts:
    """Capture the training step of a ResNet on images of 224."""
    return capture_step(image_workload(partial(make_resnet, stages), batch), f"resnet{2 + 3 * sum(stages)}", TITAN_X)


def make_small(batch: int) -> Workload:
    """Make the network that is measured."""
    return image_workload(partial(make_resnet, RESNET152), batch)()


def depth_points(layers: int) -> list[DepthPoint]:
    """Return three plans: as traced, in about the square root of the layers of segments, and by our planners."""
    graph, costs = capture_resnet(STAGES[layers], BATCH)
    baseline = simulate_traced(graph, costs)
    plan = KINDS["update"]["with_gradient"]().plan(graph, Plan.traced(graph), 0, costs)
    pieces = Segments(math.isqrt(layers)).plan(graph, plan, 0, costs)
    check(graph, pieces)
    estimates = {
        "as traced": baseline,
        "segments": simulate(graph, lower(graph, pieces), costs),
        "ours": plan_for_budget(graph, costs, int(SHARE * baseline.peak_bytes))[1],
    }
    return [
        DepthPoint(
            layers,
            name,
            estimate.peak_bytes,
            estimate.mean_bytes,
            graph.static_bytes,
            overhead_percent(estimate, costs),
        )
        for name, estimate in estimates.items()
    ]


def memonger_resnet152() -> tuple[float, float, float]:
    """Return ResNet-152 at batch 16: MiB as traced and planned for the published share, and overhead in percent."""
    graph, costs = capture_resnet(RESNET152, 16)
    baseline = simulate_traced(graph, costs)
    planned = plan_for_budget(graph, costs, int(SHRUNK * baseline.peak_bytes))[1]
    return baseline.peak_bytes / 2**20, planned.peak_bytes / 2**20, overhead_percent(planned, costs)


def fit_exponent(points: Sequence[DepthPoint], plan: str) -> float:
    """Fit the exponent of the bytes beside the static ones in the number of layers, over all depths."""
    of_plan = [point for point in points if point.plan == plan]
    xs = [math.log(point.layers) for point in of_plan]
    ys = [math.log(point.peak_bytes - point.static_bytes) for point in of_plan]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def claims_of(points: Sequence[DepthPoint], resnet152: tuple[float, float, float]) -> list[Claim]:
    """Return all simulated claims; `resnet152` is the result of `memonger_resnet152`."""
    by_plan = {(point.layers, point.plan): point for point in points}
    deepest = max(STAGES)
    size = f"ResNets of bottlenecks at 224, batch {BATCH}, float32, SGD; the abstract names neither blocks nor batch"
    fitted = f"{size}; {min(STAGES)} to {deepest} layers, parameters not counted; as traced {fit_exponent(points, 'as traced'):.2f}"
    about = partial(Claim, source=CHEN, tolerance=0.1, sense="at most")
    claims = [
        about(
            "bytes grow with depth to the power of", conditions=fitted, unit="", published=Figure(0.5),
            ours=Figure(fit_exponent(points, "segments")), headline=True,
        )
    ]  # fmt: skip
    before = by_plan[deepest, "as traced"].peak_bytes / 1e9
    for plan, label in (("segments", f"{math.isqrt(deepest)} segments"), ("ours", "our planners")):
        point = by_plan[deepest, plan]
        conditions = f"{size}; {describe_rates(TITAN_X)}, as no GPU is named"
        if plan == "ours":
            conditions += (
                f"; a plan for their share of the bytes, 48 -> 7 GB: {before:.1f} -> {point.peak_bytes / 1e9:.2f} GB"
            )
        about = partial(about, conditions=conditions, headline=plan == "ours")
        bytes_of = Figure(point.peak_bytes / 1e9, before)
        if plan == "segments":  # the bytes of the other plan are its budget
            claims.append(about(f"1,001 layers, {label}: bytes", unit="GB", published=Figure(7, 48), ours=bytes_of))
        slower = Figure(point.overhead_percent)
        claims.append(
            about(
                f"1,001 layers, {label}: overhead",
                unit="%",
                published=Figure(30),
                ours=slower,
                transferred=True,
                kind="modelled",
            )
        )
    conditions = (
        "ResNet-152 at 224: parameters, gradients, feature maps, not the GPU's context nor what its allocator keeps; a plan for "
        f"their share of the bytes, 5459 -> 2455 MiB: {resnet152[0]:.0f} -> {resnet152[1]:.0f} MiB; {describe_rates(TITAN_X)}, as "
        "no GPU is named"
    )
    about = partial(about, source=MEMONGER, conditions=conditions, headline=True)
    network = "ResNet-152, batch 16"
    return [
        *claims,
        about(
            f"{network}: overhead",
            unit="%",
            published=Figure(SLOWER),
            ours=Figure(resnet152[2]),
            transferred=True,
            kind="modelled",
        ),
    ]


def claims() -> list[Claim]:
    """Simulate all networks and return their claims; no file is written."""
    return claims_of([point for layers in STAGES for point in depth_points(layers)], memonger_resnet152())


def measured_claims() -> list[Claim]:
    """Measure pytorch-memonger's overhead at its share of the bytes, at a small batch."""
    return [
        build_measured_claim(
            Claim(
                f"ResNet-152, batch {MEASURED_BATCH}: overhead at 2455 of 5459 MiB", MEMONGER,
                f"their batch is 16, ours {MEASURED_BATCH}, at 224, SGD without state", "%", Figure(SLOWER), None,
                headline=True,
            ),
            measure_plan("experiments.claims.sublinear.__main__:make_small", {"batch": MEASURED_BATCH}, SHRUNK),
        )
    ]  # fmt: skip


def write_simulated() -> list[Claim]:
    """Simulate all networks, write the points and return the claims."""
    points = [point for layers in STAGES for point in depth_points(layers)]
    write_rows(POINTS, points)
    return claims_of(points, memonger_resnet152())


def draw(measured: Sequence[Claim]) -> None:
    """Draw bytes and overhead against layers."""
    points = read_rows(POINTS, DepthPoint)
    with open_figure(HERE / "results" / "depth.png", 2) as (left, right):
        for plan in dict.fromkeys(point.plan for point in points):
            of_plan = [point for point in points if point.plan == plan]
            xs = [point.layers for point in of_plan]
            left.plot(xs, [point.peak_bytes / 1e9 for point in of_plan], "o-", label=plan)
            right.plot(xs, [point.overhead_percent for point in of_plan], "o-", label=plan)
        right.plot([152], [SLOWER], "kx", label="pytorch-memonger, measured")
        for claim in measured:
            if claim.ours:
                right.plot(
                    [152], [claim.ours.value], "r*", markersize=12, label=f"ours, batch {MEASURED_BATCH}, measured"
                )
        left.set(xscale="log", yscale="log", xlabel="layers", ylabel="peak, GB", title=f"ResNets at 224, batch {BATCH}")
        right.set(xlabel="layers", ylabel="overhead, %, modelled where not measured")
        left.legend()
        right.legend()


if __name__ == "__main__":
    run_parts(HERE, __doc__, write_simulated, measured_claims, draw)
