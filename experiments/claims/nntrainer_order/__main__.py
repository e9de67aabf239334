"""nntrainer #1126: the order of a bottleneck's ops, of ResNet-50's four with a downsample branch, and of its training.

`python -m experiments.claims.nntrainer_order` writes `results/result.json`, the tables and the picture.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lower
from autotune.planners import KINDS, anticipate_inplace
from autotune.planners.order.best import find_best_order
from autotune.planners.order.exact import search
from autotune.predict.ordering import ordering_problem
from autotune.predict.simulate import Estimate, timeline
from autotune.report.claims import Claim, Figure, write
from autotune.report.op_table import OpRow, build_op_rows
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.common.simulated import (
    GraphAndCosts,
    build_graph,
    capture_step,
    collect_origin,
    open_figure,
    plan_for_budget,
    simulate_traced,
)

HERE = Path(__file__).parent
SOURCE = "nnstreamer/nntrainer#1126"
TABLES = {
    "L M N P Add": ((200, 200), (225, 225), (225, 225), (300, 300), (200, 300)),
    "L M P N Add": ((200, 200), (225, 225), (225, 225), (225, 225), (200, 225)),
}
"""The thread's two sorts: memory of each op and the peak so far, in the thread's units."""
BATCH = 32
"""Batch of training, which the thread does not name. Inference runs one image, since bytes are proportional to the batch."""
SHARE = 0.5
"""Budget of all planners together, as a share of the traced step's peak."""


@dataclass(frozen=True, slots=True)
class BottleneckPeak:
    """Bottleneck with a downsample branch: highest bytes inside it, as traced and reordered."""

    name: str
    traced_bytes: int
    reordered_bytes: int


def build_bottleneck() -> GraphAndCosts:
    """Build the thread's graph: an input that L and P read, and an in-place addition."""
    ops = [
        ("Input", (), {"T1": 100}), ("L", ("T1",), {"T2": 100}), ("M", ("T2",), {"T3": 25}),
        ("N", ("T3",), {"T4": 100}), ("P", ("T1",), {"T5": 100}), ("Add", ("T4", "T5"), {"T6": 100}),
    ]  # fmt: skip
    return build_graph("bottleneck", ops, inplace={"Add": "T4"})


def build_table(graph: TrainGraph, costs: Costs, names: str) -> list[OpRow]:
    """Build the thread's table of one order, without the row of the input."""
    positions = {op.name: op.id for op in graph.ops}
    plan = Plan(tuple(positions[name] for name in ("Input", *names.split())))
    plan = KINDS["inplace"]["greedy"]().plan(graph, plan, 0, costs)
    check(graph, plan)
    return list(build_op_rows(graph, plan, costs))[1:]


def capture_inference(*, folded: bool = True) -> GraphAndCosts:
    """Capture ResNet-50 on one image without gradients.

    Folding the BatchNorms into the convolutions leaves the bytes of layers.
    """

    def make_workload() -> Workload:
        workload = ZOO["resnet50"](batch=1)
        for module in workload.model.modules():
            if folded and hasattr(module, "normalization"):
                module.normalization = torch.nn.Identity()
        return Workload(workload.model.eval(), batch=(workload.batch[0],))

    return capture_step(make_workload, "resnet50 inference" if folded else "resnet50 inference, BatchNorms as ops")


def capture_training() -> GraphAndCosts:
    """Capture ResNet-50's training step."""
    return capture_step(partial(ZOO["resnet50"], batch=BATCH), "resnet50")


def reorder_bottlenecks(graph: TrainGraph, costs: Costs) -> tuple[list[list[int]], list[BottleneckPeak]]:
    """Return bytes per op, as traced and with the best order inside each bottleneck, and the bottlenecks' peaks."""
    problem = ordering_problem(graph, _in_place_costs(graph, costs))
    profile = problem.profile(problem.traced)
    order = list(problem.traced)
    blocks = {}
    for stage in range(4):
        ops = [op.id for op in graph.ops if f"stages.{stage}.layers.0." in f"{op.layer}."]
        first, last = ops[0], ops[-1] + 1
        blocks[f"stage {stage + 1}"] = range(first, last)
        solution = search(problem.subproblem(range(first), range(first, last)), 0, max(profile[first:last]), 100_000)
        order[first:last] = [first + op for op in solution.order] or order[first:last]
    profiles = [_profile(graph, tuple(ops), costs) for ops in (problem.traced, order)]
    return profiles, [
        BottleneckPeak(name, *(max(profile[op] for op in ops) for profile in profiles)) for name, ops in blocks.items()
    ]


