"""What the benchmark of peers says of its numbers, and that its peers train what eager trains."""

import argparse
import itertools
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.measure.interleaving import InterleavedTimes
from autotune.measure.messages import ChildError
from autotune.measure.spec import Spec
from autotune.measure.worker.compare import record_results
from autotune.measure.worker.eager import EagerWorkload
from autotune.measure.worker.reference import Reference, Writer
from autotune.records.measurement import Outcome
from autotune.testing.graphs import training_chain
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.zoo import ZOO
from experiments.benchmarks.frontier import __main__ as run
from experiments.benchmarks.frontier import bench, peers, summary
from experiments.common.commands import UNFINISHED
from tests.workloads.zoo.tiny import TINY


def point(variant: str, kind: str, peak: int, ratio: float | None, **others: Any) -> Any:
    """With the same charge as peak, and right gradients."""
    return summary.VariantPoint(
        "net", variant, kind, peak, peak, ratio=ratio, **{"gradient_error": 0.0, "equal": True, **others}
    )


EAGER = point("eager", "eager", 1000, 1.0)


def test_ours_is_compared_at_no_more_than_a_slack_of_the_peers_bytes():
    found = [EAGER, point("checkpoint", "peer", 600, 1.25), point("a", "ours", 602, 1.0), point("b", "ours", 604, 0.5)]
    at_checkpoint = summary.match_peers(found, "peak")[1]
    assert (at_checkpoint.ours, at_checkpoint.ratio) == ("a", pytest.approx(0.8))


def test_the_plan_for_most_bytes_stands_for_us_and_not_the_one_that_was_fast_by_luck():
    found = [
        EAGER, point("checkpoint", "peer", 600, 1.25), point("a", "ours", 600, 1.2, budget_bytes=600),
        point("b", "ours", 500, 1.1, budget_bytes=500), point("traced", "ours", 990, 0.9),
    ]  # fmt: skip
    assert [match.ours for match in summary.match_peers(found, "peak")] == ["a", "a"]
    assert [match.ours for match in summary.match_peers([EAGER, *found[3:]], "peak")] == ["b"]


def test_a_peer_with_wrong_gradients_is_not_counted():
    wrong = point("aot_eager 0.5", "peer", 100, 0.5, gradient_error=0.7)
    found = [EAGER, wrong, point("a", "ours", 500, 1.1)]
    assert [match.peer for match in summary.match_peers(found, "peak")] == ["eager"]
    assert summary.lowest_peak_ratio(found) == 0.5
    assert (
        summary.lowest_peak_ratio(
            [*found, replace(EAGER, variant="inductor 1", kind="compiler", peak_bytes=500, ratio=None)]
        )
        == 1.0
    )
    assert summary.lowest_peak_ratio([EAGER, replace(wrong, gradient_error=1e-6), found[2]]) == 5.0


def test_gradients_are_wrong_only_beyond_what_rounding_makes_of_eagers_own():
    seen = {"gradient_error": 0.07}
    assert point("inductor 1", "compiler", 100, 0.5, **seen).wrong
    assert not point("inductor 1", "compiler", 100, 0.5, **seen, rounding=0.028).wrong
    assert point("inductor 1", "compiler", 100, 0.5, gradient_error=0.75, rounding=0.028).wrong


def test_gradients_that_are_no_numbers_are_wrong():
    assert point("x", "peer", 100, 0.5, gradient_error=float("nan")).wrong
    assert point("x", "peer", 100, 0.5, gradient_error=float("inf")).wrong


def test_ours_beats_nobody_with_another_bit_than_eagers():
    found = [EAGER, point("a", "ours", 500, 0.5, gradient_error=1e-9, equal=False)]
    assert summary.match_peers(found, "peak")[0].ratio is None


def test_a_peer_below_all_of_ours_leaves_no_mean():
    found = [EAGER, point("checkpoint", "peer", 300, 1.2), point("a", "ours", 500, 0.9)]
    assert summary.geometric_mean(summary.match_peers(found, "peak")) is None


