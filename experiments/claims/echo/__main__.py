"""MXNet #18228 (Echo): a recurrent cell, fully-connected layers, ResNet-152 at batch 152, and a translator.

`python -m experiments.claims.echo [--parts simulated measured]` writes `results/result.json`, `points.csv` and the picture.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from autotune.ir.check import check
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.predict.simulate import peak_bytes
from autotune.report.claims import Claim, Figure
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.claims.echo.models import Translator, products, translation_loss
from experiments.common.cards import RTX_2080_TI, describe_rates
from experiments.common.paper_frontier import PaperFrontier, SmallRun
from experiments.common.simulated import (
    FrontierPoint,
    GraphAndCosts,
    build_graph,
    capture_step,
    image_workload,
    open_figure,
    overhead_percent,
    plan_for_budget,
    simulate_traced,
)

HERE = Path(__file__).parent
THREAD = "apache/mxnet#18228"
ABSTRACT = "Zheng et al. 2020, abstract"
STEPS = 50
"""Time steps of the hand-built recurrent net."""
BATCH, WORDS, WIDTH, VOCABULARY = 128, 50, 512, 8192
"""Sizes of the translator; the abstract names none."""
MEAN, MOST = 1.89, 3.13
"""Footprints of the abstract: traced bytes over planned bytes, on average and at most."""
SHARES = (0.9, 0.75, 1 / MEAN, 0.45, 0.4, 1 / MOST, 0.25)
"""Budgets as shares of the traced step's peak."""
FINE_SHARES = (0.65, 0.6, 0.58, 0.56, 0.54, 0.52, 0.51, 0.5, 0.49, 0.48, 0.47, 0.46, 0.44, 0.43, 0.42)
"""Further budgets of the translator: the smallest plan at the thread's overhead is looked for among all."""
MEASURED = {"batch": 16, "words": 20}
"""Sizes of the measured translator."""
CARD_BYTES = 11 * 2**30
"""Memory of the thread's RTX 2080 Ti."""
SLOWER = 6.0
"""Overhead of ResNet-152 in the thread, in percent."""


SIZES = {
    "resnet152": "at 224; the thread names neither the image size nor bytes",
    "translator": f"an LSTM layer each way with attention, {WIDTH} wide, batch {BATCH}, {WORDS} words of {VOCABULARY}; the abstract "
    "names no size",
}


def recurrent(steps: int = STEPS) -> GraphAndCosts:
    """Build a recurrent net's step: two products and a tanh of their sum per time step, whose gradient reads the tanh."""
    ops: list[tuple[str, tuple[str, ...], dict[str, int]]] = [("start", (), {"h0": 1})]
    for t in range(1, steps + 1):
        ops += [(f"input{t}", (), {f"a{t}": 1}), (f"state{t}", (f"h{t - 1}",), {f"r{t}": 1})]
        ops.append((f"cell{t}", (f"a{t}", f"r{t}"), {f"h{t}": 1}))
    ops.append(("loss", (f"h{steps}",), {f"g{steps}": 1}))
    for t in reversed(range(1, steps + 1)):
        ops.append((f"gradient{t}", (f"g{t}", f"h{t}"), {f"g{t - 1}": 1}))
    return build_graph(f"recurrent{steps}", ops)


def mirrored(graph: TrainGraph) -> Plan:
    """Return a plan that drops every tanh after its last forward reader and recomputes it before its gradient."""
    positions = {op.name: op.id for op in graph.ops}
    order = []
    for op in graph.ops:
        if op.name.startswith("gradient") and (again := op.name.replace("gradient", "cell")) != f"cell{STEPS}":
            order.append(positions[again])
        order.append(op.id)
    plan = Plan(tuple(order))
    check(graph, plan)
    return plan


def mirrors(graph: TrainGraph, plan: Plan) -> int:
    """Count the recomputed tanhs whose two products the plan keeps for that alone."""
    runs = [0] * len(graph.ops)
    count = 0
    for op in plan.order:
        runs[op] += 1
        if graph.ops[op].name.startswith("cell") and runs[op] > 1:
            makers = [graph.producer[value] for value in graph.ops[op].inputs]
            count += all(maker is not None and runs[maker] == 1 for maker in makers)
    return count


def claims_of_cell() -> list[Claim]:
    """Return the claims about mirroring a recurrent cell, which keeps two feature maps instead of one."""
    graph, costs = recurrent()
    plain, doubled = (peak_bytes(graph, plan, costs) for plan in (Plan.traced(graph), mirrored(graph)))
    count = 0
    for share in SHARES:
        count += mirrors(graph, plan_for_budget(graph, costs, int(share * plain), order="traced")[0])
    about = partial(Claim, source=THREAD, conditions=f"{STEPS} steps drawn by hand, every feature map one unit")
    ratio = Figure(doubled / plain)
    return [
        about(
            "RNN cell, mirrored: feature maps", unit="x", published=Figure(2), ours=ratio, tolerance=0.05, headline=True
        ),
        about("RNN cells that our plans mirror", unit="", published=Figure(0), ours=Figure(count), headline=True),
    ]