def _in_place_costs(graph: TrainGraph, costs: Costs) -> Costs:
    """Return costs with which an order is evaluated as if every op that may run in place did."""
    return anticipate_inplace("recompute", KINDS["inplace"]["greedy"](), graph, Plan.traced(graph), costs)


def _profile(graph: TrainGraph, order: tuple[int, ...], costs: Costs) -> list[int]:
    """Return the bytes during each run of an order, in place where possible, without the static bytes."""
    plan = KINDS["inplace"]["greedy"]().plan(graph, Plan(order), 0, costs)
    check(graph, plan)
    moments = timeline(graph, lower(graph, plan), costs)
    return [m.during_bytes - graph.static_bytes for m in moments if isinstance(m.instruction, Run)]


PLAIN = {"recompute": "keep", "inplace": "never"}
TRAINING: dict[str, tuple[float, dict[str, str]]] = {
    "best order": (0.0, {"order": "best", "update": "at_end", **PLAIN}),
    "and updates early": (0.0, {"order": "best", **PLAIN}),
    "and in place": (0.0, {"order": "best", "recompute": "keep"}),
    f"all at {SHARE:.0%}": (SHARE, {}),
    f"all at {SHARE:.0%}, ordered again": (SHARE, {"order": "best", "reorder": "again"}),
}
"""Plans of the training step: budget as a share of the traced peak, and planners by kind."""


def simulate_training(graph: TrainGraph, costs: Costs, names: Sequence[str] = tuple(TRAINING)) -> dict[str, Estimate]:
    """Return the estimates of the traced training step and of the named plans."""
    baseline = simulate_traced(graph, costs)
    estimates = {"as traced": baseline}
    for name in names:
        share, planners = TRAINING[name]
        estimates[name] = plan_for_budget(graph, costs, int(share * baseline.peak_bytes), **planners)[1]
    return estimates


def claims_of_bottleneck() -> list[Claim]:
    """Return the claims about the thread's two tables and the lowest peak of all orders."""
    graph, costs = build_bottleneck()
    tables = {
        names: [(row.memory_bytes, row.peak_bytes) for row in build_table(graph, costs, names)] for names in TABLES
    }
    agree = sum(row == theirs for names in TABLES for row, theirs in zip(tables[names], TABLES[names], strict=True))
    best = find_best_order(graph, _in_place_costs(graph, costs))
    about = partial(Claim, source=SOURCE, conditions="the thread's graph, the addition made in place", headline=True)
    peaks = [
        about(
            f"bottleneck, {names}: peak",
            unit="units",
            published=Figure(table[-1][1]),
            ours=Figure(tables[names][-1][1]),
        )
        for names, table in TABLES.items()
    ]
    lowest = Figure(best.peak_bytes if best.proved else 0)
    return [
        *peaks,
        about("rows of both tables", unit="of 10", published=Figure(10), ours=Figure(agree), headline=False),
        about("bottleneck, the lowest of all orders", unit="units", published=Figure(225), ours=lowest, headline=False),
    ]


def claims_of_inference(
    profiles: list[list[int]], stages: list[BottleneckPeak], unfolded: list[BottleneckPeak]
) -> list[Claim]:
    """Return the claims about the bottlenecks whose peak an order lowers."""
    highest = max(stages, key=lambda stage: stage.traced_bytes)
    sets = 1 + stages.index(highest) if highest.traced_bytes == max(profiles[0]) else 0
    ratio = Figure(max(profiles[1]) / max(profiles[0]))
    conditions = "inference on one image of 224, in place where that keeps every bit; bytes beside weights and image; "
    layers = (
        f"{conditions}BatchNorm folded into the convolutions; lower in {', '.join(_improved_stages(stages)) or 'none'}"
    )
    about = partial(Claim, source=SOURCE, conditions=layers)
    net = "ResNet-50, inference"
    helped, by_ops = Figure(len(_improved_stages(stages))), Figure(len(_improved_stages(unfolded)))
    why = "the thread counts layers, not ops"
    by_op = about(
        f"{net}, BatchNorms as ops: bottlenecks that order helps", unit="of 4", published=None, ours=by_ops, why_not=why
    )
    return [
        about(f"{net}: bottlenecks that order helps", unit="of 4", published=Figure(3), ours=helped, headline=True),
        about(f"{net}: the bottleneck that sets the peak", unit="", published=Figure(1), ours=Figure(sets)),
        about(f"{net}: peak, reordered over traced", unit="x", published=Figure(1), ours=ratio, headline=True),
        replace(by_op, conditions=f"{conditions}BatchNorm makes an output of its own beside its input"),
    ]


