"""A plan that a training loop tunes for itself: once, outside of the training process, and cached."""

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.api import auto_plan, tune_live
from autotune.api.auto_plan import AutoPlan
from autotune.capture.tracer import capture
from autotune.errors import BaselineChangedError, ConfigError, InfeasibleError, WorkerError
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.kernels.region_program import with_kernels
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import RunDir, lock_file
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.memory_format import in_format
from autotune.workloads.workload import Workload
from tests.support.waiting import wait_for


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def make() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    return Workload(model, loss_fn, None, torch.ones(4, 8))


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """A list that grows by the config of each study; a study writes the traced plan of the workload it loads."""
    configs: list[Config] = []

    def run(config: Config, run_dir: Path, digest: str, log: Path) -> Path:
        configs.append(config)
        with in_format(load_workload(config.workload, loop=config.loop), config.memory_format) as workload:
            graph = with_kernels(capture(workload), config.kernels).graph
        assert graph.digest == digest
        plan = replace(Plan.traced(graph), kernels=config.kernels, memory_format=config.memory_format)
        estimate = simulate(graph, lower(graph, plan))
        file = PlanFile(
            config.ref, graph.digest, config.budget, estimate.peak_bytes, 0, {}, plan, estimate, loop=config.loop
        )
        planfile.write(run_dir / "plan.json", file)
        return run_dir / "plan.json"

    monkeypatch.setattr(auto_plan, "_run_study", run)
    return configs


@pytest.fixture
def auto(tmp_path: Path) -> AutoPlan:
    return AutoPlan(budget="80%", cache=tmp_path / "plans", runs=tmp_path / "runs")


def test_a_loop_tunes_once_and_the_next_start_reads_the_plan(auto: AutoPlan, studies: list[Config], tmp_path: Path):
    for _ in range(2):
        step = make()
        PlannedLoss(step.model, loss_fn, auto)(step.batch).backward()
    assert [config.budget for config in studies] == ["80%"]
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1
    assert not list((tmp_path / "runs").rglob("*.live"))


def test_tuning_leaves_every_bit_of_the_training_process(auto: AutoPlan, studies: list[Config]):
    def train(plan: AutoPlan | None) -> list[torch.Tensor]:
        step = make()
        step.model[0].weight.grad = torch.ones(8, 8)
        PlannedLoss(step.model, loss_fn, plan)(step.batch).backward()
        return [*(p.grad for p in step.model.parameters() if p.grad is not None), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(None), train(auto), strict=True))
    assert len(studies) == 1


def test_another_budget_another_graph_and_a_loop_that_needs_all_gradients_are_other_plans(
    tmp_path: Path, studies: list[Config]
):
    places: dict[str, Any] = {"cache": tmp_path / "plans", "runs": tmp_path / "runs"}
    step = make()
    PlannedLoss(step.model, loss_fn, AutoPlan("80%", **places))(step.batch)
    PlannedLoss(step.model, loss_fn, AutoPlan("70%", **places))(step.batch)
    PlannedLoss(step.model, loss_fn, AutoPlan("80%", **places))(torch.ones(5, 8))
    for accumulate in (1, 2):
        optimizer = torch.optim.SGD(step.model.parameters(), lr=0.1)
        TrainStep(step.model, loss_fn, optimizer, step.batch, AutoPlan("80%", **places), accumulate=accumulate)
    assert [(config.budget, config.loop) for config in studies] == [
        ("80%", ""), ("70%", ""), ("80%", ""), ("80%", ""), ("80%", "accumulate=2"),
    ]  # fmt: skip


def test_a_damaged_plan_is_tuned_again(auto: AutoPlan, studies: list[Config], tmp_path: Path):
    step = make()
    plan = auto(step).plan
    (cached,) = (tmp_path / "plans").glob("*.json")
    cached.write_text(cached.read_text()[:100])
    assert auto(step).plan == plan
    assert len(studies) == 2