def test_the_mean_is_of_the_same_kernels_and_the_lowest_of_all():
    found = [
        EAGER, point("checkpoint", "peer", 500, 1.6), point("inductor 1", "compiler", 400, 0.4), point("a", "ours", 300, 0.8),
    ]  # fmt: skip
    compared = summary.match_peers(found, "peak")
    assert summary.geometric_mean(summary.same_kernels(compared)) == pytest.approx((0.8 * 0.5) ** 0.5)
    assert summary.lowest_peak_ratio(found) == 0.75


def test_bytes_at_nearly_eagers_time_are_those_of_the_smallest_plan_that_is_no_slower():
    found = [EAGER, point("a", "ours", 800, 1.0), point("b", "ours", 700, 1.03), point("c", "ours", 600, 1.031)]
    assert summary.peak_near_eager_time(found) == 0.7
    lucky = [*found, point("d", "ours", 500, 1.025), point("e", "ours", 400, 1.02)]
    assert summary.peak_near_eager_time(lucky) == 0.4  # all four of 1.0265 on average
    assert summary.peak_near_eager_time([*found, point("d", "ours", 500, 1.2), point("e", "ours", 400, 1.02)]) == 0.7


def test_seconds_of_two_sessions_are_compared_by_their_own_eager():
    def session(variant: str, eager: float, seconds: float) -> dict[str, Any]:
        exact = {kind: {"error": 0.0, "worst": "", "equal": True} for kind in ("loss", "gradients", "buffers")}
        blocks = [
            {"round": r, "variant": name, "seconds": [took, took]}
            for r in range(3)
            for name, took in (("eager", eager), (variant, seconds))
        ]
        return {"errors": {variant: exact}, "failed": {}, "blocks": blocks}

    bytes_seen = {"step_peak_bytes": 10, "step_charged_bytes": 10}
    record = {
        "peers": {"eager": bytes_seen, "checkpoint": bytes_seen, "selective": {"failed": "CRASHED: no"}},
        "ours": {"ours 1": {**bytes_seen, "budget_bytes": 10}},
        "sessions": [session("checkpoint", 1.0, 1.5), session("ours 1", 2.0, 2.4)],
    }
    found = summary.build_points("net", record)
    assert {p.variant: p.ratio for p in found} == {"eager": 1.0, "checkpoint": 1.5, "selective": None, "ours 1": 1.2}
    assert summary.match_peers(found, "charged")[1].ratio == pytest.approx(0.8)
    assert "CRASHED: no" in summary._table(found)[-2]


def test_a_wrong_gradient_of_a_worker_s_results_is_an_error_of_gradients(tmp_path: Path):
    """The names are those that workers give: a renamed result would hide every wrong gradient."""
    workload = WorkloadRef("resnet18", TINY["resnet18"])
    eager = EagerWorkload(Spec(workload, tmp_path, scratch=tmp_path))
    with closing(Writer(tmp_path / "eager")) as right, closing(Writer(tmp_path / "peer")) as wrong:

        def add(name: str, tensor: torch.Tensor) -> None:
            right.add(name, tensor)
            wrong.add(name, tensor + 1 if bench.GRADIENT in name and name.endswith("classifier.1.bias") else tensor)

        record_results(eager, eager.step, add)
    errors = bench.compare_results(Reference(tmp_path / "peer"), Reference(tmp_path / "eager"))
    assert {kind: error["equal"] for kind, error in errors.items()} == {
        "loss": True,
        "gradients": False,
        "parameters": True,
        "buffers": True,
    }
    assert errors["gradients"]["worst"].endswith("classifier.1.bias")


def test_where_bytes_alone_are_known_gradients_are_judged_and_nothing_is_missed():
    wrong = {"error": 0.9, "worst": "gradient.w", "equal": False}
    errors = {"gradients": wrong, "loss": wrong, "buffers": {"error": 0.0, "worst": "", "equal": True}}
    peers = {"eager": {"step_peak_bytes": 10}, "aot_eager 0.1": {"step_peak_bytes": 5, "errors": errors}}
    record = {"peers": peers, "ours": {}, "sessions": []}
    found = summary.build_points("net", record)
    assert [(p.wrong, p.counted, p.remark) for p in found] == [
        (False, False, "not timed yet"),
        (True, False, "not timed yet"),
    ]
    machine = {"silicon": "x", "cores": 2, "memory_bytes": 2**34, "driver": "l", "torch": "2"}
    told = summary.markdown(
        {"net": record | {"machine": machine, "commands": [], "model": "net", "arguments": {}}}, {"net": found}
    )
    assert "| not measured yet |" in told
    assert "- net, aot_eager 0.1: off by 0.9 of gradient.w's norm" in told


