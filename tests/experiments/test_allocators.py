"""What the benchmark of allocators says of its numbers, and that it runs at all."""

import ctypes.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json
from experiments.benchmarks.allocators import __main__ as run
from experiments.common.result_file import NOT_RECORDED, missing_facts

MIB = 2**20
DEVICE = to_json(this_device("cpu"))


def record(**seconds: list[float]) -> dict[str, Any]:
    """A step of 100 MiB on a floor of 200; every allocator is charged a tenth more, and jemalloc holds its floor."""
    return {
        "arguments": {"batch": 2},
        "predicted_step_bytes": 100 * MIB,
        "static_bytes": 40 * MIB,
        "ops": 7,
        "load": [0.0, 0.0],
        "allocators": {
            name: {
                "charged_bytes": 310 * MIB, "floor_bytes": (200 if name != "jemalloc" else 305) * MIB, "library": "", "meter": "rss",
                "results": 3, "differs": [],
            }
            for name in seconds
        },
        "blocks": [
            {"round": number, "allocator": name, "seconds": [one, one], "page_faults": [8, 10]}
            for name, rounds in seconds.items()
            for number, one in enumerate(rounds)
        ],
    }  # fmt: skip


def test_an_excess_is_of_the_whole_process_and_waste_of_the_step():
    arena = run.build_rows(record(glibc=[1.0], arena=[1.0]))[1]
    assert arena.charged_bytes == 110 * MIB
    assert arena.waste == pytest.approx(0.1)
    assert arena.excess == pytest.approx(10 / 300)
    assert arena.page_faults == 9


def test_a_preloaded_malloc_is_weighed_over_glibcs_floor():
    found = {
        row.allocator: row.charged_bytes for row in run.build_rows(record(glibc=[1.0], jemalloc=[1.0], arena=[1.0]))
    }
    assert found == dict.fromkeys(("glibc", "jemalloc", "arena"), 110 * MIB)


def test_allocators_are_compared_round_by_round():
    # in the second round the machine is half as fast for both
    row = run.build_rows(record(glibc=[1.0, 2.0], arena=[0.9, 1.8]))[0]
    assert (row.ratio.middle, row.ratio.low, row.ratio.high) == pytest.approx((0.9, 0.9, 0.9))
    assert row.ratio.basis == "range of 2"


def test_the_interval_over_all_models_needs_more_rounds_than_that_of_one():
    # by order statistics the range of 6 rounds contains the median with 96.9 %, that of 8 with 99.2 %
    rounds = [0.9, 1.0, 1.1, 1.0, 0.95, 1.05]
    six, eight = (record(glibc=[1.0] * len(arena), arena=arena) for arena in (rounds, [*rounds, 1.0, 1.2]))
    assert run.overall_ratio({"net": six}).basis == "95 % of 6"
    assert run.overall_ratio({"net": six, "other": six}).basis == "range of 6"
    both = run.overall_ratio({"net": eight, "other": eight})
    assert (both.low, both.middle, both.high, both.basis) == (
        pytest.approx(0.9), pytest.approx(1.0), pytest.approx(1.2), "95 % of 8",
    )  # fmt: skip


def test_the_best_other_is_the_fastest_and_each_aim_says_whether_it_is_met():
    models = {"net": record(glibc=[1.0], tcmalloc=[0.5], arena=[0.75])}
    assert run.fastest_other(run.build_rows(models["net"])).allocator == "tcmalloc"
    assert run.overall_ratio(models).middle == pytest.approx(1.5)
    text = "\n".join(run.target_table(models))
    assert "+3.33%, missed" in text
    assert "tcmalloc: 1.500 (1.500 to 1.500; range of 1), missed" in text
    assert "| equal bits | yes |" in text


def test_a_bit_that_another_allocator_leaves_is_named():
    one = record(glibc=[1.0], arena=[1.0])
    for name, bits in (("glibc", "aa"), ("arena", "ab")):
        one["allocators"][name]["digests"] = {"loss": bits[0], "weight": bits[1]}
    run.compare_digests(one)
    assert one["allocators"]["arena"]["differs"] == ["weight"]
    assert [row.equal for row in run.build_rows(one)] == [True, False]


