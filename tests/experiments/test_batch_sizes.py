"""Table of the benchmark of batch sizes: ratios are of samples per second, and largest batches are those that were measured to fit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autotune.records.json_codec import to_json
from autotune.records.measurement import Outcome
from autotune.study.batch.records import BatchSearch, MeasuredSize, SampleRate, SideResult, StepSize
from experiments.benchmarks.batch_sizes import __main__ as run


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


def test_the_search_that_does_not_run_again_is_kept_with_its_commit(tmp_path: Path):
    path, machine = tmp_path / "gpt2.json", {"silicon": "x", "memory_bytes": 2**30}
    search = to_json(BatchSearch("batch", {}, "batch", StepSize(4)))
    stored = {
        "machine": machine,
        "commit": "old",
        "arguments": {"batch": 4},
        "batch": search,
        "throughput": {"error": "no"},
    }
    path.write_text(json.dumps(stored), encoding="utf-8")
    kept = run.read_kept(path, stored, ["batch"])
    assert kept == {"batch": {"commit": "old", **search}}
    assert run.read_search(kept["batch"]) == BatchSearch("batch", {}, "batch", StepSize(4))
    path.write_text(json.dumps({**stored, "turns": {"sizes": {}}}), encoding="utf-8")
    assert run.read_kept(path, stored, ["throughput"])["turns"] == {"sizes": {}}
    assert "turns" not in run.read_kept(path, stored, ["batch"])
    with pytest.raises(SystemExit, match="leave --objectives out"):
        run.read_kept(path, {**stored, "arguments": {"batch": 8}}, ["batch"])
