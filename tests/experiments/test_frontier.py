"""What the benchmark of peers says of its numbers, and that its peers train what eager trains."""

import argparse
import itertools
import json
import sys
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.measure.interleaving import InterleavedTimes
from autotune.measure.spec import Spec
from autotune.measure.worker.compare import record_results
from autotune.measure.worker.eager import EagerWorkload
from autotune.measure.worker.reference import Reference, Writer
from autotune.planners import KINDS
from autotune.planners.auto import best_plan
from autotune.planners.space import build_space
from autotune.study.verdicts.statistics import Interval
from autotune.testing.graphs import training_chain
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.frontier import __main__ as run
from experiments.benchmarks.frontier import bench, models, peers, records, summary
from experiments.benchmarks.frontier.ours import Capture, plan_at_once
from tests.workloads.zoo.tiny import TINY

FACTS = {"machine": {"silicon": "a chip"}, "commit": "c", "date": "d", "load_before": 0.0, "command": "x"}


def plan(peak: int, *, equal: bool = True, seconds: float | None = 1.0) -> dict[str, Any]:
    estimate = {} if seconds is None else {"estimate": {"seconds": seconds, "peak_bytes": peak}}
    return {"step_peak_bytes": peak, "equal_to_traced": equal, **estimate}


def peer(peak: int, error: float = 0.0) -> dict[str, Any]:
    return {"step_peak_bytes": peak, "errors": {"gradients": {"error": error, "worst": "step 0.gradient w"}}}


