"""The offload experiments: what they move, and what they say of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.predict.simulate import peak_bytes, simulate
from autotune.records.measurement import Measurement, Outcome
from autotune.report.claims import ClaimVerdict, read, write
from autotune.testing.graphs import training_chain
from autotune.workloads.factory import load_workload
from experiments.benchmarks.offload import __main__ as offload
from experiments.benchmarks.offload import alternate, summary
from experiments.claims.nntrainer_offload import __main__ as table
from experiments.common.result_file import NOT_RECORDED, missing_facts
from tests.experiments.paths import CLAIMS

FACTS = {"machine": {"silicon": "x", "memory_bytes": 2**30}, "date": "then", "command": "c", "load_before": 0.0}


@pytest.fixture
def deep() -> Any:
    graph = training_chain(20, nbytes=100_000, param_bytes=80_000)
    stores = {name: StoreCost(1e6, 1e6, 5e5, 5e5, holds_memory=name == "ramdisk") for name in ("ssd", "ramdisk")}
    return graph, Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), stores)


@pytest.mark.long
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_thread_s_table_counts_what_really_moved(overlapped: bool, tmp_path: Path):
    run = table.measure(
        batch=2,
        size=32,
        medium="ssd",
        directory=str(tmp_path),
        overlapped=overlapped,
        iterations=3,
        cache=str(tmp_path / "costs.json"),
    )
    assert run["bytes_each_way"] > 0
    assert run["values"] >= 20  # weights and momentum among them
    assert [len(run["seconds"][key]) for key in table.KEYS] == [3] * 4
    assert all(seconds > 0 for key in table.KEYS[:3] for seconds in run["seconds"][key])
    if not overlapped:
        moved = zip(run["seconds"]["offload"], run["seconds"]["onload"], strict=True)
        assert run["seconds"]["waiting"] == [pytest.approx(sum(both)) for both in moved]


def test_the_thread_s_averages_stand_beside_the_batch_and_the_medium_that_they_are_of():
    seconds = {key: [0.5, 1.5] for key in table.KEYS}
    runs = [
        {"batch": batch, "size": 32, "medium": medium, "overlapped": False, "bytes_each_way": 2**20, "seconds": seconds}
        for batch, medium in ((10, "ssd"), (10, "ramdisk"), (7, "ssd"))
    ]
    device = {"silicon": "x", "cores": 2, "torch": "2"}
    commands = [{"command": "c", "load": [0, 0]}]
    lines = table.summary({"device": device, "commands": commands, "runs": runs}).splitlines()
    offloads = [line for line in lines if "| offload |" in line]
    assert ["164734" in line for line in offloads] == [True, False, False]
    assert ["351008 | 32.4%" in line for line in offloads] == [False, True, False]
    assert "| 1000000 | 500000 | 1500000 | 2000000 | 100.0% |" in offloads[2]


def test_a_window_of_n_holds_n_plus_two_equal_layers_and_one_more_where_gradients_pass():
    assert table.window_peaks() == [window + 2 for window in table.WINDOWS]
    assert table.window_peaks(table.UNIT) == [window + 3 for window in table.WINDOWS]


def test_the_committed_claims_of_789_are_what_the_stored_runs_give(tmp_path: Path):
    stored = json.loads((CLAIMS / "nntrainer_offload/results/results.json").read_text())
    write(tmp_path, [*table.claims_of_table(stored), *table.claims_of_window()])
    assert read(tmp_path) == read(CLAIMS / "nntrainer_offload")


def test_what_was_not_measured_is_said_and_not_filled_in():
    claims = table.claims_of_table({"device": {"silicon": "x", "cores": 2}, "runs": []})
    assert {claim.ours for claim in claims} == {None}
    assert {claim.why_not for claim in claims} == {
        "not measured at batch 10",
        "not measured at batch 32",
        "not measured at batch 128",
    }
    assert {claim.verdict for claim in claims} == {ClaimVerdict.NOT_COMPARABLE}


def test_a_directory_on_no_disk_measures_no_disk():
    run = {"batch": 10, "size": 224, "medium": "ssd", "overlapped": False, "bytes_each_way": 2**20, "direct": False}
    runs = [run | {"seconds": {key: [1.0] for key in table.KEYS}}]
    claims = table.claims_of_table({"device": {"silicon": "x", "cores": 2}, "runs": runs})
    (one,) = [claim for claim in claims if claim.ours and "onload" not in claim.text]
    assert one.why_not == "the directory lies on no disk that is read and written directly"


def test_every_window_sends_away_all_it_can_and_a_ramdisk_gets_the_same_values(deep: Any):
    graph, costs = deep
    windows = {name: plan for name, plan, _ in offload.plans_to_measure("windows", graph, costs)}
    assert list(windows) == ["none", *(f"N = {n}" for n in offload.WINDOWS), "none, again", "N = 1, weights too"]
    peaks = [peak_bytes(graph, windows[f"N = {n}"], costs) for n in offload.WINDOWS]
    assert peaks == sorted(peaks)
    assert (
        peak_bytes(graph, windows["N = 1, weights too"], costs) < peaks[0] < peak_bytes(graph, windows["none"], costs)
    )
    media = {name: plan for name, plan, _ in offload.plans_to_measure("media", graph, costs)}
    assert media["ramdisk"].offload == media["ssd"].offload
    assert peak_bytes(graph, media["ramdisk"], costs) > peak_bytes(graph, media["ssd"], costs)


@pytest.mark.long
def test_alone_and_together_each_keeps_to_its_own_means(deep: Any):
    graph, costs = deep
    for name, plan, budget in offload.plans_to_measure("joint", graph, costs):
        if name.startswith("recompute"):
            assert not plan.offload
        if name.startswith("offload"):
            assert not plan.recomputed
        assert name == "none" or budget >= graph.static_bytes


def test_a_step_is_compared_with_those_beside_it():
    def step(seconds: float, **others: Any) -> dict[str, Any]:
        return {
            "seconds": seconds, "stall_seconds": 0.1, "transfer_bytes": 8, "transfer_seconds": 1.0, "hidden": 0.9, **others,
        }  # fmt: skip

    # the machine is half as fast in the end
    found = {
        "none": [step(1.0, hidden=None), step(1.0, hidden=None), step(2.0, hidden=None), step(2.0, hidden=None)],
        "N = 1": [step(1.1, after=0), step(1.65, after=1), step(2.2, after=2)],
    }
    times = alternate.summarize_steps(found, "N = 1")
    assert times["ratio_without"] == pytest.approx(1.1)
    assert times["ratio_without_95"] == pytest.approx((1.1, 1.1))
    assert (times["seconds"], times["hidden"], times["steps"]) == (1.65, 0.9, 3)
    assert alternate.summarize_steps(found, "none")["ratio_without"] == 1.0
    assert alternate.summarize_steps(found, "none")["hidden"] is None


@pytest.mark.long
def test_plans_alternate_in_one_process_each_between_two_of_the_first(tmp_path: Path):
    arguments = {"batch": 2, "size": 32}
    graph = capture(load_workload("resnet18", arguments)).graph
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), {"ssd": StoreCost(1e9, 1e9, 1e9, 1e9)})
    plans = {"none": Plan.traced(graph), "N = 1": make_plan(graph, offload.offload_settings("ssd", 1), 0, costs)}
    found = alternate.alternate("resnet18", arguments, plans, {"ssd": tmp_path})
    assert [step["after"] for step in found["N = 1"]] == list(range(alternate.ROUNDS))
    assert len(found["none"]) == alternate.ROUNDS + 1
    assert {step["transfer_bytes"] > 0 for step in found["N = 1"]} == {True}
    assert {step["transfer_bytes"] for step in found["none"]} == {0}


def test_a_row_tells_what_was_predicted_and_seen(deep: Any):
    graph, costs = deep
    plan = Plan.traced(graph)
    expected = simulate(graph, lower(graph, plan), costs)
    seen = Measurement(Outcome.OK, peak_bytes=expected.peak_bytes + 2**30, charged_bytes=2**31, floor_bytes=2**30)
    times = {
        "time_ratio": 0.8, "ratio_without": 1.04, "ratio_without_95": (1.03, 1.05), "seconds": 0.5, "stall_seconds": 0.01,
        "transfer_bytes": 2**20, "hidden": None,
    }  # fmt: skip
    cells = summary._cells(offload.build_row(plan, expected, seen, times, 0))
    assert cells[2:6] == ["+0.00%", "1024.0", "0.800", "1.040 (1.030 to 1.050)"]
    assert len(cells) == len(summary.HEAD) - 1


def test_ops_are_predicted_at_the_pace_of_the_run(deep: Any):
    _, costs = deep
    assert offload.scale_costs(costs, 2.0 * len(costs.seconds)).seconds == (2.0,) * len(costs.seconds)


def test_an_adaptation_is_told_by_its_windows_its_last_change_and_the_steps_before_and_after():
    def step(window: int, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds, "stall_seconds": seconds / 10, "window": window, "offloaded": 3,
            "predicted_peak_bytes": window * 2**20,
        }  # fmt: skip

    steps = [step(8, 2.0)] * 6 + [step(4, 9.0)] * 2 + [step(8, 1.5)] + [step(6, 1.0)] * 10
    cells = summary._adapt_cells({"budget_bytes": 9 * 2**20, "steps": steps}).split(" | ")
    assert cells == ["9.0", "8 -> 4 -> 8 -> 6", "9", "2.000 -> 1.000", "200.0 -> 100.0", "8.0"]
    still = summary._adapt_cells({"budget_bytes": 2**20, "steps": steps[:6]}).split(" | ")
    assert still[1:3] == ["8", "0"]


def run_offload(
    monkeypatch: pytest.MonkeyPatch, out: Path, arguments: str, *, commit: str, digest: str
) -> dict[str, Any]:
    """Run the command on ResNet-18 with fake measurements; return the result file."""

    def measure(model: str, parts: list[str], *_: object, results: dict[str, Any], save: offload.SavePart) -> None:
        for part in parts:
            if part not in results.setdefault(model, {}):
                results[model][part] = {}
                save(model, part)

    monkeypatch.setattr(offload, "measure", measure)
    monkeypatch.setattr(offload, "collect_facts", lambda: {**FACTS, "commit": commit})
    monkeypatch.setattr(offload, "capture_digests", lambda workloads: dict.fromkeys(workloads, digest))
    monkeypatch.setattr(offload, "summary", lambda results: "")
    monkeypatch.setattr(offload, "plot", lambda results, path: None)
    monkeypatch.setattr(
        sys, "argv", ["offload", "--anyway", "--models", "resnet18", "--out", str(out), *arguments.split()]
    )
    offload.main()
    document: dict[str, Any] = json.loads((out / "results.json").read_text())
    return document


def test_a_missing_part_leaves_commit_and_graph_of_the_stored_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_offload(monkeypatch, tmp_path, "--parts windows", commit="one", digest="08ff")
    document = run_offload(monkeypatch, tmp_path, "--parts windows media", commit="two", digest="08ff")
    commits = {part: facts["commit"] for part, facts in document["origins"].items()}
    assert commits == {"resnet18, windows": "one", "resnet18, media": "two"}
    assert (document["commit"], document["graphs"], missing_facts(document)) == ("two", {"resnet18": "08ff"}, ())
    # nothing is missing, so nothing is written
    assert run_offload(monkeypatch, tmp_path, "--parts media", commit="three", digest="1b3e") == document


def test_a_missing_part_of_another_graph_is_refused_until_all_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = run_offload(monkeypatch, tmp_path, "--parts windows", commit="one", digest="08ff")
    message = (
        r"results\.json: resnet18, windows is of the graph 08ff of resnet18, which is captured as 1b3e now; "
        r"measure its parts again: --models resnet18 --again"
    )
    for arguments in ("--parts media", "--parts media --again"):
        with pytest.raises(SystemExit, match=message):
            run_offload(monkeypatch, tmp_path, arguments, commit="two", digest="1b3e")
    assert json.loads((tmp_path / "results.json").read_text()) == before
    after = run_offload(monkeypatch, tmp_path, "--again", commit="two", digest="1b3e")
    assert after["graphs"] == {"resnet18": "1b3e"}
    assert {facts["commit"] for facts in after["origins"].values()} == {"two"}


def test_a_part_of_an_older_file_does_not_get_the_graph_of_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    older = {"models": {"resnet18": {"windows": {}}}, "commands": ["c"], "device": FACTS["machine"]}
    (tmp_path / "results.json").write_text(json.dumps(older))
    document = run_offload(monkeypatch, tmp_path, "--parts windows media", commit="two", digest="1b3e")
    assert document["origins"]["resnet18, windows"]["graphs"] == NOT_RECORDED
    assert document["origins"]["resnet18, media"]["graphs"] == {"resnet18": "1b3e"}
    assert missing_facts(document) == ("commit", "graphs", "date")
