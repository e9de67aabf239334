"""Table of the benchmark of batch sizes: ratios are of samples per second, and largest batches are those that were measured to fit."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.records.json_codec import to_json
from autotune.records.measurement import Outcome
from autotune.study.batch.records import BatchSearch, MeasuredSize, SampleRate, SideResult, StepSize
from experiments.benchmarks.batch_sizes import __main__ as run
from experiments.common.result_file import NOT_RECORDED, missing_facts

FACTS = {"machine": {"silicon": "x", "memory_bytes": 2**30}, "commit": "old", "date": "then", "command": "c"}
GRAPHS = {"gpt2": "08ff"}
SEARCH = BatchSearch("batch", {}, "batch", StepSize(4))


def test_speed_counts_samples_not_steps():
    """A plan with twice the samples in 1.6 times the seconds processes a quarter more."""
    blocks = [
        {"round": 0, "variant": "eager", "seconds": [1.0]},
        {"round": 0, "variant": "plan", "seconds": [1.6]},
        {"round": 0, "variant": "eager", "seconds": [1.0]},
    ]
    sizes = {"eager": {"batch": 8, "accumulate": 1}, "plan": {"batch": 16, "accumulate": 1}}
    turns = {"sizes": sizes, "blocks": blocks, "failed": {}}
    assert run.speedups(turns) == pytest.approx([1.25])


def test_the_plan_is_compared_with_eager_s_fastest_size_of_the_turns():
    """The search was wrong about eager's sizes: 12 samples take as long as 8. The slowest size failed."""
    seconds = {"eager 12": 1.0, "eager 4": 0.1, "plan": 1.6}
    blocks = [
        {"round": number, "variant": variant, "seconds": [taken]}
        for number in range(2)
        for variant, taken in (("eager", 1.0), *seconds.items(), ("eager", 1.0))
    ]
    sizes = {
        name: {"batch": batch, "accumulate": 1} for name, batch in zip(("eager", *seconds), (8, 12, 4, 16), strict=True)
    }
    turns = {"sizes": sizes, "blocks": blocks, "failed": {"eager 4": "out of memory"}}
    assert run.fastest_eager(turns) == "eager 12"
    assert run.speedups(turns) == pytest.approx([16 / 1.6 / 12] * 2)


def measured(batch: int, **outcomes: str) -> dict[str, Any]:
    sides = {side: {"outcome": outcomes[side]} if side in outcomes else None for side in ("eager", "plan")}
    return {"size": {"batch": batch, "accumulate": 1}, **sides}


def test_a_size_that_did_not_fit_is_no_largest_batch():
    sizes = [measured(4, eager="ok"), measured(9, eager="out_of_memory"), measured(7, eager="ok")]
    document = {"batch": {"measured": sizes}, "throughput": {"error": "no size fits"}}
    assert run.find_largest(document, "eager") == (7, 9)
    assert run.find_largest(document, "plan") == (0, math.inf)


@pytest.mark.parametrize(
    ("refused", "cells"),
    [
        ([5], "| 4 | at least 8 | at least 2.00 |"),
        ([9, 6], "| 4 to 5 | at least 8 | at least 1.60 |"),
        ([], "| at least 4 | at least 8 | - |"),
    ],
)
def test_a_ratio_is_to_the_size_below_the_first_at_which_either_search_saw_eager_fail(refused: list[int], cells: str):
    document = {
        "machine": {"silicon": "x"}, "commit": "c", "date": "d", "load_before": 0.0, "command": "python", "model": "gpt2",
        "batch": {"measured": [measured(4, eager="ok", plan="ok"), measured(8, plan="ok")]},
        "throughput": {"measured": [measured(size, eager="over_budget") for size in refused]},
    }  # fmt: skip
    text = run.summarize([document])
    assert cells in text
    assert ("geometric mean" in text) == bool(refused)


def test_a_result_of_another_kind_in_the_folder_is_left_out(tmp_path: Path):
    (tmp_path / "gpt2.json").write_text(json.dumps({"model": "gpt2"}))
    (tmp_path / "results.json").write_text(json.dumps({"workloads": {}}))
    assert run.read_documents(tmp_path) == [{"model": "gpt2"}]


