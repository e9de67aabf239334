"""MXNet #18228 (Echo): what must not be mirrored, what need not be, ResNet-152 at batch 152, and a translator.

`python experiments/echo/run.py [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from models import Translator, products, translation_loss

from autotune.ir.check import check
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.predict.simulate import peak_bytes
from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO

sys.path.insert(0, str(Path(__file__).parents[1]))
from measured import claim_of, measured, run
from simulated import (
    Made,
    Point,
    captured,
    classified,
    drawn,
    frontier,
    overhead,
    picture,
    planned,
    read_rows,
    traced,
    write_rows,
)

HERE = Path(__file__).parent
POINTS = HERE / "results" / "points.csv"
THREAD = "apache/mxnet#18228"
ABSTRACT = "Zheng et al. 2020, abstract"
STEPS = 50
"""Of the drawn recurrent net."""
BATCH, WORDS, WIDTH, VOCABULARY = 128, 50, 512, 8192
"""Of the translator; the abstract names none."""
MEAN, MOST = 1.89, 3.13
"""The abstract's footprints."""
SHARES = (0.9, 0.75, 1 / MEAN, 0.45, 0.4, 1 / MOST, 0.25)
"""Of the traced step's bytes: budgets."""
MEASURED = {"batch": 16, "words": 20}
"""Of the translator that is measured."""
CARD_BYTES = 11 * 2**30
"""Of the thread's RTX 2080 Ti."""
SLOWER = 6.0
"""Percent that the thread's ResNet-152 takes longer."""


SIZES = {
    "resnet152": "at 224; the thread names neither the image size nor bytes",
    "translator": f"an LSTM layer each way with attention, {WIDTH} wide, batch {BATCH}, {WORDS} words of {VOCABULARY}; the abstract "
    "names no size",
}


def recurrent(steps: int = STEPS) -> Made:
    """A recurrent net's step by hand: two products and a tanh of their sum each step, whose gradient reads the tanh."""
    ops: list[tuple[str, tuple[str, ...], dict[str, int]]] = [("start", (), {"h0": 1})]
    for t in range(1, steps + 1):
        ops += [(f"input{t}", (), {f"a{t}": 1}), (f"state{t}", (f"h{t - 1}",), {f"r{t}": 1})]
        ops.append((f"cell{t}", (f"a{t}", f"r{t}"), {f"h{t}": 1}))
    ops.append(("loss", (f"h{steps}",), {f"g{steps}": 1}))
    for t in reversed(range(1, steps + 1)):
        ops.append((f"gradient{t}", (f"g{t}", f"h{t}"), {f"g{t - 1}": 1}))
    return drawn(f"recurrent{steps}", ops)


def mirrored(graph: TrainGraph) -> Plan:
    """Every tanh thrown away when the next step has read it, and computed again before its gradient."""
    place = {op.name: op.id for op in graph.ops}
    order = []
    for op in graph.ops:
        if op.name.startswith("gradient") and (again := op.name.replace("gradient", "cell")) != f"cell{STEPS}":
            order.append(place[again])
        order.append(op.id)
    plan = Plan(tuple(order))
    check(graph, plan)
    return plan


def mirrors(graph: TrainGraph, plan: Plan) -> int:
    """How often a plan computes a tanh again from two products that it kept for that alone."""
    runs = [0] * len(graph.ops)
    found = 0
    for op in plan.order:
        runs[op] += 1
        if graph.ops[op].name.startswith("cell") and runs[op] > 1:
            makers = [graph.producer[value] for value in graph.ops[op].inputs]
            found += all(maker is not None and runs[maker] == 1 for maker in makers)
    return found


def claims_of_cell() -> list[Claim]:
    """Mirroring a recurrent cell keeps two feature maps instead of one."""
    graph, costs = recurrent()
    plain, doubled = (peak_bytes(graph, plan, costs) for plan in (Plan.traced(graph), mirrored(graph)))
    chosen = 0
    for share in SHARES:
        chosen += mirrors(graph, planned(graph, costs, int(share * plain), order="traced")[0])
    about = partial(Claim, source=THREAD, conditions=f"{STEPS} steps drawn by hand, every feature map one unit")
    kept = Figure(doubled / plain)
    return [
        about(
            "RNN cell, mirrored: feature maps", unit="x", published=Figure(2), ours=kept, tolerance=0.05, headline=True
        ),
        about("RNN cells that our plans mirror", unit="", published=Figure(0), ours=Figure(chosen), headline=True),
    ]


