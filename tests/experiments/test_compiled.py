"""What the benchmark of compiled regions says of its numbers."""

from typing import Any

import pytest

from experiments.benchmarks.compiled import summary


def plan(peak: int, *, equal: bool = True) -> dict[str, Any]:
    return {"step_peak_bytes": peak, "equal_to_traced": equal}


def peer(peak: int, error: float = 0.0) -> dict[str, Any]:
    return {"step_peak_bytes": peak, "errors": {"gradients": {"error": error, "worst": "step 0.gradient w"}}}


def record(plans: dict[str, Any], peers: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """Eager takes 1 s in each of eight rounds, and every other variant its seconds."""
    blocks = [
        {"round": number, "variant": variant, "seconds": [taken]}
        for number in range(8)
        for variant, taken in ({"eager": 1.0} | seconds | {"eager": 1.0}).items()
    ]
    captures = {"ours aten": {"bound_bytes": 100}, "ours inductor": {"bound_bytes": 50}}
    return {"peers": peers, "plans": plans, "captures": captures, "sessions": [{"blocks": blocks}]}


def test_the_plan_for_most_bytes_stands_for_its_capture_and_the_faster_capture_for_us():
    plans = {
        "ours aten 1": plan(600), "ours aten 2": plan(500), "ours inductor 1": plan(590), "ours inductor 2": plan(900),
        "ours inductor wrong": plan(595, equal=False),
    }  # fmt: skip
    seconds = {
        "ours aten 1": 1.0, "ours aten 2": 0.5, "ours inductor 1": 0.9, "ours inductor 2": 0.7, "ours inductor wrong": 0.1,
        "inductor 1": 1.0,
    }  # fmt: skip
    (pair,) = summary.compare("net", record(plans, {"inductor 1": peer(600)}, seconds))
    assert (pair.ours, pair.ratio.middle) == ("ours inductor 1", pytest.approx(0.9))
    assert pair.ratio.samples == 8


def test_a_peer_with_wrong_gradients_is_not_counted():
    document = record({"ours aten 1": plan(500)}, {"inductor 1": peer(600, 0.9), "checkpoint": peer(800)}, {})
    document["sessions"][0]["blocks"] += [
        {"round": 9, "variant": name, "seconds": [1.0]} for name in ("eager", "inductor 1", "ours aten 1", "checkpoint")
    ]
    assert [pair.peer for pair in summary.compare("net", document)] == ["checkpoint"]
    assert summary.compare_lowest(document) == (500 / 800, 50 / 800)


def test_a_lowest_peak_above_the_target_is_excused_by_the_bound_alone(tmp_path):
    met = summary._targets([], {"a": (0.7, 0.1), "b": (0.8, 0.76), "c": (0.8, 0.5)})
    assert [line.split("target 0.75, ")[1].split(";")[0] for line in met.splitlines()] == [
        "met",
        "proved impossible on these graphs",
        "missed",
    ]