def claims_of_products() -> list[Claim]:
    """Return the claims about inputs of products: they are recomputed from cheap ops, products never."""
    make = image_workload(lambda: products(1024, 8), 8192)
    graph, costs = capture_step(lambda: _flat(make(), 8192, 1024), "products", RTX_2080_TI)
    baseline = simulate_traced(graph, costs)
    plan, estimate = plan_for_budget(graph, costs, baseline.peak_bytes * 3 // 4)
    recomputed = [graph.ops[op] for op in set(plan.order) if plan.order.count(op) > 1]
    heavy = sum("mm" in op.target for op in recomputed)
    conditions = (
        f"8 layers of 1024 with GELU, batch 8192; {len(recomputed)} ops run again, {baseline.peak_bytes / 2**20:.0f} -> "
        f"{estimate.peak_bytes / 2**20:.0f} MiB at +{overhead_percent(estimate, costs):.1f} % of modelled time"
    )
    feature_maps = sum(op.phase is Phase.FORWARD for op in recomputed)
    about = partial(Claim, source=THREAD, conditions=conditions)
    return [
        about(
            "FC: products run again for their feature maps",
            unit="",
            published=Figure(0),
            ours=Figure(heavy),
            headline=True,
        ),
        about("FC: feature maps made again", unit="", published=Figure(1), ours=Figure(feature_maps), sense="at least"),
    ]


def _flat(workload: Workload, batch: int, width: int) -> Workload:
    workload.batch = torch.randn(batch, width)
    return workload


def translator(batch: int = BATCH, words: int = WORDS) -> Workload:
    """Make the translator at the size of the experiment, or a smaller one."""
    model = Translator(VOCABULARY, WIDTH)
    texts = [torch.randint(VOCABULARY, (batch, words)) for _ in range(3)]
    return Workload(model, translation_loss, torch.optim.SGD(model.parameters(), lr=0.01), tuple(texts))


NETS = {
    "resnet152": image_workload(lambda: ZOO["resnet152"](batch=1).model, 152),
    "translator": translator,
}


def budgets(name: str, traced_bytes: int) -> Iterable[int]:
    """Return the shares of the traced bytes, and for ResNet-152 the bytes of the thread's card."""
    shares = SHARES if name == "resnet152" else [*SHARES, *FINE_SHARES]
    return [*(int(share * traced_bytes) for share in shares), *([CARD_BYTES] if name == "resnet152" else [])]


def claims_of_nets(points: Mapping[str, Sequence[FrontierPoint]]) -> list[Claim]:
    """Return ResNet-152's overhead on the thread's card, and the translator's footprints at that overhead."""
    counted = f"parameters, gradients and feature maps; {describe_rates(RTX_2080_TI)}"
    about = partial(Claim, transferred=True, headline=True)
    resnet, translator = points["resnet152"], points["translator"]
    how = f"{SIZES['resnet152']}; {counted}; {resnet[0].peak_bytes / 2**30:.1f} GiB as traced"
    times = partial(
        about, source=THREAD, unit="%", published=Figure(SLOWER), tolerance=0.1, sense="at most", kind="modelled"
    )
    overhead = Figure(resnet[-1].overhead_percent)
    claims = [times("ResNet-152, batch 152: overhead in the card's 11 GiB", conditions=how, ours=overhead)]
    plain, least = translator[0].peak_bytes, min(translator, key=lambda point: point.peak_bytes)
    smallest = min(point.peak_bytes for point in translator if point.overhead_percent <= SLOWER)
    conditions = (
        f"{SIZES['translator']}; {counted}; the smallest of our plans that take no more than {SLOWER:g} % longer, the thread's "
        f"overhead of ResNet-152; of all, "
        f"{plain / least.peak_bytes:.2f}x at +{least.overhead_percent:.1f} %"
    )
    about = partial(
        about,
        source=ABSTRACT,
        conditions=conditions,
        unit="x",
        ours=Figure(plain / smallest),
        sense="at least",
        kind="modelled",
    )
    return [
        *claims,
        about("translator: footprint, their mean", published=Figure(MEAN)),
        about("translator: footprint, their most", published=Figure(MOST)),
    ]


def all_claims(points: Mapping[str, Sequence[FrontierPoint]]) -> list[Claim]:
    """Return all simulated claims."""
    return [*claims_of_cell(), *claims_of_products(), *claims_of_nets(points)]


def small_run() -> SmallRun:
    """Return a small translator at the abstract's mean footprint, whose overhead nobody published."""
    return SmallRun(
        "experiments.claims.echo.__main__:translator", MEASURED, 1 / MEAN,
        Claim(
            f"translator, batch {MEASURED['batch']}: overhead at their mean footprint", ABSTRACT,
            f"{SIZES['translator']}; measured at batch {MEASURED['batch']}, {MEASURED['words']} words", "%", None, None,
            headline=True, why_not="the abstract states no overhead at its mean footprint",
        ),
    )  # fmt: skip


def draw(measured: Sequence[Claim]) -> None:
    """Draw overhead against footprint."""
    with open_figure(FRONTIER.picture("footprint")) as (axes,):
        for name in NETS:
            points = sorted(FRONTIER.read_points(name), key=lambda point: -point.peak_bytes)
            ratios = [points[0].peak_bytes / point.peak_bytes for point in points]
            axes.plot(ratios, [point.overhead_percent for point in points], "o-", label=name)
        for claim in measured:
            if claim.ours:
                label = f"translator, batch {MEASURED['batch']}, measured"
                axes.plot([MEAN], [claim.ours.value], "r*", markersize=12, label=label)
        axes.axhline(SLOWER, color="k", linewidth=0.8, label="ResNet-152's in the thread")
        for ratio, label in ((MEAN, "their mean"), (MOST, "their most")):
            axes.axvline(ratio, color="k", linewidth=0.8, linestyle=":")
            axes.annotate(label, (ratio, 0), rotation=90, fontsize=7)
        axes.set(xlabel="traced bytes over planned bytes", ylabel="overhead, %, modelled where not measured")
        axes.legend()


FRONTIER = PaperFrontier(HERE, __doc__, NETS, RTX_2080_TI, budgets, all_claims, small_run, draw)
claims = FRONTIER.claims


if __name__ == "__main__":
    FRONTIER.main()
