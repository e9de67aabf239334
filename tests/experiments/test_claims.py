"""Every simulated number of a committed result comes out again, and the nets that they are of are the published ones."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from autotune.ir.plan import Plan
from autotune.predict.simulate import peak_bytes
from autotune.report.claims import Claim, find_experiments, read, write
from experiments.claims.dtr import models as dtr_models
from experiments.claims.echo import __main__ as echo
from experiments.claims.model_olla import __main__ as olla
from experiments.claims.monet import models as monet_models
from experiments.claims.nntrainer_order import __main__ as order
from experiments.common import simulated
from tests.experiments.paths import CLAIMS, ROOT

SIMULATED = ("model_olla", "dtr", "echo", "monet", "nntrainer_order", "sublinear")
"""Seconds to some minutes."""


AGAIN = """
import importlib, pathlib, sys
from autotune.report.claims import write
write(pathlib.Path(sys.argv[1]), importlib.import_module(f"experiments.claims.{sys.argv[2]}.__main__").claims())
"""


def assert_same_claims(regenerated: Sequence[Claim], committed: Sequence[Claim]) -> None:
    """Claims made again are the committed ones, or the first of them."""
    for now, then in zip(regenerated, committed, strict=False):
        assert (now.text, now.verdict, now.published) == (then.text, then.verdict, then.published)
        assert now.kind == then.kind
        assert (now.ours is None) == (then.ours is None)
        if now.ours and then.ours:
            assert now.ours.value == pytest.approx(then.ours.value, rel=1e-3, abs=1e-3), now.text
            assert (now.ours.before or 0.0) == pytest.approx(then.ours.before or 0.0, rel=1e-3), now.text


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_what_was_simulated_comes_out_again(name: str, tmp_path: Path):
    # in a process of its own, as it is run: the tracer finds a model's class by the name of its file
    subprocess.run([sys.executable, "-c", AGAIN, str(tmp_path), name], cwd=ROOT, check=True)
    committed = [claim for claim in read(CLAIMS / name) if claim.kind != "measured"]
    assert len(read(tmp_path)) == len(committed)
    assert_same_claims(read(tmp_path), committed)


BOTH = [
    name
    for name, folder in find_experiments(CLAIMS).items()
    if len({one.kind == "measured" for one in read(folder)}) > 1
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_an_experiment_of_both_makes_what_is_simulated_or_measured_alone(name: str):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.claims.{name}", "--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "--parts [{simulated,measured}" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_smallest_net_of_monet_takes_the_committed_bytes_as_traced():
    code = (
        "from experiments.claims.monet import __main__ as monet; "
        "from experiments.common.simulated import plan_frontier; "
        "print(plan_frontier(monet.MODELS['vgg16'].make, 'vgg16', lambda _: ())[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    stored = simulated.read_rows(CLAIMS / "monet/results/points.csv", simulated.FrontierPoint)
    assert done.stdout.strip() == str(next(point for point in stored if point.net == "vgg16"))


def test_what_must_not_be_mirrored_comes_out_again(tmp_path: Path):
    write(tmp_path, echo.claims_of_cell())
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