def claims_of_products() -> list[Claim]:
    """Inputs of products made again from what stood before them, products never."""
    made = classified(lambda: products(1024, 8), 8192)
    graph, costs = captured(lambda: _flat(made(), 8192, 1024), "products")
    before = traced(graph, costs)
    plan, after = planned(graph, costs, before.peak_bytes * 3 // 4)
    again = [graph.ops[op] for op in set(plan.order) if plan.order.count(op) > 1]
    heavy = sum("mm" in op.target for op in again)
    how = (
        f"8 layers of 1024 with GELU, batch 8192; {len(again)} ops run again, {before.peak_bytes / 2**20:.0f} -> "
        f"{after.peak_bytes / 2**20:.0f} MiB at +{overhead(after, costs):.1f} % of modelled time"
    )
    maps = sum(op.phase is Phase.FORWARD for op in again)
    about = partial(Claim, source=THREAD, conditions=how)
    return [
        about(
            "FC: products run again for their feature maps",
            unit="",
            published=Figure(0),
            ours=Figure(heavy),
            headline=True,
        ),
        about("FC: feature maps made again", unit="", published=Figure(1), ours=Figure(maps), sense="at least"),
    ]


def _flat(workload: Workload, batch: int, width: int) -> Workload:
    workload.batch = torch.randn(batch, width)
    return workload


def translator(batch: int = BATCH, words: int = WORDS) -> Workload:
    """At the size of the experiment, or a smaller one."""
    model = Translator(VOCABULARY, WIDTH)
    texts = [torch.randint(VOCABULARY, (batch, words)) for _ in range(3)]
    return Workload(model, translation_loss, torch.optim.SGD(model.parameters(), lr=0.01), tuple(texts))


NETS = {
    "resnet152": classified(lambda: ZOO["resnet152"](batch=1).model, 152),
    "translator": translator,
}


def points(name: str) -> list[Point]:
    """The traced step, then a plan for each share of its bytes, and for ResNet-152 one for the thread's card."""
    card = [CARD_BYTES] if name == "resnet152" else []
    return frontier(NETS[name], name, lambda plain: [*(int(share * plain) for share in SHARES), *card])


def claims_of_nets(found: Sequence[Point]) -> list[Claim]:
    """ResNet-152's overhead at the abstract's mean footprint, and the translator's footprints at the thread's overhead."""
    counted = "parameters, gradients and feature maps; time by modelled costs"
    about = partial(Claim, transferred=True, headline=True)
    resnet, translator = ([point for point in found if point.net == name] for name in NETS)
    how = f"{SIZES['resnet152']}; {counted}; {resnet[0].peak_bytes / 2**30:.1f} GiB as traced"
    times = partial(
        about, source=THREAD, unit="%", published=Figure(SLOWER), tolerance=0.1, sense="at most", kind="modelled"
    )
    net = "ResNet-152, batch 152: overhead"
    mean = Figure(resnet[1 + SHARES.index(1 / MEAN)].overhead_percent)
    made = [
        times(f"{net} in the card's 11 GiB", conditions=how, ours=Figure(resnet[-1].overhead_percent)),
        times(f"{net} at their mean footprint", conditions=f"{how}, 1/1.89 of that", ours=mean, headline=False),
    ]
    plain, least = translator[0].peak_bytes, min(translator, key=lambda point: point.peak_bytes)
    smallest = min(point.peak_bytes for point in translator if point.overhead_percent <= SLOWER)
    at = (
        f"{SIZES['translator']}; {counted}; the smallest of our plans that take no more than {SLOWER:g} % longer; of all, "
        f"{plain / least.peak_bytes:.2f}x at +{least.overhead_percent:.1f} %"
    )
    about = partial(
        about,
        source=ABSTRACT,
        conditions=at,
        unit="x",
        ours=Figure(plain / smallest),
        sense="at least",
        kind="modelled",
    )
    return [
        *made,
        about("translator: footprint, their mean", published=Figure(MEAN)),
        about("translator: footprint, their most", published=Figure(MOST)),
    ]


def claims() -> list[Claim]:
    """Everything that is simulated, made anew."""
    return [
        *claims_of_cell(),
        *claims_of_products(),
        *claims_of_nets([point for name in NETS for point in points(name)]),
    ]


def measured_claims() -> list[Claim]:
    """The thread's overhead at the abstract's mean footprint, as far as this machine goes."""
    return [
        claim_of(
            Claim(
                f"translator, batch {MEASURED['batch']}: overhead at their mean footprint", f"{THREAD}; {ABSTRACT}",
                f"the footprint is the abstract's mean, the overhead the thread's of ResNet-152; {SIZES['translator']}; "
                f"measured at batch {MEASURED['batch']}, {MEASURED['words']} words", "%", Figure(SLOWER), None, headline=True,
            ),
            measured(f"{HERE / 'run.py'}:translator", MEASURED, 1 / MEAN),
        )
    ]  # fmt: skip


def simulated() -> list[Claim]:
    """What is simulated, and the points behind it."""
    found = [point for name in NETS for point in points(name)]
    write_rows(POINTS, found)
    return [*claims_of_cell(), *claims_of_products(), *claims_of_nets(found)]


def draw(seen: Sequence[Claim]) -> None:
    """Overhead against footprint."""
    found = read_rows(POINTS, Point)
    with picture(HERE / "results" / "footprint.png") as (axes,):
        for name in NETS:
            mine = sorted((point for point in found if point.net == name), key=lambda point: -point.peak_bytes)
            ratios = [mine[0].peak_bytes / point.peak_bytes for point in mine]
            axes.plot(ratios, [point.overhead_percent for point in mine], "o-", label=name)
        for claim in seen:
            if claim.ours:
                label = f"translator, batch {MEASURED['batch']}, measured"
                axes.plot([MEAN], [claim.ours.value], "r*", markersize=12, label=label)
        axes.axhline(SLOWER, color="k", linewidth=0.8, label="ResNet-152's in the thread")
        for ratio, label in ((MEAN, "their mean"), (MOST, "their most")):
            axes.axvline(ratio, color="k", linewidth=0.8, linestyle=":")
            axes.annotate(label, (ratio, 0), rotation=90, fontsize=7)
        axes.set(xlabel="traced bytes over planned bytes", ylabel="overhead, %, modelled where not measured")
        axes.legend()


if __name__ == "__main__":
    run(HERE, __doc__, simulated, measured_claims, draw)