def record(plans: dict[str, Any], peers: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """Eager takes 1 s in each of eight rounds, and every other variant its seconds."""
    blocks = [
        {"round": number, "variant": variant, "seconds": [taken]}
        for number in range(8)
        for variant, taken in (("eager", 1.0), *seconds.items(), ("eager", 1.0))
    ]
    captures = {"ours aten": {"bound_bytes": 100}, "ours inductor": {"bound_bytes": 50}}
    return {
        "peers": {"eager": {"step_peak_bytes": 1000}} | peers, "plans": plans, "captures": captures,
        "sessions": [{"blocks": blocks, "failed": {}}],
    }  # fmt: skip


def test_the_plan_for_most_bytes_stands_for_its_capture_and_the_faster_capture_for_us():
    plans = {
        "ours aten 1": plan(600), "ours aten 2": plan(500), "ours inductor 1": plan(590), "ours inductor 2": plan(900),
        "ours inductor wrong": plan(595, equal=False),
    }  # fmt: skip
    seconds = {
        "ours aten 1": 1.0, "ours aten 2": 0.5, "ours inductor 1": 0.9, "ours inductor 2": 0.7, "ours inductor wrong": 0.1,
        "inductor 1": 1.0, "inductor 1 glibc": 1.8,
    }  # fmt: skip
    at_eager, at_peer = records.compare("net", record(plans, {"inductor 1": peer(600)}, seconds))
    assert (at_eager.peer, at_eager.ours, at_eager.ratio.middle) == ("eager", "ours inductor 2", 0.7)
    assert (at_peer.ours, at_peer.ratio.middle) == ("ours inductor 1", pytest.approx(0.9))
    assert at_peer.ratio.samples == 8
    assert at_peer.ratio_glibc.middle == pytest.approx(0.5)
    assert at_eager.ratio_glibc is None


def test_the_fastest_capture_of_a_round_is_that_of_the_other_rounds():
    plans = {"ours aten 1": plan(600), "ours inductor 1": plan(590)}
    document = record(plans, {"checkpoint": peer(600)}, {"ours aten 1": 0.9, "ours inductor 1": 1.0, "checkpoint": 1.0})
    lucky = next(block for block in document["sessions"][0]["blocks"] if block["variant"] == "ours inductor 1")
    lucky["seconds"] = [0.1]
    pair = records.compare("net", document)[1]
    assert (pair.ours, pair.ratio.low, pair.ratio.high) == ("ours aten 1", 0.9, 0.9)


def test_a_method_is_compared_in_its_faster_memory_format_beside_plans_of_the_same_session():
    plans = {"ours aten 1": plan(600), "ours aten 2": plan(603)}
    peers_found = {"checkpoint": peer(600), "checkpoint channels_last": peer(602), "eager channels_last": peer(1100)}
    document = record(plans, peers_found, {"ours aten 1": 0.9, "checkpoint": 1.2})
    assert records.runs_in_more_formats(document | {"plans": {"ours aten channels_last 1": plan(1)}}) is False
    later = record(
        plans, {}, {"ours aten 1": 0.9, "ours aten 2": 0.8, "checkpoint channels_last": 1.0, "eager channels_last": 0.7}
    )
    document["sessions"] += later["sessions"]
    ratios = {pair.peer: pair.ratio.middle for pair in records.compare("net", document)}
    assert ratios == {"eager channels_last": pytest.approx(0.8 / 0.7), "checkpoint channels_last": pytest.approx(0.8)}
    assert "checkpoint" not in records.find_unmatched(document)


def test_plans_in_a_format_that_no_peer_was_timed_in_are_told_apart():
    plans = {"ours aten channels_last 1": plan(600)}
    document = record(plans, {"checkpoint": peer(700)}, {"ours aten channels_last 1": 0.5, "checkpoint": 1.0})
    document["captures"] = {"ours aten channels_last": {"bound_bytes": 1}}
    others = record({"ours aten 1": plan(600)}, {"checkpoint": peer(700)}, {"ours aten 1": 0.9, "checkpoint": 1.0})
    found = {"net": document, "text": others}
    text = summary.describe_targets(summary.compare_all(found), found)
    assert "Plans also run in channels_last and the peers do not: net. The mean of these is 0.500." in text
    (first, *_) = summary.readme_rows(found)
    assert first.endswith(
        "mean of 4 comparisons on 2 models | 0.67 of its time (0.50 on 1 network where plans alone ran in channels_last) |"
    )


def test_only_blocks_of_one_round_of_one_session_are_compared_and_failed_variants_not_at_all():
    first = record({"ours aten 1": plan(600)}, {"a": peer(600), "b": peer(600)}, {"ours aten 1": 0.5, "a": 1.0})
    second = record({}, {}, {"b": 2.0})
    document = first | {"sessions": [first["sessions"][0], second["sessions"][0]]}
    assert [pair.peer for pair in records.compare("net", document)] == ["eager", "a"]
    assert records.time_ratio(document, "b").middle == 2.0
    del first["sessions"][0]["blocks"][1]  # the plan's first block
    assert records.compare("net", document)[1].ratio.samples == 7
    first["sessions"][0]["failed"] = {"a": "out of memory"}
    assert [pair.peer for pair in records.compare("net", document)] == ["eager"]
    assert "out of memory" in summary._model_table("net", document | FACTS)


def test_times_of_two_sessions_are_compared_beside_eager_with_the_farthest_ends():
    """Glibc's malloc where memory was short for all in one session: the plan's 0.5 against the peer's 2.0."""
    first = record({"ours aten 1": plan(600)}, {"a": peer(600)}, {"ours aten 1": 0.5, "a": 1.0})
    second = record({}, {}, {"a glibc": 2.0})
    second["sessions"][0]["blocks"][1]["seconds"] = [2.5]
    document = first | {"sessions": [first["sessions"][0], second["sessions"][0]]}
    pair = records.compare("net", document)[1]
    low, high = (0.5 / end for end in (records.time_ratio(document, "a glibc").high, 2.0))
    assert pair.ratio_glibc == Interval(0.25, low, high)
    assert "Without a number of blocks" in summary._pair_table([pair])


def test_a_variant_that_found_too_little_memory_is_timed_once_more():
    first, second = (record({}, {}, {"a": 1.0, "b": 1.0}) for _ in range(2))
    first["sessions"][0]["failed"] = {"a": "out_of_memory: killed", "b": "crashed: no", "c": "out_of_memory: killed"}
    assert records.timed_variants(first) == {"eager", "b"}
    second["sessions"][0]["failed"] = {"c": "out_of_memory: killed"}
    both = first | {"sessions": [first["sessions"][0], second["sessions"][0]]}
    assert records.timed_variants(both) == {"eager", "a", "b", "c"}


def test_a_peer_without_a_pair_is_named_beside_the_mean_with_the_reason():
    peers = {"a": peer(300), "b": peer(300), "c": peer(700), "d": peer(700), "e": {"failed": "crashed: no\ntrace"}}
    document = record({"ours aten 1": plan(600)}, peers, {"ours aten 1": 1.0, "a": 1.0, "b": 1.0})
    document["sessions"][0]["failed"] = {"d": "out_of_memory: killed"}
    assert records.find_unmatched(document) == {
        "a": "no timed plan is as small",
        "b": "no timed plan is as small",
        "c": "not timed with tcmalloc",
        "d": "out_of_memory: killed",
        "e": "crashed: no\ntrace",
    }
    assert records.find_unmatched(document | {"sessions": []}) == {}
    text = summary.describe_targets(records.compare("net", document), {"net": document})
    assert "geometric mean of 1 medians 1.000" in text
    assert "Not in that mean (no timed plan is as small): a on net, b on net." in text
    assert "Not in that mean (crashed: no): e on net." in text
    assert "| e |  |  |  | crashed: no |" in summary._model_table("net", document | FACTS)


def test_a_peer_with_wrong_gradients_is_not_counted():
    document = record(
        {"ours aten 1": plan(500)},
        {"inductor 1": peer(300, 0.9), "checkpoint": peer(800)},
        {"inductor 1": 1.0, "ours aten 1": 1.0, "checkpoint": 1.0},
    )
    assert [pair.peer for pair in records.compare("net", document)] == ["eager", "checkpoint"]
    assert records.compare_lowest(document) == (500 / 800, 50 / 800)
    assert [point.right for point in records.build_points(document)] == [True, False, True, True]


def test_gradients_are_wrong_only_beyond_what_rounding_makes_of_eagers_own():
    document = record({}, {"inductor 1": peer(600, 0.07)}, {})
    assert records.is_wrong(document, "inductor 1")
    rounding = {"gradients": {"error": 0.028, "worst": "step 0.gradient w"}}
    assert not records.is_wrong(document | {"rounding": rounding}, "inductor 1")
    assert records.is_wrong(record({}, {"x": peer(600, float("nan"))}, {}) | {"rounding": rounding}, "x")
    assert records.is_wrong(record({}, {"x": peer(600, float("inf"))}, {}) | {"rounding": rounding}, "x")


def test_a_lowest_peak_above_the_target_is_excused_by_the_bound_alone():
    def lowest(ours: int, bound: int) -> dict[str, Any]:
        captures = {"ours aten": {"bound_bytes": bound}}
        return {**record({"ours aten lowest": plan(ours)}, {}, {}), "captures": captures, "sessions": []}

    text = summary.describe_targets([], {"a": lowest(600, 100), "b": lowest(700, 650), "c": lowest(700, 500)})
    assert [line.split("target 0.60, ")[1].split(";")[0] for line in text.splitlines()] == [
        "met",
        "proved impossible on these graphs",
        "missed",
    ]


def test_bytes_at_nearly_eagers_time_are_those_of_the_smallest_plan_that_is_no_slower():
    def near(seconds: dict[int, float]) -> float | None:
        names = {f"ours aten {peak}": peak for peak in seconds}
        document = record(
            {name: plan(peak) for name, peak in names.items()}, {}, {f"ours aten {p}": s for p, s in seconds.items()}
        )
        return records.peak_near_eager_time(document)

    found = {800: 1.0, 700: 1.03, 600: 1.031}
    assert near(found) == 0.7
    assert near({**found, 500: 1.025, 400: 1.02}) == 0.4  # all four of 1.0265 on average
    assert near({**found, 500: 1.2, 400: 1.02}) == 0.7
    assert near({900: 1.2}) is None


def test_nearly_eagers_time_is_that_of_eager_in_its_faster_memory_format():
    eager = "eager channels_last"
    plans = {"ours aten 700": plan(700), "ours inductor 500": plan(500)}
    taken = {eager: 0.8, "ours aten 700": 0.82, "ours inductor 500": 0.9}
    document = record(plans, {eager: peer(875)}, taken)
    assert records.peak_near_eager_time(document) == 0.8  # 700 of 875 bytes; the other takes 1.125 of the time
    ours = {"ours aten 700": 0.83, "ours inductor 500": 1.0}
    elsewhere = record(plans, {eager: peer(875)}, ours)["sessions"]  # a session without eager in channels_last
    document["sessions"] = [*record({}, {}, {eager: 0.8})["sessions"], *elsewhere]
    assert records.peak_near_eager_time(document) is None
    assert "net: no plan takes at most 1.03 times the time of eager in channels_last" in summary.describe_targets(
        [], {"net": document}
    )
    row = summary.readme_rows({"net": document, "other": record({"ours aten 1": plan(600)}, {}, {"ours aten 1": 1.0})})
    assert "0.60 to 0.60 of its peak; no plan is as fast on net |" in row[-1]


def test_plans_are_timed_that_may_be_the_fastest_within_a_budget_and_the_lowest():
    plans = {
        "ours aten a": plan(590, seconds=1.0), "ours inductor a": plan(595, seconds=1.02),
        "ours aten b": plan(390, seconds=1.2), "ours inductor b": plan(400, seconds=1.3),
        "ours aten lowest": plan(200, seconds=3.0), "ours aten wrong": plan(100, equal=False), "ours aten traced": plan(300, seconds=None),
    }  # fmt: skip
    assert set(records.fast_plans(record(plans, {}, {}))) == {
        "ours aten a", "ours inductor a", "ours aten b", "ours inductor b", "ours aten lowest",
    }  # fmt: skip
    plans["ours inductor b"] = plan(400, seconds=1.2 * records.OTHER_KERNELS + 0.01)
    assert "ours inductor b" not in records.fast_plans(record(plans, {}, {}))


def test_a_budget_within_a_percent_of_a_smaller_one_gets_no_plan_of_its_own():
    document = record({}, {"a": peer(500), "b": peer(504), "c": peer(508), "d": {"failed": "no"}}, {})
    assert records.make_budgets(document) == [1000, 508, 500]
    assert records.make_budgets(document, (0.6,)) == [1000, 597, 508, 500]


def test_budgets_that_are_planned_at_once_get_the_plans_of_their_own_in_order(monkeypatch: pytest.MonkeyPatch):
    # new processes import the main module, and tests of the dashboard leave a page of it there
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    graph = training_chain(8)
    costs, space = Costs.unit(graph), build_space(KINDS, ())
    alone = best_plan(graph, costs, 0, space)
    budgets = [2 * alone.estimate.peak_bytes, alone.estimate.peak_bytes, 0]
    planned = [*plan_at_once(graph, costs, budgets, space, seconds=60)]
    assert [candidate.plan for candidate in planned] == [best_plan(graph, costs, b, space).plan for b in budgets]
    assert planned[0].plan != planned[1].plan


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


def make_model(tmp_path: Path, **others: Any) -> run.ModelFrontier:
    names = {"peers": ["selective", "inductor 1"], "parts": list(run.PARTS)}
    options = argparse.Namespace(**{"tiny": True, "again": [], "rounds": 2, "anyway": True, **names, **others})
    return run.ModelFrontier("resnet50", tmp_path, options, tmp_path)


def test_eager_and_the_peers_that_run_are_timed_with_both_allocators_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model(tmp_path)
    model.record["peers"] |= {
        "eager": peer(10) | {"floor_bytes": 10},
        "checkpoint": peer(10),
        "selective": peer(10),
        "inductor 1": {"failed": "no"},
    }
    monkeypatch.setattr(run, "find_tcmalloc", lambda: "libtcmalloc.so")
    asked: list[dict[str, Any]] = []

    def interleave(variants: dict[str, Any], limits: Any, log: Any) -> InterleavedTimes:
        asked.append(variants)
        blocks = [{"round": 0, "variant": name, "seconds": [1.0]} for name in ("eager", "selective")]
        return InterleavedTimes(blocks, failed={"eager glibc": "no"})

    monkeypatch.setattr(run, "interleave", interleave)
    model.options.parts = ["seconds"]
    model.run()
    assert [list(variants) for variants in asked] == [
        ["eager", "selective", "eager glibc", "selective glibc"],
        ["eager", "selective glibc"],
    ]
    environments = {name: variant.start.args[2] for name, variant in asked[0].items()}
    assert [name for name, environment in environments.items() if not environment["LD_PRELOAD"]] == [
        "eager glibc",
        "selective glibc",
    ]
    assert json.loads(model.path.read_text())["sessions"][0]["commit"] == model.record["commit"]


def test_peers_in_channels_last_are_timed_in_a_session_of_their_own_beside_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model(tmp_path, parts=["seconds"])
    other = f"selective{records.CHANNELS_LAST}"
    model.record["peers"] |= {"eager": peer(600) | {"floor_bytes": 400}, "selective": peer(590), other: peer(590)}
    model.record["captures"] = {"ours aten": {}}
    model.record["plans"] = {"ours aten a": plan(590)}
    monkeypatch.setattr(run, "find_tcmalloc", lambda: "libtcmalloc.so")
    monkeypatch.setattr(model, "make_variant", lambda name, scratch: name)
    asked: list[list[str]] = []

    def interleave(variants: dict[str, Any], limits: Any, log: Any) -> InterleavedTimes:
        asked.append([*variants])
        return InterleavedTimes([{"round": 0, "variant": name, "seconds": [1.0]} for name in variants])

    monkeypatch.setattr(run, "interleave", interleave)
    model.run()
    assert asked == [
        ["eager", "ours aten a", "selective", "eager glibc", "selective glibc"],
        ["eager", "ours aten a", other, f"{other} glibc"],
    ]


def test_a_peer_in_channels_last_runs_its_method_in_that_format_and_is_compared_with_eager_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model(tmp_path)
    variant = model.make_variant(f"selective{records.CHANNELS_LAST}", tmp_path)
    spec = variant.start.args[0]
    assert (spec.workload.arguments["peer"], spec.workload.arguments["memory_format"]) == ("selective", "channels_last")
    workload = peers.workload("selective", "resnet50", memory_format="channels_last", **TINY["resnet50"])
    weights = [parameter for parameter in workload.model.parameters() if parameter.ndim == 4 and parameter.shape[2] > 1]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    ran: list[str] = []
    monkeypatch.setattr(model.bench, "results", lambda name, seconds, still: ran.append(name))
    monkeypatch.setattr(bench, "Reference", lambda path: path.name)
    distances = {"results-eager-still": 0.1, "results-eager channels_last-still": 0.2}
    monkeypatch.setattr(
        bench,
        "compare_results",
        lambda results, expected: {"gradients": {"error": distances[expected], "worst": results}},
    )
    monkeypatch.setattr(bench.shutil, "rmtree", lambda path: None)
    errors_by_peer = {
        name: model.bench.errors(name, 1.0) for name in ("selective", "selective channels_last", "eager channels_last")
    }
    assert {name: errors["gradients"]["error"] for name, errors in errors_by_peer.items()} == dict.fromkeys(
        errors_by_peer, 0.1
    )
    assert ran == ["eager", "eager", "eager channels_last", "eager"]
    distances["results-eager channels_last-still"] = 0.05
    assert model.bench.errors("selective channels_last", 1.0)["gradients"]["error"] == 0.05
    assert model.bench.errors("eager channels_last", 1.0)["gradients"]["error"] == 0.1


def limit_processes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the machine have memory for so many processes of 1000 bytes."""
    total = count * 1000 / run.MEMORY_SHARE + 1
    monkeypatch.setattr(run.psutil, "virtual_memory", lambda: argparse.Namespace(total=total))


def test_plans_on_both_kinds_of_kernels_are_timed_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model(tmp_path)
    model.record["peers"] = {"eager": peer(600) | {"floor_bytes": 400}}
    model.record["captures"] = {"ours aten": {}, "ours inductor": {}}
    model.record["plans"] = {
        "ours aten a": plan(590, seconds=1.0), "ours inductor a": plan(595, seconds=1.02),
        "ours aten lowest": plan(200, seconds=3.0),
    }  # fmt: skip
    chosen = []
    for processes in (6, 5):
        limit_processes(monkeypatch, processes)
        chosen.append(set(model.choose_plans(2)))
    assert chosen == [set(model.record["plans"])] * 2


def test_where_memory_is_short_plans_for_fewer_budgets_are_timed_the_largest_and_the_smallest_among_them():
    names = {f"ours {kernels} {size}": plan(size) for kernels in ("aten", "inductor") for size in (600, 500, 400, 300)}
    document = record(names, {}, {}) | {"captures": {"ours aten": {}, "ours inductor": {}}}
    thinned = records.thin_plans(document, list(names), 2)
    assert thinned == [f"ours {kernels} {size}" for kernels in ("aten", "inductor") for size in (600, 400, 300)]


def test_beside_peers_in_channels_last_plans_in_channels_last_are_timed_whatever_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model(tmp_path)
    model.record["peers"] = {"eager": peer(600) | {"floor_bytes": 400}}
    model.record["captures"] = {"ours aten": {}, "ours aten channels_last": {}}
    model.record["plans"] = {
        "ours aten a": plan(590, seconds=1.0), "ours aten channels_last a": plan(595, seconds=1.1),
        "ours aten lowest": plan(200, seconds=3.0),
    }  # fmt: skip
    chosen = []
    for processes in (6, 4):
        limit_processes(monkeypatch, processes)
        chosen.append((model.choose_plans(2), model.choose_plans(2, " channels_last")))
    both, alone = ["ours aten a", "ours aten lowest"], ["ours aten channels_last a"]
    assert chosen == [(both, alone + both), (both, alone)]


def test_only_what_compiles_may_wait_for_another_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "find_tcmalloc", lambda: "libtcmalloc.so")
    model = make_model(tmp_path)
    names = ("eager", "checkpoint", "aot_eager 0.5", "inductor 1", "inductor 1 glibc")
    assert [name for name in names if model.make_variant(name, tmp_path).compiles] == list(names[2:])


def test_stored_parts_keep_their_commit_and_plans_of_another_graph_are_refused(tmp_path: Path):
    model = make_model(tmp_path)
    model.record |= record({"ours aten lowest": plan(10)}, {}, {}) | {"commit": "older"}
    model.record["captures"] = {"ours aten": {"digest": "a", "rebuild_price": 4.0}}
    model.write()
    again = make_model(tmp_path)
    parts = (*again.record["peers"].values(), *again.record["plans"].values(), *again.record["sessions"])
    assert {part["commit"] for part in parts} == {"older"}
    assert again.record["commit"] != "older"
    again.keep_capture(Capture(), {"digest": "a"})
    with pytest.raises(SystemExit, match="are of another graph; run the command with --again plans"):
        again.keep_capture(Capture(), {"digest": "b"})


def test_plans_of_the_low_rebuild_price_are_made_for_all_budgets_but_not_beside_times_without_them(tmp_path: Path):
    model = make_model(tmp_path)
    model.record |= record({}, {"checkpoint": {"step_peak_bytes": 600}}, {})
    usual, low = Capture("inductor"), Capture("inductor", rebuild_price=run.LOW_PRICE)
    model.record["sessions"] = []
    assert model.choose_budgets(low) == model.choose_budgets(usual) != []
    model.record["sessions"] = [{"blocks": [], "failed": {}}]
    assert model.choose_budgets(low) == []
    assert model.choose_budgets(usual) != []


def test_plans_are_forgotten_with_their_seconds_and_peers_keep_their_bytes(tmp_path: Path):
    model = make_model(tmp_path)
    model.record |= record({"ours aten lowest": plan(10)}, {}, {})
    model.forget("plans")
    assert (model.record["plans"], model.record["captures"], model.record["sessions"]) == ({}, {}, [])
    assert "eager" in model.record["peers"]


SMALLEST = {name: arguments | ({"depth": 1} if "depth" in arguments else {}) for name, arguments in models.TINY.items()}
"""Arguments for models that are traced: of one layer, where their number can be chosen."""


@pytest.mark.parametrize("name", models.TINY)
def test_torch_compile_trains_a_model_that_the_zoo_lacks_as_eager_does(name: str):
    torch._dynamo.reset()
    given = models.FACTORIES[name](**SMALLEST[name])
    expected = _gradients(given, given.loss_fn)
    found = _gradients(given, peers.PEERS["aot_eager 0.5"].build(given).loss_fn)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-5) for name in expected)


@pytest.mark.parametrize("name", models.TINY)
def test_a_model_that_the_zoo_lacks_is_captured_bit_for_bit_by_its_reference(name: str):
    reference = models.workload_reference(name)
    assert reference.endswith(f"models:{name}")
    first, second = (capture(models.FACTORIES[name](**SMALLEST[name]), reference).graph for _ in range(2))
    assert first.digest == second.digest
    assert peers.blocks(models.FACTORIES[name](**models.TINY[name]).model)


def test_committed_results_are_of_known_models_and_their_summary_is_current():
    for folder in sorted(path.parent for path in (Path(run.__file__).parent / "results").glob("*/summary.md")):
        paths = sorted(folder.glob("*.json"))
        assert paths
        assert {path.stem for path in paths} <= set(models.MODELS)
        found = {path.stem: json.loads(path.read_text()) for path in paths}
        assert (folder / "summary.md").read_text() == summary.format_summary(found)


def test_a_model_of_two_machines_counts_once_by_its_latest_times(tmp_path: Path):
    timed, untimed = ({"sessions": sessions, "date": "2"} for sessions in ([1], []))
    stored = {"a": {"x": timed, "y": timed}, "b": {"x": {**timed, "date": "3"}, "y": untimed}, "tiny-b": {"z": timed}}
    for folder, found in stored.items():
        (tmp_path / folder).mkdir()
        for name, one in found.items():
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(one))
    assert summary.read_machines(tmp_path) == {"x": stored["b"]["x"], "y": timed}


FORMS = [name for name, peer in peers.PEERS.items() if not isinstance(peer, peers.Compiled)]
ARGUMENTS = {
    "gpt2": {**TINY["gpt2"], "depth": 9, "dropout": 0.1},
    "lstm": {**TINY["lstm"], "tokens": 25, "dropout": 0.1},
    "bert": {**TINY["bert"], "depth": 9, "dropout": 0.1},
    "vit": {**TINY["vit"], "depth": 9},
    "resnet50": {**TINY["resnet50"], "depth": 3},
    "mobilenet_v2": TINY["mobilenet_v2"],
    **models.TINY,
}
LEFT_OUT = {("selective", "lstm")}  # the cell adds to a product in place, which torch refuses to keep


@pytest.mark.parametrize(("form", "model"), sorted({*itertools.product(FORMS, ARGUMENTS)} - LEFT_OUT))
def test_every_form_of_checkpoint_trains_what_eager_trains(form: str, model: str):
    given = models.FACTORIES[model](**ARGUMENTS[model])
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
    expected = _gradients(models.FACTORIES["resnet50"](**ARGUMENTS["resnet50"]), given.loss_fn)
    found = _gradients(given, given.loss_fn)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    given.optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in given.model.named_parameters())


def test_a_rounded_eager_is_off_by_one_ulp_at_most():
    given = dict(models.FACTORIES["vit"](**ARGUMENTS["vit"]).model.named_parameters())
    rounded = dict(peers.workload(peers.ROUNDED, "vit", **ARGUMENTS["vit"]).model.named_parameters())
    ulps = [(rounded[name].view(torch.int32) - given[name].view(torch.int32)).abs() for name in given]
    nonzero = [(given[name] != 0) for name in given]
    assert {int(n) for one, some in zip(ulps, nonzero, strict=True) for n in one[some].unique()} == {0, 1}


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
