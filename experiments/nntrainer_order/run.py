"""nntrainer #1126: the order of a bottleneck's ops, of ResNet-50's four with a downsample branch, and of its training.

`python experiments/nntrainer_order/run.py` writes `results/result.json`, the tables and the picture.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lower
from autotune.planners import KINDS, foreseen
from autotune.planners.order.best import best_order
from autotune.planners.order.exact import search
from autotune.predict.ordering import ordering
from autotune.predict.simulate import Estimate, timeline
from autotune.report.claims import Claim, Figure, write
from autotune.report.op_table import OpRow, op_rows
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulated import Made, captured, drawn, picture, planned, traced

HERE = Path(__file__).parent
SOURCE = "nnstreamer/nntrainer#1126"
TABLES = {
    "L M N P Add": ((200, 200), (225, 225), (225, 225), (300, 300), (200, 300)),
    "L M P N Add": ((200, 200), (225, 225), (225, 225), (225, 225), (200, 225)),
}
"""The thread's two sorts: per op the memory that it needs and the peak so far, in its units."""
BATCH = 32
"""Of training; the thread names none, and for inference one image is enough: bytes grow with the batch alike."""
SHARE = 0.5
"""Of the traced step's bytes, that all planners together are given."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One bottleneck with a downsample branch: highest bytes inside it, as traced and reordered."""

    name: str
    traced_bytes: int
    reordered_bytes: int


def bottleneck() -> Made:
    """The thread's graph: an input read by L and P, and an addition that is made in place."""
    ops = [
        ("Input", (), {"T1": 100}), ("L", ("T1",), {"T2": 100}), ("M", ("T2",), {"T3": 25}),
        ("N", ("T3",), {"T4": 100}), ("P", ("T1",), {"T5": 100}), ("Add", ("T4", "T5"), {"T6": 100}),
    ]  # fmt: skip
    return drawn("bottleneck", ops, inplace={"Add": "T4"})


def sort(graph: TrainGraph, costs: Costs, names: str) -> list[OpRow]:
    """The thread's table of one order, without the row of the input."""
    place = {op.name: op.id for op in graph.ops}
    plan = Plan(tuple(place[name] for name in ("Input", *names.split())))
    plan = KINDS["inplace"]["greedy"]().plan(graph, plan, 0, costs)
    check(graph, plan)
    return list(op_rows(graph, plan, costs))[1:]


def inference(*, folded: bool = True) -> Made:
    """ResNet-50 on one image, no gradients kept; its BatchNorms folded into the convolutions, which leaves the bytes of layers."""

    def make() -> Workload:
        made = ZOO["resnet50"](batch=1)
        for module in made.model.modules():
            if folded and hasattr(module, "normalization"):
                module.normalization = torch.nn.Identity()
        return Workload(made.model.eval(), batch=(made.batch[0],))

    return captured(make, "resnet50 inference")


def training_step() -> Made:
    """ResNet-50's step."""
    return captured(partial(ZOO["resnet50"], batch=BATCH), "resnet50")


def reordered(graph: TrainGraph, costs: Costs) -> tuple[list[list[int]], list[Stage]]:
    """Bytes op by op, as traced and with each bottleneck's ops in the best order of all; and what is highest inside them."""
    problem = ordering(graph, _in_place(graph, costs))
    profile = problem.profile(problem.traced)
    order = list(problem.traced)
    blocks = {}
    for stage in range(4):
        ops = [op.id for op in graph.ops if f"stages.{stage}.layers.0." in f"{op.layer}."]
        first, last = ops[0], ops[-1] + 1
        blocks[f"stage {stage + 1}"] = range(first, last)
        found = search(problem.part(range(first), range(first, last)), 0, max(profile[first:last]), 100_000)
        order[first:last] = [first + op for op in found.order] or order[first:last]
    profiles = [_profile(graph, tuple(ops), costs) for ops in (problem.traced, order)]
    return profiles, [Stage(name, *(max(seen[op] for op in ops) for seen in profiles)) for name, ops in blocks.items()]


def _in_place(graph: TrainGraph, costs: Costs) -> Costs:
    """Costs with which an order is judged as if it were to run in place wherever it may."""
    return foreseen("recompute", KINDS["inplace"]["greedy"](), graph, Plan.traced(graph), costs)


def _profile(graph: TrainGraph, order: tuple[int, ...], costs: Costs) -> list[int]:
    """Bytes while each run of an order goes on, in place where that may be, beside the static ones."""
    plan = KINDS["inplace"]["greedy"]().plan(graph, Plan(order), 0, costs)
    check(graph, plan)
    moments = timeline(graph, lower(graph, plan), costs)
    return [m.during_bytes - graph.static_bytes for m in moments if isinstance(m.instruction, Run)]


def training(graph: TrainGraph, costs: Costs) -> dict[str, Estimate]:
    """What order does for a training step, alone and with all other planners."""
    before = traced(graph, costs)
    plain = {"recompute": "keep", "inplace": "never"}
    budget = int(SHARE * before.peak_bytes)
    return {
        "as traced": before,
        "best order": planned(graph, costs, 0, order="best", update="at_end", **plain)[1],
        "and updates early": planned(graph, costs, 0, order="best", **plain)[1],
        "and in place": planned(graph, costs, 0, order="best", recompute="keep")[1],
        f"all at {SHARE:.0%}": planned(graph, costs, budget)[1],
        f"all at {SHARE:.0%}, ordered again": planned(graph, costs, budget, order="best", reorder="again")[1],
    }