def test_a_cached_plan_whose_offload_has_no_room_between_the_layers_is_tuned_again(
    auto: AutoPlan, studies: list[Config], tmp_path: Path
):
    step = make()
    graph = capture(step).graph
    file = auto(step, graph)
    (cached,) = (tmp_path / "plans").glob("*.json")
    value = next(op.outputs[0] for op in graph.ops if op.outputs and graph.consumers[op.outputs[0]])
    offloading = replace(file.plan, offload=(Swap(value, 0),), store="ssd", window=len(graph.ops))
    planfile.write(cached, replace(file, plan=offloading))
    assert auto(step, graph).plan == file.plan
    assert len(studies) == 2


@pytest.mark.parametrize("host", ["this", "another"])
def test_a_process_that_waits_takes_the_plan_of_the_one_that_tunes(
    auto: AutoPlan, studies: list[Config], tmp_path: Path, capfd: pytest.CaptureFixture[str], host: str
):
    (cached_dir := tmp_path / "plans").mkdir()
    file = AutoPlan(budget="80%", cache=tmp_path / "other", runs=tmp_path / "runs")(make())
    (cached,) = (tmp_path / "other").glob("*.json")
    (lock_of_run,) = (tmp_path / "runs").glob(".auto-*.lock")
    place = cached_dir / f".{os.uname().nodename}.lock" if host == "this" else lock_of_run
    with lock_file(place, wait=True) as lock:
        lock.truncate(0)
        lock.write("77")
        lock.flush()
        waiting = threading.Thread(target=lambda: plans.append(auto(make())), daemon=True)
        plans: list[PlanFile] = []
        waiting.start()
        wait_for(lambda: "waiting for process 77" in capfd.readouterr().err)
        cached.rename(cached_dir / cached.name)
    waiting.join(60)
    assert plans == [file]
    assert len(studies) == 1


def test_the_cache_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert AutoPlan()._cache_directory() == tmp_path / "autotune" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert AutoPlan()._cache_directory() == tmp_path / "home" / ".cache" / "autotune" / "plans"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": "lots"}, "budget"),
        ({"time": "0s"}, "time"),
        ({"planners": {"recompute": ["gready"]}}, "greedy"),
        ({"kernels": "triton"}, "inductor"),
        ({"kernels": "any"}, "tune file.py:factory --kernels any"),
    ],
)
def test_a_wrong_field_is_refused_when_it_is_written(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        AutoPlan(**fields)


def test_aten_is_another_name_of_the_default_kernels():
    assert AutoPlan(kernels="aten") == AutoPlan()


def fake_child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the tuning process by another program."""
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options))


def test_an_error_of_the_study_is_raised_as_itself_and_leaves_no_weights_behind(
    auto: AutoPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake_child(
        monkeypatch, """print('{"class": "InfeasibleError", "message": "needs 5 MiB with the smallest plan"}')"""
    )
    with pytest.raises(InfeasibleError, match=r"^needs 5 MiB with the smallest plan$"):
        auto(make())
    assert not list(tmp_path.rglob("*.live"))


def test_a_killed_study_is_an_error_that_names_the_log_which_stays(auto: AutoPlan, monkeypatch: pytest.MonkeyPatch):
    fake_child(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorkerError, match=r"killed by SIGKILL; see .*tune\.log, and start again") as caught:
        auto(make())
    (log,) = Path(auto.runs).glob("*/logs/tune.log")
    assert f"see {log}," in str(caught.value)


def test_a_study_that_can_go_on_is_started_again_and_not_resumed_by_a_command(
    auto: AutoPlan, monkeypatch: pytest.MonkeyPatch
):
    message = "Net: the process of a plan was killed by SIGKILL; continue with: autotune resume runs/auto"
    fake_child(monkeypatch, f"""print('{{"class": "WorkerError", "message": "{message}"}}')""")
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL; start again, finished trials are kept$"):
        auto(make())


@pytest.mark.parametrize(("number", "kind"), [(errno.EROFS, ConfigError), (errno.ENOSPC, OSError)])
def test_a_cache_on_a_read_only_disk_is_an_error_that_names_the_argument(
    auto: AutoPlan, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
):
    def refuse(path: Path, *, wait: bool) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(auto_plan, "lock_file", refuse)
    expected = r"\.lock: cannot be written; name another directory by AutoPlan" if kind is ConfigError else "No space"
    with pytest.raises(kind, match=expected):
        auto(make())


def test_an_interrupt_ends_the_study_and_removes_the_weights(
    auto: AutoPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake_child(monkeypatch, f"import time; open({str(tmp_path / 'started')!r}, 'w').close(); time.sleep(60)")

    def interrupt() -> None:
        wait_for((tmp_path / "started").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        auto(make())
    thread.join()
    assert not list(tmp_path.rglob("*.live"))


SCRIPT = """
import torch, autotune
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(96, 96), torch.nn.Tanh())])
    def forward(self, x):
        return self.body(x) * FACTOR
