"""Commands of experiments: how they end, which files `--fresh` deletes, and what identifies the machine of a result."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json
from experiments.benchmarks.allocators import __main__ as allocators
from experiments.benchmarks.frontier import __main__ as frontier
from experiments.benchmarks.no_fit import __main__ as no_fit
from experiments.benchmarks.trial_cost import __main__ as trial_cost
from experiments.benchmarks.tuned import __main__ as tuned
from experiments.common import commands, long_run
from experiments.common.commands import UNFINISHED, exit_unfinished, run_to_end
from experiments.common.facts import ROOT, is_same_machine
from experiments.common.result_file import PLANS

MACHINE = to_json(this_device("cpu")) | {"processors": os.cpu_count()}
RESTARTED = {"driver": "Linux 0.0.1", "memory_bytes": MACHINE["memory_bytes"] + 12_288}
OTHERS = [{"silicon": "another"}, {"cores": MACHINE["cores"] + 1}, {"torch": "1.0"}]
OTHERS += [{"memory_bytes": MACHINE["memory_bytes"] // 2}]


def test_an_unfinished_experiment_ends_with_its_own_status_and_the_reason(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        exit_unfinished("two plans are missing")
    assert ended.value.code == UNFINISHED
    assert capsys.readouterr().err == "two plans are missing\n"


@pytest.mark.parametrize("code", [0, 130])
def test_a_command_that_is_interrupted_ends_by_itself(code: int, tmp_path: Path):
    # the command itself gets no signal here
    program = f"import os, signal, sys, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(0.8); sys.exit({code})"
    if code:
        with pytest.raises(KeyboardInterrupt):
            run_to_end([sys.executable, "-c", program])
    else:
        assert run_to_end([sys.executable, "-c", program]).returncode == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


LEADER = """
import signal, sys
from experiments.common.commands import run_to_end
signal.signal(int(sys.argv[2]), signal.SIG_DFL)
run_to_end([sys.executable, "-c", *sys.argv[1:]])
"""
SLOW_TO_END = """
import os, signal, sys, time
from pathlib import Path
def end(number, frame):
    time.sleep(0.3)
    Path(sys.argv[2]).touch()
    sys.exit(1)