def claims_of_bottleneck() -> list[Claim]:
    """The thread's two tables, and what no order goes below."""
    graph, costs = bottleneck()
    tables = {names: [(row.memory_bytes, row.peak_bytes) for row in sort(graph, costs, names)] for names in TABLES}
    agree = sum(row == theirs for names in TABLES for row, theirs in zip(tables[names], TABLES[names], strict=True))
    best = best_order(graph, _in_place(graph, costs))
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


def claims_of_inference(profiles: list[list[int]], stages: list[Stage], unfolded: list[Stage]) -> list[Claim]:
    """Which bottlenecks an order helps."""
    highest = max(stages, key=lambda stage: stage.traced_bytes)
    sets = 1 + stages.index(highest) if highest.traced_bytes == max(profiles[0]) else 0
    ratio = Figure(max(profiles[1]) / max(profiles[0]))
    how = "inference on one image of 224, in place where that keeps every bit; bytes beside weights and image; "
    layers = f"{how}BatchNorm folded into the convolutions; lower in {', '.join(_lowered(stages)) or 'none'}"
    about = partial(Claim, source=SOURCE, conditions=layers)
    net = "ResNet-50, inference"
    helped, by_ops = Figure(len(_lowered(stages))), Figure(len(_lowered(unfolded)))
    why = "the thread counts layers, not ops"
    ops = about(
        f"{net}, BatchNorms as ops: bottlenecks that order helps", unit="of 4", published=None, ours=by_ops, why_not=why
    )
    return [
        about(f"{net}: bottlenecks that order helps", unit="of 4", published=Figure(3), ours=helped, headline=True),
        about(f"{net}: the bottleneck that sets the peak", unit="", published=Figure(1), ours=Figure(sets)),
        about(f"{net}: peak, reordered over traced", unit="x", published=Figure(1), ours=ratio, headline=True),
        replace(ops, conditions=f"{how}BatchNorm makes an output of its own beside its input"),
    ]


def _lowered(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in stages if stage.reordered_bytes < stage.traced_bytes]


def claims_of_training(seen: dict[str, Estimate]) -> list[Claim]:
    """The same for training, of which the thread has no number."""
    found = []
    before = seen["as traced"]
    for name, made in list(seen.items())[1:]:
        slower = max(0.0, 100 * (made.seconds / before.seconds - 1))
        mean = f"mean {before.mean_bytes / 2**20:.0f} -> {made.mean_bytes / 2**20:.0f} MiB"
        counted = f"batch {BATCH}, SGD with momentum; peak of all, parameters and momentum too"
        how = f"{counted}; {mean}, +{slower:.1f} % of modelled time"
        change = Figure(made.peak_bytes / 2**20, before.peak_bytes / 2**20)
        why = "the thread gives no number for training"
        found.append(Claim(f"ResNet-50, training: {name}", SOURCE, how, "MiB", None, change, why_not=why))
    return found


def claims() -> list[Claim]:
    """Everything that the thread says, and what it asks about training."""
    return claims_of(*reordered(*inference()), training(*training_step()))


def claims_of(profiles: list[list[int]], stages: list[Stage], seen: dict[str, Estimate]) -> list[Claim]:
    """The same of what was found already."""
    unfolded = reordered(*inference(folded=False))[1]
    return [*claims_of_bottleneck(), *claims_of_inference(profiles, stages, unfolded), *claims_of_training(seen)]


def draw(profiles: list[list[int]], stages: list[Stage], seen: dict[str, Estimate]) -> None:
    """Inference op by op, inside the four bottlenecks, and training."""
    with picture(HERE / "results" / "order.png", 3) as (line, bars, training_bars):
        for profile, label in zip(profiles, ("as traced", "reordered"), strict=True):
            line.plot([nbytes / 2**20 for nbytes in profile], label=label, linewidth=1)
        line.set(title="ResNet-50, inference on one image", xlabel="op", ylabel="feature maps, MiB")
        line.legend()
        for shift, label in ((-0.2, "traced_bytes"), (0.2, "reordered_bytes")):
            heights = [getattr(stage, label) / 2**20 for stage in stages]
            bars.bar([at + shift for at in range(4)], heights, 0.4, label=label.removesuffix("_bytes"))
        bars.set_xticks(range(4), [stage.name for stage in stages])
        bars.set(title="highest inside each bottleneck with a downsample", ylabel="feature maps, MiB")
        bars.legend()
        for shift, label in ((-0.2, "peak_bytes"), (0.2, "mean_bytes")):
            heights = [getattr(made, label) / 2**20 for made in seen.values()]
            training_bars.barh(
                [at + shift for at in range(len(seen))], heights, 0.4, label=label.removesuffix("_bytes")
            )
        training_bars.set_yticks(range(len(seen)), list(seen))
        training_bars.set(title=f"ResNet-50, training, batch {BATCH}", xlabel="MiB")
        training_bars.invert_yaxis()
        training_bars.legend()


def main() -> None:
    found, seen = reordered(*inference()), training(*training_step())
    write(HERE, claims_of(*found, seen))
    draw(*found, seen)


if __name__ == "__main__":
    main()