FACTOR = 0.5
def train(plan):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    planned = autotune.PlannedLoss(model, lambda model, batch: model(batch).square().mean(), plan)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = planned(torch.randn(2048, 96))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), torch.get_rng_state()]
torch.set_num_threads(1)
plan = autotune.AutoPlan("80%", trials=1, cache="plans", runs="runs")
print(all(torch.equal(a, b) for a, b in zip(train(None), train(plan), strict=True)))
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_tunes_itself_and_trains_on_in_every_bit(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    for lines in (2, 1):  # two lines of progress, then the path of the cached plan
        run = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.stdout.strip() == "True", run.stderr
        assert run.stderr.count("autotune:") == lines, run.stderr
    assert (tmp_path / "runs" / "mlflow.db").exists()
    assert not list(tmp_path.rglob("*.live"))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_a_loop_trains_on_compiled_kernels_in_another_memory_format_and_the_next_start_reads_the_plan(
    tmp_path: Path, studies: list[Config]
):
    def convolutions() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU())
        return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), torch.randn(16, 3, 32, 32))

    formatted = {"kernels": "inductor", "memory_format": "channels_last"}
    auto = AutoPlan("90%", **formatted, cache=tmp_path / "plans", runs=tmp_path / "runs")
    plain, tuned, again = convolutions(), convolutions(), convolutions()
    step = TrainStep(tuned.model, loss_fn, tuned.optimizer, tuned.batch, auto)
    loss = loss_fn(plain.model, plain.batch)
    loss.backward()
    plain.optimizer.step()
    torch.testing.assert_close(step(tuned.batch), loss.detach())
    torch.testing.assert_close([*tuned.model.parameters()], [*plain.model.parameters()])
    assert tuned.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert (step.plan.kernels, step.plan.memory_format) == ("inductor", "channels_last")

    # a workload that no step converted has the same plan, and stays as it was
    assert auto(again).plan == step.plan
    assert again.model[0].weight.is_contiguous()
    assert TrainStep(again.model, loss_fn, again.optimizer, again.batch, auto).plan == step.plan
    replace(auto, kernels="", memory_format="")(plain)  # a plan of its own, on eager's kernels
    assert [(config.kernels, config.memory_format) for config in studies] == [("inductor", "channels_last"), ("", "")]


def test_a_study_whose_eager_fits_only_now_is_begun_anew_and_keeps_its_trials(tmp_path: Path):
    trials = RunDir(tmp_path).trials
    trials.write_text("recorded")
    begun: list[bool] = []

    def run(config: Any) -> Any:
        begun.append(trials.exists())
        if trials.exists():
            raise BaselineChangedError("plain eager did not fit in memory, now it does")
        return config

    assert tune_live._run_anew_if_changed(run, "config", tmp_path) == "config"
    assert (begun, (tmp_path / "trials.before").read_text()) == ([True, False], "recorded")


def test_machines_with_caches_of_their_own_take_turns_in_a_shared_directory_of_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run_dir, order = tmp_path / "runs" / "auto-net-0123456789ab", []
    ours, theirs = (AutoPlan(cache=tmp_path / name, runs=tmp_path / "runs") for name in ("ours", "theirs"))

    def follow() -> None:
        with theirs._lock_run(run_dir):
            order.append("theirs")

    with ours._lock_run(run_dir):
        other = threading.Thread(target=follow)
        other.start()
        other.join(0.2)
        order.append("ours")
    other.join(10)
    assert order == ["ours", "theirs"]
    assert f"waiting for process {os.getpid()} on {os.uname().nodename}, which tunes" in capfd.readouterr().err
