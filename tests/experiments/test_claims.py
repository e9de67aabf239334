"""Simulated numbers of the committed results come out again, and the nets that they are of are the published ones."""

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from autotune.ir.plan import Plan
from autotune.predict.simulate import peak_bytes
from autotune.report.claims import Claim, find_experiments, link_paper, link_source, read, write
from experiments.claims.dtr import __main__ as dtr
from experiments.claims.dtr import models as dtr_models
from experiments.claims.echo import __main__ as echo
from experiments.claims.model_olla import __main__ as olla
from experiments.claims.monet import __main__ as monet
from experiments.claims.monet import models as monet_models
from experiments.claims.nntrainer_order import __main__ as order
from experiments.claims.sublinear import __main__ as sublinear
from experiments.common import simulated
from experiments.common.simulated import read_rows
from tests.experiments.paths import CLAIMS

FRONTIERS = {"dtr": dtr.FRONTIER, "echo": echo.FRONTIER, "monet": monet.FRONTIER}


def assert_same_claims(regenerated: Sequence[Claim], committed: Sequence[Claim]) -> None:
    """Claims made again are the committed ones, or the first of them."""
    for now, then in zip(regenerated, committed, strict=False):
        assert (now.text, now.verdict, now.published) == (then.text, then.verdict, then.published)
        assert now.kind == then.kind
        assert (now.ours is None) == (then.ours is None)
        if now.ours and then.ours:
            assert now.ours.value == pytest.approx(then.ours.value, rel=1e-3, abs=1e-3), now.text
            assert (now.ours.before or 0.0) == pytest.approx(then.ours.before or 0.0, rel=1e-3), now.text


def points_of(name: str) -> dict[str, list[simulated.FrontierPoint]]:
    """Return the committed points of an experiment, by network."""
    return {net: FRONTIERS[name].read_points(net) for net in FRONTIERS[name].networks}


FROM_POINTS: dict[str, Callable[[], Sequence[Claim]]] = {
    "dtr": lambda: dtr.all_claims(points_of("dtr")),
    "echo": lambda: echo.claims_of_nets(points_of("echo")),
    "monet": lambda: monet.all_claims(points_of("monet")),
    # ResNet-152 at batch 16 has no points
    "sublinear": lambda: sublinear.claims_of(read_rows(sublinear.POINTS, sublinear.DepthPoint), (1.0, 1.0, 0.0))[:-2],
}
"""The claims that rest on points files."""


@pytest.mark.parametrize("name", FROM_POINTS)
def test_committed_claims_are_those_of_the_committed_points(name: str, tmp_path: Path):
    write(tmp_path, FROM_POINTS[name]())
    committed = [claim for claim in read(CLAIMS / name) if claim.kind != "measured"]
    others = {"echo": 4, "sublinear": 2}.get(name, 0)  # the cell, the products, ResNet-152
    assert len(read(tmp_path)) == len(committed) - others
    by_text = {claim.text: claim for claim in committed}
    assert_same_claims(read(tmp_path), [by_text[claim.text] for claim in read(tmp_path)])


# `autotune reproduce --all` makes all of them again, in an hour; here the smallest network of each experiment
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "net", "budget"), [("dtr", "transformer", 1), ("echo", "translator", 2), ("monet", "vgg16", 2)]
)
def test_the_smallest_network_takes_the_committed_bytes_and_time(name: str, net: str, budget: int):
    experiment = FRONTIERS[name]
    regenerated = simulated.plan_frontier(
        experiment.networks[net],
        net,
        lambda traced_bytes: [list(experiment.budgets(net, traced_bytes))[budget]],
        experiment.card,
    )
    committed = experiment.read_points(net)
    assert regenerated == [committed[0], committed[1 + budget]]


@pytest.mark.long
def test_the_shallowest_network_of_sublinear_takes_the_committed_bytes_and_time():
    committed = read_rows(sublinear.POINTS, sublinear.DepthPoint)
    layers = min(sublinear.STAGES)
    assert sublinear.depth_points(layers) == [point for point in committed if point.layers == layers]


@pytest.mark.long
def test_every_number_of_model_olla_comes_out_again(tmp_path: Path):
    write(tmp_path, olla.claims())
    committed = read(CLAIMS / "model_olla")
    assert len(read(tmp_path)) == len(committed)
    assert_same_claims(read(tmp_path), committed)


@pytest.mark.long
def test_the_orders_of_nntrainer_come_out_again(tmp_path: Path):
    unfolded = order.reorder_bottlenecks(*order.capture_inference(folded=False))[1]
    inference = order.claims_of_inference(*order.reorder_bottlenecks(*order.capture_inference()), unfolded)
    training = order.claims_of_training(order.simulate_training(*order.capture_training(), ["and in place"]))
    write(tmp_path, [*order.claims_of_bottleneck(), *inference, *training])
    committed = [
        claim for claim in read(CLAIMS / "nntrainer_order") if "training" not in claim.text or "in place" in claim.text
    ]
    assert len(read(tmp_path)) == len(committed)
    assert_same_claims(read(tmp_path), committed)


BOTH = [
    name
    for name, folder in find_experiments(CLAIMS).items()
    if len({one.kind == "measured" for one in read(folder)}) > 1
]


@pytest.mark.parametrize("name", BOTH)
def test_an_experiment_of_both_makes_what_is_simulated_or_measured_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CLAIMS / name / "__main__.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "--parts [{simulated,measured}" in " ".join(capsys.readouterr().out.split())


def test_what_must_not_be_mirrored_or_run_again_comes_out_again(tmp_path: Path):
    write(tmp_path, [*echo.claims_of_cell(), *echo.claims_of_products()])
    assert_same_claims(read(tmp_path), read(CLAIMS / "echo"))


def test_the_thread_s_two_sorts_come_out_row_by_row():
    graph, costs = order.build_bottleneck()
    for names, table in order.TABLES.items():
        rows = order.build_table(graph, costs, names)
        assert [row.op for row in rows] == names.split()
        assert tuple((row.memory_bytes, row.peak_bytes) for row in rows) == table


def test_a_mirrored_cell_keeps_two_feature_maps_for_one():
    graph, costs = echo.recurrent()
    plan = echo.mirrored(graph)
    assert plan.recomputed == echo.STEPS - 1
    assert echo.mirrors(graph, plan) == echo.STEPS - 1
    assert echo.mirrors(graph, Plan.traced(graph)) == 0
    assert peak_bytes(graph, plan, costs) > 1.9 * peak_bytes(graph, Plan.traced(graph), costs)


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (olla.alexnet, 61_100_840),
        (monet_models.vgg16, 138_357_544),
        (monet_models.GoogLeNet, 13_004_888),
        (monet_models.mobilenet_v2, 3_504_872),
        (dtr_models.densenet121, 7_978_856),
    ],
)
def test_a_net_has_the_published_number_of_parameters(make, parameters: int):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == parameters


@pytest.mark.parametrize("name", find_experiments(CLAIMS))
def test_every_claim_links_its_source_and_one_of_a_paper_the_paper(name: str):
    for claim in read(CLAIMS / name):
        assert link_source(claim.source), claim.source
        is_of_paper = "et al." in claim.source or name in ("echo", "sublinear")
        assert not is_of_paper or link_paper(claim.source), claim.source