signal.signal(int(sys.argv[1]), end)
os.kill(os.getppid(), int(sys.argv[1]))
time.sleep(10)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_an_experiment_alone_ends_its_command_first(number: signal.Signals, tmp_path: Path):
    ended = tmp_path / "ended"
    leader = [sys.executable, "-c", LEADER, SLOW_TO_END, str(int(number)), str(ended)]
    process = subprocess.run(leader, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert ended.exists()
    assert process.returncode
    assert "KeyboardInterrupt" in process.stderr


def test_a_restart_of_a_machine_leaves_it_the_same_and_what_changes_times_does_not():
    assert is_same_machine(MACHINE, MACHINE | RESTARTED)
    assert is_same_machine({key: fact for key, fact in MACHINE.items() if key != "environment"}, MACHINE)
    others = [*OTHERS, {"processors": MACHINE["processors"] + 1}]
    assert not any(is_same_machine(MACHINE, MACHINE | other) for other in others)


def run_frontier(out: Path, stored: dict[str, Any]) -> None:
    (out / "gpt2.json").write_text(json.dumps(stored))
    options = argparse.Namespace(tiny=False, again=[])
    model = frontier.ModelFrontier("gpt2", out, options, out)
    assert model.record["peers"] == {"eager": {"commit": "c"}}
    assert model.record["machine"] == MACHINE


def run_allocators(out: Path, stored: dict[str, Any]) -> None:
    device = {key: fact for key, fact in stored["machine"].items() if key != "processors"}
    (out / "results.json").write_text(json.dumps({**stored, "device": device}))
    sys.argv = ["allocators", "--out", str(out), "--anyway"]
    allocators.main()


@pytest.mark.parametrize("run", [run_frontier, run_allocators])
def test_results_are_continued_after_a_restart_and_refused_on_another_machine(
    run: Callable[[Path, dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", [str(Path(frontier.__file__))])
    monkeypatch.setattr(frontier, "collect_facts", lambda: facts)
    monkeypatch.setattr(allocators, "measure", lambda *_: pytest.fail("every model has a result"))
    monkeypatch.setattr(allocators, "collect_facts", lambda: facts)
    monkeypatch.setattr(allocators, "summary", lambda results: "")
    monkeypatch.setattr(allocators, "plot", lambda results, path: None)
    facts = {"machine": MACHINE, "commit": "c", "date": "d", "command": "x", "load_before": 0.0}
    stored = facts | {
        "arguments": {"batch": 8}, "machine": MACHINE | RESTARTED, "peers": {"eager": {}}, "plans": {}, "sessions": [], "commands": [],
        "models": {name: {} for name in allocators.MODELS},
    }  # fmt: skip
    run(tmp_path, stored)
    for other in OTHERS:
        with pytest.raises(SystemExit, match="is of another machine"):
            run(tmp_path, stored | {"machine": MACHINE | other})


def test_allocators_measures_the_models_without_a_result_and_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured: list[str] = []
    monkeypatch.setattr(allocators, "measure", lambda model, *_: measured.append(model) or {})
    for name, fake in (("capture_digests", lambda _: {}), ("summary", lambda _: ""), ("plot", lambda *_: None)):
        monkeypatch.setattr(allocators, name, fake)
    monkeypatch.setattr(
        allocators, "collect_facts", lambda: {"machine": MACHINE, "commit": "c", "date": "d", "command": "x"}
    )
    for arguments in (["--models", "gpt2"], [], ["--models", "gpt2"]):
        monkeypatch.setattr(sys, "argv", ["allocators", "--out", str(tmp_path), "--anyway", *arguments])
        allocators.main()
    assert measured == ["gpt2", "resnet50", "mobilenet_v2", "lstm", "gpt2"]


@pytest.mark.parametrize(
    ("module", "work", "arguments"),
    [
        (tuned, "tune", ["--runs", "lstm"]),
        (no_fit, "run_to_end", []),
        (allocators, "measure", ["--models", "lstm", "--anyway"]),
    ],
)
def test_the_load_before_a_run_is_read_before_it(
    module: Any, work: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    did: list[str] = []

    def run(*_: object, **__: object) -> None:
        did.append("run")
        raise SystemExit

    monkeypatch.setattr(module, "collect_facts", lambda: did.append("facts") or {})
    monkeypatch.setattr(module, work, run)
    monkeypatch.setattr(sys, "argv", ["command", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        module.main()
    assert did == ["facts", "run"]


def test_a_tuned_result_names_its_workload_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    document = {"best": {"measurement": {"device": {}}, "graph_digest": "81d4"}}
    monkeypatch.setattr(tuned, "tune", lambda *_: (document, []))
    fakes = {"trial_rows": lambda _: [], "summarize_run": lambda *_: {}, "summary": lambda _: ""}
    for name, fake in fakes.items():
        monkeypatch.setattr(tuned, name, fake)
    monkeypatch.setattr(tuned, "collect_facts", lambda: {"machine": MACHINE, "commit": "c", "date": "d"})
    monkeypatch.setattr(sys, "argv", ["tuned", "--runs", "lstm-kernels", "--out", str(tmp_path)])
    tuned.main()
    record = json.loads((tmp_path / "lstm-kernels.json").read_text())
    assert (record["model"], record["arguments"], record["graphs"]) == ("lstm", {"batch": 32}, {"lstm": "81d4"})


def test_the_cost_of_trials_is_of_a_named_workload_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial_cost, "measure", lambda _: {"graph": "ba6b", "eager_seconds": 1.0, "phases": []})
    facts = {"machine": MACHINE, "commit": "c", "date": "d", "command": "x", "load_before": 0.0}
    monkeypatch.setattr(trial_cost, "collect_facts", lambda: facts)
    monkeypatch.setattr(sys, "argv", ["trial_cost", "--anyway", "--out", str(tmp_path)])
    trial_cost.main()
    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["model"], record["arguments"]) == ("resnet18", {"batch": 10, "size": 224})
    assert record["graphs"] == {"resnet18": "ba6b"}


def test_the_recorded_load_before_each_tuning_is_that_at_its_begin():
    for path in sorted((Path(tuned.__file__).parent / "results").glob("*.json")):
        if path.name.endswith(PLANS):
            continue
        record = json.loads(path.read_text())
        assert record["load_before"] == record["load"]["began"][0], path.name


def test_fresh_deletes_the_benchmarks_own_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(long_run, "ROOT", tmp_path)
    out, folder, work = tmp_path / "out", tmp_path / "nights", tmp_path / "runs" / "nights-benchmark"
    for path in (out / "precious.txt", out / "nights.json", out / "summary.md", work / "begun"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys, "argv", ["nights", "--fresh", "--out", str(out)])
    assert long_run.parse_paths("", folder, config="x.yaml", tiny="", tiny_help="")[1:] == (work, out)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    assert not any(work.iterdir())


def test_a_busy_machine_leaves_an_experiment_unfinished_unless_it_runs_anyway(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commands.psutil, "cpu_percent", lambda interval: 50.0)
    with pytest.raises(SystemExit) as ended:
        commands.refuse_busy_machine()
    assert ended.value.code == UNFINISHED
    commands.refuse_busy_machine(anyway=True)
