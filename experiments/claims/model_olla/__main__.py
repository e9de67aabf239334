"""MODeL (OLLA): AlexNet's training step by order alone, and its unit graphs.

`python -m experiments.claims.model_olla` writes `results/result.json` and the picture.
"""

import argparse
from functools import partial
from pathlib import Path

from torch import nn

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.layout import Buffers, check_layout, lay_out
from autotune.planners.order.best import find_best_order
from autotune.predict.simulate import Estimate
from autotune.report.claims import Claim, Figure, write
from experiments.common.simulated import (
    build_graph,
    capture_step,
    collect_origin,
    image_workload,
    open_figure,
    plan_for_budget,
    simulate_traced,
)

HERE = Path(__file__).parent
SOURCE = "facebookresearch/MODel_opt (Steiner et al. 2023)"
Edges = tuple[tuple[str, str, int], ...]
DIAMOND = (
    ("A", "B", 10), ("B", "C", 20), ("B", "D", 30), ("D", "E", 40), ("E", "F", 50), ("C", "F", 60), ("F", "G", 10)
)  # fmt: skip
UNITS: dict[str, tuple[Edges, int]] = {
    "simple": ((("A", "B", 10), ("B", "C", 20), ("B", "D", 30), ("D", "E", 40)), 70),
    "diamond": (DIAMOND, 130),
    "diamond with a control edge": ((*DIAMOND, ("C", "E", 0)), 150),
    "two ways to one output": ((("A", "B", 10), ("A", "C", 20), ("B", "D", 30), ("D", "E", 40), ("C", "E", 50)), 110),
    "one tensor of two makers": ((("A", "B", 10), ("A", "C", 20), ("BC", "D", 30)), 60),
}
"""Tensors by maker and reader, and the peak that MODeL's tests expect."""
LIVES = (
    (1, 1, 10), (9, 2, 3), (1, 4, 13), (8, 5, 6), (1, 7, 16), (7, 8, 9), (8, 11, 12), (7, 14, 15)
)  # fmt: skip
"""Bytes, first and last step of the eight tensors that MODeL's test lays out in 10 bytes."""


def alexnet() -> nn.Module:
    """Make AlexNet (Krizhevsky 2014) in one tower: 61 million parameters, most of them in one product."""
    features: list[nn.Module] = [
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6), nn.Flatten(),
    ]  # fmt: skip
    head = [nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*features, *head, nn.Linear(4096, 1000))


def build_unit_graph(name: str) -> tuple[TrainGraph, Costs]:
    """Build a unit graph: each letter is an op that reads the edges ending there and makes those beginning there."""
    edges, _ = UNITS[name]
    ops = []
    for op in sorted({letter for makers, reader, _ in edges for letter in makers + reader}):
        reads = [_tensor_name(edge) for edge in edges if edge[1] == op]
        # of two makers the second adds to what the first began
        reads += [_tensor_name(edge) for edge in edges if op in edge[0][1:]]
        ops.append((op, reads, {_tensor_name(edge): edge[2] for edge in edges if edge[0][0] == op}))
    return build_graph(name, ops)


def _tensor_name(edge: tuple[str, str, int]) -> str:
    return f"{edge[0]}-{edge[1]}"


def simulate_training() -> tuple[Estimate, Estimate]:
    """Return AlexNet's step at batch 32, as traced and in the best order with updates among the ops."""
    graph, costs = capture_step(image_workload(alexnet, 32), "alexnet")
    return simulate_traced(graph, costs), plan_for_budget(
        graph, costs, 0, order="best", recompute="keep", inplace="never"
    )[1]


def unit_peaks() -> dict[str, int]:
    """Return the lowest peak over all orders of each unit graph, or 0 where it is not proved."""
    orders = {name: find_best_order(*build_unit_graph(name)) for name in UNITS}
    return {name: best.peak_bytes if best.proved else 0 for name, best in orders.items()}


def pack_tensors() -> int:
    """Return the bytes of the layout of the eight tensors."""
    buffers = Buffers.from_lives(
        *zip(*((size, first, last + 1) for size, first, last in LIVES), strict=True), alignment=1
    )
    layout = lay_out(buffers)
    check_layout(buffers, layout)
    return layout.bytes


def claims_of(baseline: Estimate, planned: Estimate) -> list[Claim]:
    """Return all claims; the two estimates are AlexNet's."""
    conditions = "AlexNet at 224, float32, SGD: parameters, gradients, feature maps, in GiB; nothing computed again"
    ours = Figure(planned.peak_bytes / 2**30, baseline.peak_bytes / 2**30)
    alexnet_claim = Claim(
        "AlexNet, batch 32: order alone",
        SOURCE,
        conditions,
        "GB",
        Figure(0.4783, 0.5618),
        ours,
        0.05,
        "at most",
        headline=True,
    )
    about = partial(Claim, source=SOURCE, unit="units")
    proved = "the graph of its test; the lowest peak of all orders, proved"
    peaks = [
        about(f"unit graph, {name}", conditions=proved, published=Figure(UNITS[name][1]), ours=Figure(peak))
        for name, peak in unit_peaks().items()
    ]
    conditions = "the lives of its test, laid out by the exact search"
    return [
        alexnet_claim,
        *peaks,
        about(
            "eight tensors in one block",
            conditions=conditions,
            published=Figure(10),
            ours=Figure(pack_tensors()),
            headline=True,
        ),
    ]


def claims() -> list[Claim]:
    """Simulate all graphs and return their claims; no file is written."""
    return claims_of(*simulate_training())


def draw(baseline: Estimate, planned: Estimate) -> None:
    """Draw AlexNet's peaks beside the published ones."""
    with open_figure(HERE / "results" / "peaks.png") as (axes,):
        for shift, label, heights in (
            (-0.2, "MODeL", (0.5618, 0.4783)),
            (0.2, "ours", (baseline.peak_bytes / 2**30, planned.peak_bytes / 2**30)),
        ):
            axes.bar([shift, 1 + shift], heights, 0.4, label=label)
        axes.set_xticks((0, 1), ("as traced", "reordered"))
        axes.set(title="AlexNet's training step, batch 32", ylabel="peak, GiB")
        axes.legend()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    baseline, planned = simulate_training()
    write(HERE, claims_of(baseline, planned), {"simulated": collect_origin()})
    draw(baseline, planned)


if __name__ == "__main__":
    main()