def test_an_allocator_that_is_not_here_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert run.preload_environment("") == {}
    with pytest.raises(SystemExit, match="apt-get install libjemalloc2 libtcmalloc-minimal4"):
        run.preload_environment("jemalloc")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="the arena is compiled with g++")
def test_every_allocator_that_is_here_trains_the_same_bits(tmp_path: Path):
    others = [name for name, library in run.ALLOCATORS.items() if library and ctypes.util.find_library(library)]
    command = [sys.executable, "-m", "experiments.benchmarks.allocators", "--tiny", "--models", "lstm", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--allocators", "glibc", *others, "arena"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "results.json").read_text())["models"]["lstm"]
    assert list(seen["allocators"]) == ["glibc", *others, "arena"]
    assert not any(one["differs"] for one in seen["allocators"].values())
    assert {Path(one["library"]).name.startswith("lib") for one in seen["allocators"].values()} == {bool(others), False}
    assert len(seen["blocks"]) == 2 * len(seen["allocators"])
    assert "| equal bits | yes |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "allocators.png").stat().st_size > 1000


def run_allocators(monkeypatch: pytest.MonkeyPatch, out: Path, model: str, commit: str) -> dict[str, Any]:
    """Run the command on a model with a fake measurement; return the result file."""
    facts = {"machine": DEVICE, "commit": commit, "date": "2026-11-28", "command": "c", "load_before": 0.0}
    monkeypatch.setattr(run, "measure", lambda *_: {"arguments": {}})
    monkeypatch.setattr(run, "collect_facts", lambda: facts)
    monkeypatch.setattr(run, "capture_digests", lambda workloads: dict.fromkeys(workloads, f"graph of {commit}"))
    monkeypatch.setattr(run, "summary", lambda results: "")
    monkeypatch.setattr(run, "plot", lambda results, path: None)
    monkeypatch.setattr(sys, "argv", ["allocators", "--anyway", "--models", model, "--out", str(out)])
    run.main()
    document: dict[str, Any] = json.loads((out / "results.json").read_text())
    return document


def test_a_model_that_is_not_measured_again_keeps_commit_and_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for model, commit in (("gpt2", "one"), ("lstm", "two")):
        run_allocators(monkeypatch, tmp_path, model, commit)
    document = run_allocators(monkeypatch, tmp_path, "gpt2", "three")
    commits = {model: facts["commit"] for model, facts in document["origins"].items()}
    assert commits == {"gpt2": "three", "lstm": "two"}
    assert document["graphs"] == {"gpt2": "graph of three", "lstm": "graph of two"}
    assert (document["commit"], missing_facts(document)) == ("three", ())


def test_a_model_of_an_older_file_without_a_commit_does_not_get_that_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    older = {"device": DEVICE, "commands": ["c"], "models": {"lstm": {"arguments": {}}}}
    (tmp_path / "results.json").write_text(json.dumps(older))
    document = run_allocators(monkeypatch, tmp_path, "gpt2", "one")
    commits = {model: facts["commit"] for model, facts in document["origins"].items()}
    assert commits == {"gpt2": "one", "lstm": NOT_RECORDED}
    assert missing_facts(document) == ("commit", "graphs", "date")


def test_the_summary_has_the_commit_of_each_model_that_has_one():
    models = {name: record(glibc=[1.0], arena=[1.0]) for name in ("older", "newer")}
    origins = {"older": {"commit": NOT_RECORDED}, "newer": {"commit": "c0ffee", "date": "2026-11-28"}}
    results = {"device": DEVICE, "commands": ["c"], "models": models}
    loads = [line for line in run.summary({**results, "origins": origins}).splitlines() if "; load " in line]
    ends = [line.partition("load ")[2] for line in loads]
    assert ends == ["0.00 to 0.00.", "0.00 to 0.00; commit c0ffee, 2026-11-28."]
    assert "commit" not in run.summary(results)