def test_the_second_step_after_a_rest_is_left_out_also_where_it_was_measured():
    def blocks(*seconds: float) -> dict[str, Any]:
        return {"blocks": [{"variant": "eager", "round": 0, "seconds": list(seconds)}]}

    assert summary._blocks(blocks(9.0, 1.0, 1.0), "eager") == [([1.0, 1.0], [1.0, 1.0])]
    assert summary._blocks({**blocks(1.0, 1.0), "unmeasured": 2}, "eager") == [([1.0, 1.0], [1.0, 1.0])]


def test_bytes_are_compared_where_they_are_known():
    peer, ours = point("checkpoint", "peer", 600, 1.25), point("a", "ours", 500, 1.0)
    for found in ([replace(peer, charged_bytes=None), ours], [peer, replace(ours, charged_bytes=None)]):
        assert [match.ours for match in summary.match_peers([EAGER, *found], "peak")] == ["a", "a"]
        assert len(summary.match_peers([EAGER, *found], "charged")) == 1 + (found[0].charged_bytes is not None)
    assert {match.ours for match in summary.match_peers([EAGER, *found], "charged")} == {""}


def test_a_lowest_plan_that_fails_leaves_every_other_budget_to_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    class FakePlanBench:
        def __init__(self, *_: object) -> None:
            self.graph = training_chain(2)

        def __enter__(self) -> "FakePlanBench":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def graph_summary(self) -> dict[str, Any]:
            return {}

        def peak(self, plan: Plan) -> dict[str, Any]:
            return {"step_peak_bytes": 2**30}

        def fit(self, name: str, budget: int) -> tuple[Plan, dict[str, Any]]:
            asked.append(budget)
            if not budget:
                raise ChildError(Outcome.CRASHED, "gone")
            return Plan.traced(self.graph), {"budget_bytes": budget, "step_peak_bytes": budget}

    monkeypatch.setattr(run, "PlanBench", FakePlanBench)
    options = argparse.Namespace(tiny=False, again=[], time=900.0, planning=1.0)
    frontier = run.ModelFrontier("resnet50", tmp_path, options, tmp_path)
    frontier.record["peers"]["eager"] = {"step_peak_bytes": 2**30}
    frontier.measure_plans()
    assert asked == [0, *frontier.missing_budgets()]
    assert "failed" in frontier.record["ours"]["lowest"]
    frontier.measure_plans()
    assert asked == [0, *frontier.missing_budgets()]


