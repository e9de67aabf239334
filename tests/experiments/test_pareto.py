"""The benchmark of fronts: when a peer dominates a point, and which peers are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.study.verdicts.statistics import Interval
from experiments.benchmarks.frontier.records import VariantPoint
from experiments.benchmarks.pareto.__main__ import FRONTIER, MODELS, summarize, summarize_run
from experiments.benchmarks.pareto.comparison import MEASURES, PeerVerdict, compare_with_peers, read_peers


def row(plan: int, nbytes: int, ratio: float, status: str = "front") -> dict[str, Any]:
    interval = {"middle": ratio, "low": ratio - 0.02, "high": ratio + 0.02, "samples": 10, "confidence": 0.95}
    return {
        "plan": plan, "status": status, "step_charged_bytes": nbytes, "step_peak_bytes": nbytes - 10, "time_ratio": interval,
        "share_of_eager": nbytes / 1000, "rounds": 2,
    }  # fmt: skip


def peer(name: str, nbytes: int, ratio: float) -> VariantPoint:
    return VariantPoint(name, "peer", nbytes - 10, nbytes, Interval(ratio, ratio - 0.02, ratio + 0.02, samples=8))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    ("peers", "verdict", "name"),
    [
        ([], PeerVerdict.CLEAR, ""),
        ([peer("larger", 501, 1.0)], PeerVerdict.CLEAR, ""),
        ([peer("slower", 400, 1.5)], PeerVerdict.CLEAR, ""),
        ([peer("as fast", 500, 1.19)], PeerVerdict.UNCERTAIN, "as fast"),
        ([peer("hardly slower", 500, 1.21)], PeerVerdict.UNCERTAIN, "hardly slower"),
        ([peer("better", 500, 1.1)], PeerVerdict.DOMINATED, "better"),
        ([peer("as fast", 300, 1.19), peer("better", 500, 1.1)], PeerVerdict.DOMINATED, "better"),
    ],
)
def test_a_peer_dominates_a_point_by_bytes_and_by_an_interval_below_its_own(peers, verdict, name, measure):
    (compared,) = compare_with_peers([row(3, 500, 1.2), row(4, 600, 1.1, "dominated")], peers, measure)
    assert (compared.plan, compared.verdict, compared.peer) == (3, verdict, name)


def test_peers_of_other_arguments_are_refused_and_missing_ones_are_none(tmp_path: Path):
    assert read_peers(tmp_path, "resnet50", {"batch": 8}) == []
    (tmp_path / "resnet50.json").write_text(json.dumps({"arguments": {"batch": 4}}))
    with pytest.raises(SystemExit, match=r"measured with .'batch': 4., not .'batch': 8."):
        read_peers(tmp_path, "resnet50", {"batch": 8})


def test_peers_on_compiled_kernels_stand_beside_fronts_that_chose_their_kernels_alone(tmp_path: Path):
    names = ("eager", "checkpoint", "inductor 0.5")
    peers = {name: {"step_peak_bytes": 100, "errors": {"loss": {"error": 0.0, "worst": "x"}}} for name in names}
    blocks = [{"variant": name, "seconds": [1.0], "round": 0} for name in (*names, "eager")]
    record = {"arguments": {}, "peers": peers, "plans": {}, "sessions": [{"blocks": blocks, "failed": {}}]}
    (tmp_path / "chain.json").write_text(json.dumps(record), encoding="utf-8")
    found = {
        each: [peer.variant for peer in read_peers(tmp_path, "chain", {}, compiled=each)] for each in (False, True)
    }
    assert found == {False: ["checkpoint"], True: ["checkpoint", "inductor 0.5"]}


def test_a_peer_that_was_timed_with_another_malloc_than_the_front_is_not_compared(tmp_path: Path):
    variants = ("eager", "checkpoint", "selective", "eager glibc", "selective glibc")
    seconds = dict(zip(variants, (1.0, 1.1, 1.1, 1.5, 1.5), strict=True))
    errors = {"loss": {"error": 0.0, "worst": "x"}}
    peers = {name: {"step_peak_bytes": 100, "errors": errors} for name in variants[:3]}
    blocks = [{"variant": name, "seconds": [seconds[name]], "round": 0} for name in (*variants, "eager")]
    record = {"arguments": {}, "peers": peers, "plans": {}, "sessions": [{"blocks": blocks, "failed": {}}]}
    (tmp_path / "chain.json").write_text(json.dumps(record), encoding="utf-8")
    found = {each.variant: each.ratio and each.ratio.middle for each in read_peers(tmp_path, "chain", {})}
    assert found == {"checkpoint": None, "selective": 1.0}


@pytest.mark.parametrize("name", MODELS)
def test_recorded_peers_of_both_models_compute_what_eager_does(name: str):
    folders = [path.parent for path in FRONTIER.glob(f"*/{name}.json")]
    assert folders
    peers = [peer for folder in folders for peer in read_peers(folder, name, MODELS[name][1])]
    assert peers
    assert all(peer.kind == "peer" and peer.right for peer in peers)


def test_the_summary_counts_points_and_dominated_ones(tmp_path: Path):
    facts = {
        "machine": {"silicon": "a chip"},
        "commit": "abc",
        "date": "2026-01-01",
        "load_before": 0.0,
        "command": "c",
    }
    record = {
        **facts, "arguments": {}, "eager_bytes": 1000, "trials_that_ran": 9,
        "plans": [row(1, 300, 1.5), row(2, 500, 1.2), row(3, 600, 1.19, "uncertain")],
    }  # fmt: skip
    (tmp_path / "chain.json").write_text(json.dumps(record))
    text = summarize(tmp_path, tmp_path / "none")
    assert "| chain | aten | 2 | 0.0 | 1.500x | 0.0 | 1.200x | 0.0 | 9 | 0 of 0 | - | - | - |" in text
    assert "| 3 | 0.0 | 60.0 % | 1.190x | 1.170 to 1.210 | 10 | 2 | uncertain |" in text


def test_a_run_is_counted_by_kind_and_by_what_was_executed():
    ok, rejected = {"outcome": "ok", "peak_bytes": 1}, {"outcome": "over_budget", "peak_bytes": None}
    trials = [
        {"kind": "baseline", "plan": None, "measurement": ok},
        {"kind": "planner", "plan": "p", "measurement": ok},
        {"kind": "search", "plan": "q", "measurement": rejected},
        {"kind": "repeat", "plan": "p", "measurement": ok},
    ]
    counted = summarize_run({"trials": trials, "disturbed": ""})
    assert (counted["trials"], counted["trials_that_ran"]) == (4, 1)
    assert counted["kinds"] == {"baseline": 1, "planner": 1, "repeat": 1, "search": 1}