def test_eager_s_two_fastest_sizes_and_its_largest_are_timed_in_turns():
    rates = {
        4: SampleRate(80.0, 70.0, 95.0),
        7: SampleRate(90.0, 79.0, 91.0),
        9: None,
        6: SampleRate(85.0, 84.0, 86.0),
        8: SampleRate(70.0, 69.0, 71.0),
    }
    sides = [MeasuredSize(StepSize(size), SideResult(Outcome.OK, rate=rate)) for size, rate in rates.items()]
    search = BatchSearch("batch", {}, "batch", StepSize(4), measured=tuple(sides))
    assert run.best_eager([search]) == [StepSize(7), StepSize(6), StepSize(8)]
    assert run.best_eager([]) == []


def test_a_workload_that_failed_is_a_row_without_figures():
    document = {
        "machine": {"silicon": "x"}, "commit": "c", "date": "d", "load_before": 0.0, "command": "python", "model": "gpt2",
        "batch": {"error": "no"}, "throughput": {"error": "no"},
    }  # fmt: skip
    assert "| gpt2 | nan | -, - | - | - | - | - | - | - | - |" in run.summarize([document])


def stored_result(**changes: Any) -> dict[str, Any]:
    """Return the result of an earlier call, with both searches."""
    return {
        **FACTS, "load_before": 0.0, "model": "gpt2", "arguments": {"batch": 4}, "graphs": GRAPHS, "batch": to_json(SEARCH),
        "throughput": {"error": "no"}, **changes,
    }  # fmt: skip


def test_the_search_that_does_not_run_again_is_kept_with_its_facts(tmp_path: Path):
    path, stored = tmp_path / "gpt2.json", stored_result()
    path.write_text(json.dumps(stored), encoding="utf-8")
    kept = run.read_kept(path, stored, GRAPHS, ["batch"])
    assert kept == {"batch": to_json(SEARCH), "origins": {"batch": {**FACTS, "graphs": GRAPHS}}}
    assert run.read_search(kept["batch"]) == SEARCH
    path.write_text(json.dumps(stored_result(turns={"sizes": {}})), encoding="utf-8")
    assert run.read_kept(path, stored, GRAPHS, ["throughput"])["turns"] == {"sizes": {}}
    assert "turns" not in run.read_kept(path, stored, GRAPHS, ["batch"])
    with pytest.raises(SystemExit, match="leave --objectives out"):
        run.read_kept(path, stored_result(arguments={"batch": 8}), GRAPHS, ["batch"])


def test_a_kept_search_of_another_graph_is_refused(tmp_path: Path):
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps(stored_result()), encoding="utf-8")
    message = r"gpt2\.json: batch is of the graph 08ff of gpt2, which is captured as 1b3e now; leave --objectives out"
    with pytest.raises(SystemExit, match=message):
        run.read_kept(path, stored_result(), {"gpt2": "1b3e"}, ["batch"])
    assert run.read_kept(path, stored_result(), {"gpt2": "1b3e"}, []) == {}


def test_a_search_that_an_older_version_kept_has_its_own_commit_and_no_graph(tmp_path: Path):
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps(stored_result(batch={"commit": "older", **to_json(SEARCH)})), encoding="utf-8")
    kept = run.read_kept(path, stored_result(), {"gpt2": "1b3e"}, ["batch"])
    facts = kept["origins"]["batch"]
    assert (facts["machine"], facts["commit"]) == (FACTS["machine"], "older")
    assert {facts[fact] for fact in ("graphs", "date", "command")} == {NOT_RECORDED}
    assert run.read_search(kept["batch"]) == SEARCH


def test_a_call_for_one_search_leaves_commit_and_graph_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, facts = tmp_path / "gpt2.json", {**FACTS, "commit": "new", "date": "now", "load_before": 0.0}
    path.write_text(json.dumps(stored_result(arguments=run.TINY["gpt2"])), encoding="utf-8")
    monkeypatch.setattr(run, "collect_facts", lambda: dict(facts))
    monkeypatch.setattr(run, "capture_digests", lambda _: dict(GRAPHS))
    monkeypatch.setattr(run, "measure_workload", lambda *_: {"throughput": {"error": "no"}})
    arguments = ["--tiny", "--anyway", "--objectives", "throughput", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["batch_sizes", *arguments])
    run.main()
    document = json.loads(path.read_text(encoding="utf-8"))
    commits = {objective: origin["commit"] for objective, origin in document["origins"].items()}
    assert commits == {"batch": "old", "throughput": "new"}
    assert (document["commit"], document["graphs"], missing_facts(document)) == ("new", GRAPHS, ())
    assert "The search for batch: commit old, date then." in (tmp_path / "summary.md").read_text(encoding="utf-8")