def _improved_stages(stages: list[BottleneckPeak]) -> list[str]:
    return [stage.name for stage in stages if stage.reordered_bytes < stage.traced_bytes]


def claims_of_training(estimates: dict[str, Estimate]) -> list[Claim]:
    """Return the figures of training, for which the thread publishes none."""
    claims = []
    baseline = estimates["as traced"]
    for name, estimate in list(estimates.items())[1:]:
        slower = max(0.0, 100 * (estimate.seconds / baseline.seconds - 1))
        mean = f"mean {baseline.mean_bytes / 2**20:.0f} -> {estimate.mean_bytes / 2**20:.0f} MiB"
        counted = f"batch {BATCH}, SGD with momentum; peak of all, parameters and momentum too"
        conditions = f"{counted}; {mean}, +{slower:.1f} % of modelled time"
        change = Figure(estimate.peak_bytes / 2**20, baseline.peak_bytes / 2**20)
        why = "the thread gives no number for training"
        claims.append(Claim(f"ResNet-50, training: {name}", SOURCE, conditions, "MiB", None, change, why_not=why))
    return claims


def claims() -> list[Claim]:
    """Return the thread's claims, and figures for its question about training; no file is written."""
    return claims_of(*reorder_bottlenecks(*capture_inference()), simulate_training(*capture_training()))


def claims_of(profiles: list[list[int]], stages: list[BottleneckPeak], estimates: dict[str, Estimate]) -> list[Claim]:
    """Return all claims from the simulated profiles and estimates."""
    unfolded = reorder_bottlenecks(*capture_inference(folded=False))[1]
    return [*claims_of_bottleneck(), *claims_of_inference(profiles, stages, unfolded), *claims_of_training(estimates)]


def draw(profiles: list[list[int]], stages: list[BottleneckPeak], estimates: dict[str, Estimate]) -> None:
    """Draw inference op by op, the four bottlenecks, and training."""
    with open_figure(HERE / "results" / "order.png", 3) as (line, bars, training_bars):
        for profile, label in zip(profiles, ("as traced", "reordered"), strict=True):
            line.plot([nbytes / 2**20 for nbytes in profile], label=label, linewidth=1)
        line.set(title="ResNet-50, inference on one image", xlabel="op", ylabel="feature maps, MiB")
        line.legend()
        for shift, label in ((-0.2, "traced_bytes"), (0.2, "reordered_bytes")):
            heights = [getattr(stage, label) / 2**20 for stage in stages]
            bars.bar([place + shift for place in range(4)], heights, 0.4, label=label.removesuffix("_bytes"))
        bars.set_xticks(range(4), [stage.name for stage in stages])
        bars.set(title="highest inside each bottleneck with a downsample", ylabel="feature maps, MiB")
        bars.legend()
        for shift, label in ((-0.2, "peak_bytes"), (0.2, "mean_bytes")):
            heights = [getattr(estimate, label) / 2**20 for estimate in estimates.values()]
            training_bars.barh(
                [place + shift for place in range(len(estimates))], heights, 0.4, label=label.removesuffix("_bytes")
            )
        training_bars.set_yticks(range(len(estimates)), list(estimates))
        training_bars.set(title=f"ResNet-50, training, batch {BATCH}", xlabel="MiB")
        training_bars.invert_yaxis()
        training_bars.legend()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    orders, estimates = reorder_bottlenecks(*capture_inference()), simulate_training(*capture_training())
    write(HERE, claims_of(*orders, estimates), {"simulated": collect_origin()})
    draw(*orders, estimates)


if __name__ == "__main__":
    main()
