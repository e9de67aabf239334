"""The script of a first hour on a GPU: it saves each step, goes on where it stopped, and mixes no devices."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.fleet.fleet_file import load_fleet
from autotune.workloads.workload import Workload
from experiments.gpu import run
from experiments.gpu.graphs import measure
from experiments.gpu.machine import FakeMachine
from experiments.gpu.steps import Step, all_steps, measure_frontier, run_fleet, run_tests
from tests.support.fake_graphs import FakeRecorder


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_every_kind_of_step_runs_on_the_made_up_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    kinds = [
        "doctor",
        "tests",
        "check vit",
        "tune gpt2 bfloat16",
        "frontier gpt2 sdpa bfloat16",
        "graphs gpt2",
        "offload ssd 2",
        "fleet",
    ]
    assert {kind.split()[0] for kind in kinds} == {step.name.split()[0] for step in all_steps()}
    for kind in kinds:
        assert run.main(["--fake", "--out", str(out), "--only", *kind.split()]) == 0
    steps = document(out)["steps"]
    assert list(steps) == kinds
    assert all(step["facts"]["device"]["silicon"] == "Fake GPU 9000" for step in steps.values())
    checked = steps["check vit"]["data"]
    assert checked["traced"]["peak_bytes"] == checked["traced"]["predicted_peak_bytes"]
    assert checked["planned"]["peak_bytes"] <= 0.7 * checked["traced"]["peak_bytes"]
    assert steps["tune gpt2 bfloat16"]["data"]["best"]["outcome"] == "ok"
    assert "tests/runtime/stores/test_host.py" in steps["tests"]["data"]["output"]
    assert steps["offload ssd 2"]["data"]["transfer_bytes"] > 0
    assert "--on gpu" in steps["fleet"]["data"]["output"]
    assert "experiments.gpu.graphs gpt2" in steps["graphs gpt2"]["data"]["output"]


def test_graphs_are_timed_beside_launches_with_the_same_losses() -> None:
    def make() -> Workload:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Workload(model, lambda net, batch: net(batch).square().mean(), optimizer, torch.ones(16, 4))

    figures = measure(make, torch.device("cpu"), FakeRecorder, steps=3)
    assert (figures["graphs"], figures["problem"], figures["loss_difference"]) == (1, "", 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_that_does_not_fit_waits_for_the_next_run_and_a_failed_one_is_last(tmp_path: Path) -> None:
    clock, ran = Clock(), []

    def step(name: str, *, fails: bool = False) -> Step:
        def work(machine: object, seconds: float) -> dict[str, Any]:
            ran.append(name)
            clock.now += 50
            if fails:
                raise RuntimeError("no kernel image")
            return {"name": name}

        return Step(name, 60, work)

    def go(*steps: Step) -> int:
        known = document(out) if out.exists() else {"steps": {}}
        return run.run_steps(steps, FakeMachine(tmp_path), known, out, 130, clock=clock)

    out = tmp_path / "gpu.json"
    assert go(step("a", fails=True), step("b"), step("c")) == 1
    assert ran == ["a", "b"]
    assert document(out)["steps"]["a"]["error"] == "RuntimeError: no kernel image"
    ran.clear()
    assert go(step("a"), step("b"), step("c")) == 0
    assert ran == ["c", "a"]
    assert [document(out)["steps"][name]["ok"] for name in "abc"] == [True] * 3


def some_steps(*names: str) -> list[Step]:
    return [step for step in all_steps() if step.name in names]


def test_a_step_whose_command_fails_is_not_done_and_the_next_run_tries_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["doctor", "tests", "frontier gpt2", "graphs gpt2", "fleet"]
    out = tmp_path / "gpu.json"
    assert run.run_steps(some_steps(*names), FakeMachine(tmp_path, exit_code=3), {"steps": {}}, out, 5000.0) == 1
    failed = document(out)["steps"]
    assert list(failed) == names
    assert all((step["ok"], step["data"]["exit"]) == (False, 3) for step in failed.values())
    assert "autotune doctor --json" in failed["doctor"]["data"]["output"]
    assert run.main(["--fake", "--out", str(out), "--list", "--only", "doctor"]) == 0
    assert "failed" in capsys.readouterr().out
    assert run.run_steps(some_steps(*names), FakeMachine(tmp_path), document(out), out, 5000.0) == 0
    assert [step["ok"] for step in document(out)["steps"].values()] == [True] * len(names)


class TimedOutMachine(FakeMachine):
    """A made-up GPU whose command saves figures and then runs out of time."""

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        Path(command[command.index("--out") + 1]).write_text(json.dumps({"variants": {"eager": {}}}))
        return super().execute(command, seconds)


def test_a_frontier_whose_command_fails_keeps_the_figures_that_it_saved(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    machine = TimedOutMachine(tmp_path, exit_code=124)
    assert run.run_steps(some_steps("frontier gpt2"), machine, {"steps": {}}, out, 5000.0) == 1
    step = document(out)["steps"]["frontier gpt2"]
    assert (step["ok"], step["data"]["exit"], step["data"]["variants"]) == (False, 124, {"eager": {}})


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_command_that_writes_no_figures_does_not_get_those_of_an_earlier_run(tmp_path: Path, exit_code: int) -> None:
    measure_frontier("gpt2", TimedOutMachine(tmp_path), 60.0)
    assert (tmp_path / "frontier-gpt2.json").exists()
    data = measure_frontier("gpt2", FakeMachine(tmp_path, exit_code=exit_code), 60.0)
    assert set(data) == {"exit", "output"}


def test_the_tests_of_a_gpu_run_without_a_plugin_of_pytest(tmp_path: Path) -> None:
    # a bare machine has no pytest-xdist, whose option is -n
    command = run_tests(FakeMachine(tmp_path), 60.0)["output"].split("\n")[0].split()
    assert [word for word in command if word.startswith("-")] == ["-m", "-q"]


def test_results_of_two_gpus_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert run.main(["--fake", "--out", str(out), "--only", "doctor"]) == 0
    results = document(out)
    results["steps"]["doctor"]["facts"]["device"]["silicon"] = "Other GPU"
    out.write_text(json.dumps(results))
    with pytest.raises(SystemExit, match="the results are of Other GPU, this is Fake GPU 9000: pass another --out"):
        run.main(["--fake", "--out", str(out), "--only", "tests"])


def test_a_run_on_a_new_machine_goes_on_from_earlier_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run.main(["--fake", "--out", str(first), "--only", "doctor"])
    run.main(["--fake", "--out", str(second), "--start", str(first), "--only", "tests"])
    assert list(document(second)["steps"]) == ["doctor", "tests"]
    capsys.readouterr()
    run.main(["--fake", "--out", str(second), "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert "done" in lines[0]
    assert sum("missing" in line for line in lines) == len(all_steps()) - 2


def test_the_fleet_of_one_is_a_valid_file_whose_class_the_command_names(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    output = run_fleet(machine, 60.0)["output"].split("\n")[0].split()
    fleet = load_fleet(Path(output[output.index("--fleet") + 1]))
    promise = fleet.classes[output[output.index("--on") + 1]]
    assert (promise.engine, promise.device, promise.command[1:]) == ("command", "cuda", ["-m", "autotune", "serve"])