@pytest.mark.parametrize("part", run.PARTS)
def test_of_three_parts_only_those_that_are_asked_for_are_measured(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    did: list[str] = []
    seen = {"step_peak_bytes": 10}
    monkeypatch.setattr(run.ModelBench, "peer", lambda self, name, seconds: did.append("peers") or seen)
    monkeypatch.setattr(run.ModelBench, "rounding_errors", lambda self, seconds: {})
    monkeypatch.setattr(run.ModelFrontier, "measure_plans", lambda self: did.append("plans"))
    monkeypatch.setattr(run.ModelFrontier, "time_session", lambda self, missing: did.append("seconds"))
    options = argparse.Namespace(tiny=False, again=[], time=900.0, peers=["selective", "checkpoint"], parts=[part])
    frontier = run.ModelFrontier("resnet50", tmp_path, options, tmp_path)
    frontier.record["peers"] |= {"eager": seen, "checkpoint": seen}
    frontier.run()
    assert did == [part]


def make_options(**others: Any) -> argparse.Namespace:
    names = {"peers": ["selective", "checkpoint"], "parts": list(run.PARTS)}
    return argparse.Namespace(**{"tiny": False, "again": [], "time": 900.0, "planning": 1.0, **names, **others})


def test_what_time_was_short_for_is_named_and_what_memory_is_short_for_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    frontier = run.ModelFrontier("resnet50", tmp_path, make_options(), tmp_path)
    frontier.record["peers"] |= {"eager": {"step_peak_bytes": 2**30}, "selective": {"step_peak_bytes": 2**29}}
    left = frontier.find_unmeasured()
    assert left[:3] == ["checkpoint", "traced", "lowest"]
    assert left[3:] == [f"plan for {budget / 2**20:.3f} MiB" for budget in frontier.missing_budgets()]
    frontier.record["peers"]["checkpoint"] = {"failed": "no"}
    frontier.record["ours"] |= {"traced": {}, "lowest": {"step_peak_bytes": 2**30}}
    assert frontier.find_unmeasured() == []
    monkeypatch.setattr(run.ModelFrontier, "time_share", 1.0)
    assert frontier.find_unmeasured() == [f"seconds of {name}" for name in ("selective", "traced", "lowest")]


@pytest.mark.parametrize(("left", "code"), [([], None), (["checkpoint"], UNFINISHED)])
def test_a_run_whose_time_ended_before_its_work_ends_unfinished(
    left: list[str],
    code: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(run.ModelFrontier, "run", lambda self: left)
    monkeypatch.setattr(run, "summarize", lambda out: "")
    monkeypatch.setattr("sys.argv", [run.__file__, "--models", "lstm", "--out", str(tmp_path)])
    if code is None:
        run.main()
        return
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == code
    assert "lstm: checkpoint" in capsys.readouterr().err


def test_results_are_continued_after_a_restart_and_refused_on_another_machine(tmp_path: Path):
    frontier = run.ModelFrontier("resnet50", tmp_path, make_options(), tmp_path)
    frontier.record["peers"]["eager"] = {"step_peak_bytes": 1}
    frontier.write()
    machine = frontier.facts["machine"]
    stored = json.loads(frontier.path.read_text())
    frontier.path.write_text(json.dumps(stored | {"machine": machine | {"driver": "Linux 0.0.1"}}))
    again = run.ModelFrontier("resnet50", tmp_path, make_options(), tmp_path)
    assert again.record["peers"] == frontier.record["peers"]
    frontier.path.write_text(json.dumps(stored | {"machine": machine | {"torch": "1.0"}}))
    with pytest.raises(SystemExit, match="is of another machine"):
        run.ModelFrontier("resnet50", tmp_path, make_options(), tmp_path)


def test_a_crash_between_the_two_files_leaves_no_result_without_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    frontier = run.ModelFrontier("resnet50", tmp_path, make_options(), tmp_path)
    frontier.plans["lowest"] = {}
    monkeypatch.setattr(run, "write_result", lambda *_: pytest.fail("crash"))
    with pytest.raises(pytest.fail.Exception):
        frontier.write()
    assert not frontier.path.exists()
    assert json.loads(frontier.plans_path.read_text()) == {"lowest": {}}


def test_only_what_compiles_may_wait_for_another_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(bench, "interleave", lambda variants, limits, log: asked.update(variants) or InterleavedTimes())
    variants = {"eager": None, "checkpoint": None, "aot_eager 0.5": None, "inductor 1": None, "lowest": Plan(())}
    bench.ModelBench("net", "resnet50", {}, tmp_path).interleave_variants(variants, None)
    assert [name for name, variant in asked.items() if variant.compiles] == ["aot_eager 0.5", "inductor 1"]


def test_ours_and_the_peers_that_are_asked_for_are_timed(tmp_path: Path):
    options = argparse.Namespace(tiny=False, again=[], time=900.0, peers=["selective", "sequential 2"])
    frontier = run.ModelFrontier("resnet50", tmp_path, options, tmp_path)
    seen = {"step_peak_bytes": 10}
    frontier.record["peers"] |= {"eager": seen, "checkpoint": seen, "selective": seen, "sequential 2": {"failed": "no"}}
    frontier.record["ours"] |= {"lowest": seen}
    assert frontier.untimed() == ["selective", "lowest"]


def test_a_budget_within_a_percent_of_a_smaller_one_gets_no_plan_of_its_own():
    assert run.thin_budgets([1000, 500, 504, 508, 1200], 1000) == [1000, 508, 500]


def test_plans_are_forgotten_with_their_seconds_and_peers_keep_theirs():
    blocks = [{"variant": name, "round": 0, "seconds": [1.0]} for name in ("eager", "checkpoint", "lowest")]
    session = {"blocks": blocks, "errors": {"checkpoint": {}, "lowest": {}}, "failed": {}}
    record = {"peers": {"eager": {}, "checkpoint": {}}, "ours": {"lowest": {}}, "sessions": [session]}
    run.drop_results(record, ["plans"])
    assert record["ours"] == {}
    assert list(session["errors"]) == ["checkpoint"]
    assert [block["variant"] for block in session["blocks"]] == ["eager", "checkpoint"]


FORMS = [name for name, peer in peers.PEERS.items() if not isinstance(peer, peers.Compiled)]
ARGUMENTS = {
    "gpt2": {**TINY["gpt2"], "depth": 9, "dropout": 0.1},
    "lstm": {**TINY["lstm"], "tokens": 25, "dropout": 0.1},
    "bert": {**TINY["bert"], "depth": 9, "dropout": 0.1},
    "vit": {**TINY["vit"], "depth": 9},
    "resnet50": {**TINY["resnet50"], "depth": 3},
    "mobilenet_v2": TINY["mobilenet_v2"],
}
LEFT_OUT = {
    ("sequential sqrt", "mobilenet_v2"),  # see below
    ("selective", "lstm"),  # the cell adds to a product in place, which torch refuses to keep
}


@pytest.mark.parametrize(("form", "model"), sorted({*itertools.product(FORMS, ARGUMENTS)} - LEFT_OUT))
def test_every_form_of_checkpoint_trains_what_eager_trains(form: str, model: str):
    given = ZOO[model](**ARGUMENTS[model])
    way = peers.PEERS[form].build(given)
    expected = _gradients(given, given.loss_fn)
    calls = _checkpoints(given)
    with way.active():
        found = _gradients(given, way.loss_fn)
        saved = _checkpoints(given)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert saved < calls


def test_a_workload_that_stays_still_trains_like_eager_and_keeps_its_parameters():
    given = peers.workload("eager", "resnet50", still=True, **ARGUMENTS["resnet50"])
    before = {name: parameter.clone() for name, parameter in given.model.named_parameters()}
    expected = _gradients(ZOO["resnet50"](**ARGUMENTS["resnet50"]), given.loss_fn)
    found = _gradients(given, given.loss_fn)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    given.optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in given.model.named_parameters())


def test_a_rounded_eager_is_off_by_one_ulp_at_most():
    given = dict(ZOO["vit"](**ARGUMENTS["vit"]).model.named_parameters())
    rounded = dict(peers.workload(peers.ROUNDED, "vit", **ARGUMENTS["vit"]).model.named_parameters())
    ulps = [(rounded[name].view(torch.int32) - given[name].view(torch.int32)).abs() for name in given]
    nonzero = [(given[name] != 0) for name in given]
    assert {int(n) for one, some in zip(ulps, nonzero, strict=True) for n in one[some].unique()} == {0, 1}


def test_the_root_of_sixteen_blocks_is_left_out_as_another_peer():
    given = ZOO["mobilenet_v2"](**ARGUMENTS["mobilenet_v2"])
    with pytest.raises(ConfigError, match="the same as sequential 4"):
        peers.PEERS["sequential sqrt"].build(given)


def _gradients(given: Any, loss_fn: Any) -> dict[str, torch.Tensor]:
    given.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss_fn(given.model, given.batch).backward()
    return {name: parameter.grad.clone() for name, parameter in given.model.named_parameters()}


def _checkpoints(given: Any) -> int:
    """Bytes that a forward saves for its backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = given.loss_fn(given.model, given.batch)
    del loss
    return sum(kept.values())
