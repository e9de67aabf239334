"""Plans run for real, in processes that crash, hang, are killed and lie; and the harness goes on."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError, PlanError, WorkerError
from autotune.fleet.local import open_harness
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.child import Child
from autotune.measure.children import ChildRole
from autotune.measure.harness import Harness
from autotune.measure.messages import (
    BatchSize,
    BatchSizeRequest,
    BeginTiming,
    ChildError,
    Digests,
    EagerPeakRequest,
    Expects,
    StopTiming,
    TimeBlock,
    TimedBlock,
    TimedDigestsRequest,
    TimingBegin,
    TimingEnd,
)
from autotune.measure.meters.cgroup import remove_stale
from autotune.measure.numerics import find_expected_results
from autotune.measure.spec import Spec
from autotune.measure.worker.bench import Bench
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import simulate
from autotune.records.config import load_config
from autotune.records.measurement import Measurement, Outcome
from autotune.workloads.live_workload import save_workload
from autotune.workloads.memory_format import convert_batch, convert_model
from autotune.workloads.reference import LIVE_SUFFIX, WorkloadRef
from tests.measure.harness.conftest import InProcessChildren
from tests.measure.harness.test_limit import needs_cgroup
from tests.support.small import make, normalized

WORKLOADS = str(Path(__file__).with_name("workloads.py"))
MIB = 2**20
SPARING: Settings = {
    "update": {"planner": "with_gradient"}, "recompute": {"planner": "segments"}, "allocator": {"planner": "arena"},
}  # fmt: skip


def harness(tmp_path: Path, factory: str, arguments: dict[str, object] | None = None, **options: object) -> Harness:
    workload = WorkloadRef(f"{WORKLOADS}:{factory}", arguments or {})
    return Harness(Spec(workload, tmp_path / "logs", samples=2, **options))


@pytest.fixture(scope="module")
def tripping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Harness, Path]]:
    """A harness whose next step does what is written to the file."""
    folder = tmp_path_factory.mktemp("tripping")
    with harness(folder, "switched", {"switch": str(folder / "switch")}) as runner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("autotune.measure.harness.BASELINE_PROCESSES", 1)  # no test of these reads the range
            runner.prepare()
        yield runner, folder / "switch"


@pytest.mark.usefixtures("children_in_process")
def test_a_plan_in_channels_last_is_compared_with_eager_in_channels_last(tmp_path: Path) -> None:
    own = Bench(Spec(WorkloadRef(f"{WORKLOADS}:convolutions"), tmp_path, scratch=tmp_path))
    with harness(tmp_path, "convolutions", memory_format="channels_last") as last:
        graph = last.survey().graph
        assert graph.digest != own._plans.program.graph.digest
        plan = make_plan(graph, SPARING, 0, last.survey().costs)
        for one in (plan, replace(plan, memory_format="channels_last")):
            seen = last.measure(one)
            assert (seen.outcome, seen.max_error, last.prepare().capture_error) == (Outcome.OK, 0.0, 0.0)
            assert len(seen.step_seconds) == len(seen.baseline_seconds) == 2
    with pytest.raises(PlanError, match="the plan is in channels_last, the workload in its own format"):
        own.check_plan(replace(plan, memory_format="channels_last"), None, 0.0)


@pytest.mark.usefixtures("children_in_process")
def test_a_step_that_a_training_process_converted_and_saved_is_measured_in_its_format(tmp_path: Path) -> None:
    step = make(normalized, (4, 3, 8, 8))
    convert_model(step.model, step.optimizer, "channels_last")
    step.batch = convert_batch(step.batch, "channels_last")
    live = tmp_path / f"Net{LIVE_SUFFIX}"
    save_workload(step, live)
    bench = Bench(Spec(WorkloadRef(str(live)), tmp_path, memory_format="channels_last", scratch=tmp_path))
    assert bench._plans.program.graph.digest == capture(step).graph.digest


@pytest.mark.usefixtures("children_in_process")
def test_a_model_that_leaves_no_choice_of_a_format_is_refused(tmp_path: Path) -> None:
    with (
        harness(tmp_path, "convolutions", {"flat": True}, memory_format="channels_last") as runner,
        pytest.raises(ConfigError, match="leaves no choice of a memory format"),
    ):
        runner.survey()


def test_a_plan_is_equal_to_eager_its_bytes_are_the_simulators_and_its_threads_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # what the doctor advises on a busy machine
    reports: list[str] = []
    with harness(tmp_path, "wide") as runner:
        runner.listen(lambda work: reports.append(str(work)))
        prepared, baseline = runner.prepare(), runner.baseline()
        plan = Plan.traced(prepared.graph)
        seen = runner.measure(plan)
        predicted = simulate(prepared.graph, lower(prepared.graph, plan), prepared.costs)
    assert (prepared.baseline_fits, prepared.capture_error, seen.max_error) == (True, 0.0, 0.0)
    assert seen.outcome is Outcome.OK
    assert seen.step_peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01)
    assert len(seen.step_seconds) == len(seen.baseline_seconds) == 2
    assert baseline.step_peak_bytes is not None
    assert baseline.step_peak_bytes > 8 * 8 * MIB
    steps = ["importing the workload and measuring the baseline's bytes", "timing the baseline", "capturing the step"]
    assert reports[:3] == steps
    assert any(re.fullmatch(r"profiling ops: \d+ of \d+", report) for report in reports)
    assert seen.load is not None, "Linux reports the load"
    first, second = baseline.process_charged_bytes  # of two processes: the spread that planners allow for
    assert first == baseline.charged_bytes
    assert baseline.floor_bytes is not None
    assert second - baseline.floor_bytes > 8 * 8 * MIB  # glibc's heap may differ by a tenth from process to process
    assert seen.device is not None
    assert seen.device.environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert seen.device.environment["torch threads"] == "1"


def test_a_users_own_modules_are_found_and_one_named_autotune_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "autotune.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "nets.py").write_text(Path(WORKLOADS).read_text())
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "work.py").write_text("from nets import wide\n")
    monkeypatch.chdir(tmp_path)
    child = Child.start(Spec(WorkloadRef("train/work.py:wide"), tmp_path, scratch=tmp_path), tmp_path / "log")
    try:
        assert child.ask(BatchSizeRequest(), 60.0) == BatchSize(1 << 17)
    finally:
        child.end()


@pytest.mark.slow
def test_tensors_of_a_few_pages_take_what_the_simulator_says_from_the_first_step_on(tmp_path: Path) -> None:
    small = {"batch": 768, "depth": 200}  # tensors of 48 KiB, which malloc puts into a heap with holes
    with harness(tmp_path, "wide", small) as runner:
        prepared = runner.prepare()
        plan = replace(Plan.traced(prepared.graph), allocator="arena")
        seen = runner.measure(plan)
        predicted = simulate(prepared.graph, lower(prepared.graph, plan), prepared.costs).peak_bytes
    assert seen.step_peak_bytes == pytest.approx(predicted, abs=MIB / 2)  # Python's own is a third of a MiB
    assert seen.step_charged_bytes == pytest.approx(predicted, abs=MIB)


@pytest.mark.slow
def test_weights_leave_for_the_store_and_come_back_under_the_harness(tmp_path: Path) -> None:
    offload = {"planner": "window", "store": "ssd", "window": 1, "share": 1.0, "what": "all"}
    with harness(tmp_path, "wide", {"batch": 256, "width": 1024}, stores={"ssd": tmp_path}) as runner:
        prepared = runner.prepare()
        graph = prepared.graph
        planners = {"offload": offload, "update": {"planner": "with_gradient"}, "allocator": {"planner": "arena"}}
        plan = make_plan(graph, planners, 0, prepared.costs)
        predicted = simulate(graph, lower(graph, plan), prepared.costs)
        seen = runner.measure(plan)
    assert {swap.value for swap in plan.offload} & set(graph.static)
    assert (seen.outcome, seen.max_error) == (Outcome.OK, 0.0)
    assert seen.transfer_bytes == predicted.transfer_bytes
    # a weight on its way back has memory that is not filled yet
    assert 0.97 * predicted.peak_bytes < seen.step_peak_bytes < predicted.peak_bytes + MIB
    # what they leave must not stay with malloc, nor with the arena what these need again
    assert 0.97 * predicted.peak_bytes < seen.step_charged_bytes < predicted.peak_bytes + 2 * MIB


@pytest.mark.usefixtures("children_in_process")
def test_a_recorded_baseline_is_not_timed_again_on_the_same_device_and_plans_are_compared_all_the_same(
    tmp_path: Path,
) -> None:
    with harness(tmp_path, "convolutions") as first:
        device, recorded = first.prepare().device, replace(first.baseline(), disturbed="")
    with harness(tmp_path, "convolutions") as second:
        second.reuse_baseline(recorded, device)
        prepared = second.prepare()
        assert second.baseline() is recorded
        seen = second.measure(Plan.traced(prepared.graph))
        assert (seen.outcome, seen.max_error, prepared.capture_error) == (Outcome.OK, 0.0, 0.0)
    others = [
        (recorded, replace(device, environment={"torch threads": "64"})),
        (replace(recorded, disturbed="busy"), device),
    ]
    for measurement, elsewhere in others:
        with harness(tmp_path, "convolutions") as third:
            third.reuse_baseline(measurement, elsewhere)
            assert third.baseline().step_seconds != recorded.step_seconds


def test_a_baseline_killed_from_outside_is_no_error_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "switch").write_text("kill")
    with (
        harness(tmp_path, "switched", {"switch": str(tmp_path / "switch")}) as runner,
        pytest.raises(WorkerError, match=r"of the baseline was killed by SIGKILL from outside, .*; run") as caught,
    ):
        runner.prepare()
    assert caught.value.exit_code == 9


def test_a_captured_step_killed_from_outside_is_no_fault_of_the_step(tmp_path: Path) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise ChildError(Outcome.CRASHED, "killed by SIGTERM")

    spec = Spec(WorkloadRef("w", {}), tmp_path)
    with pytest.raises(WorkerError, match="the process of the captured step was killed by SIGTERM; run"):
        find_expected_results(SimpleNamespace(ask=die), spec, Plan((0,)), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "outcome", "said"),
    [
        ("raise", Outcome.CRASHED, "ValueError: the loss went through the roof"),
        ("kill", Outcome.CRASHED, "killed by SIGKILL"),
        ("hang", Outcome.TIMEOUT, "no answer within 3 s"),
        ("wrong", Outcome.WRONG_RESULT, "differs from the captured step's"),
    ],
)
def test_what_goes_wrong_is_an_outcome_and_the_next_plan_runs(
    tripping: tuple[Harness, Path], word: str, outcome: Outcome, said: str
) -> None:
    runner, switch = tripping
    plan = Plan.traced(runner.prepare().graph)
    if word == "hang":
        assert runner.measure(plan).outcome is Outcome.OK  # so that no process has yet to start within the limit
        runner._children.time_limit_seconds = 3.0
    switch.write_text(word)
    try:
        seen = runner.measure(plan)
    finally:
        runner._children.time_limit_seconds = 300.0
    assert seen.outcome is outcome
    assert re.search(said, seen.detail, re.DOTALL)
    if word == "kill":  # the copy of the model's parameters goes with the process
        living = {f"initial-{child.pid}" for child in runner._children.living.values()}
        assert {copy.name for copy in runner._children.scratch.glob("initial-*")} <= living
    assert runner.measure(plan).outcome is Outcome.OK


def kill_at_its_turn(
    monkeypatch: pytest.MonkeyPatch, runner: Harness, role: ChildRole, turn: int, *, plan: int = 1
) -> None:
    """End the process with this role just before it is asked for a block: that of this number, of the plan of this number."""
    ask, turns = runner._children.ask, itertools.count(1)
    plans = 0

    def killing(asked: ChildRole, request: Expects[object], **options: object) -> object:
        nonlocal plans, turns
        if asked == role and isinstance(request, BeginTiming):
            plans, turns = plans + 1, itertools.count(1)
        if asked == role and isinstance(request, TimeBlock) and (plans, next(turns)) == (plan, turn):
            os.kill(runner._children.living[role].pid, signal.SIGKILL)
            runner._children.living[role]._process.wait()
        return ask(asked, request, **options)

    monkeypatch.setattr(runner._children, "ask", killing)


def test_a_process_that_dies_while_the_other_has_its_turn_says_why(
    tripping: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = tripping
    kill_at_its_turn(monkeypatch, runner, ChildRole.PLAN_SECONDS, 1)
    seen = runner.measure(Plan.traced(runner.prepare().graph))
    assert seen.outcome is Outcome.CRASHED
    assert seen.detail.startswith("killed by SIGKILL")


def test_a_process_that_dies_before_its_results_are_hashed_says_why(
    tripping: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = tripping
    ask = runner._children.ask

    def killing(role: ChildRole, request: Expects[object], **options: object) -> object:
        if isinstance(request, TimedDigestsRequest):
            os.kill(runner._children.living[role].pid, signal.SIGKILL)
            runner._children.living[role]._process.wait()
        return ask(role, request, **options)

    monkeypatch.setattr(runner._children, "ask", killing)
    killed = runner.measure(Plan.traced(runner.prepare().graph))
    assert killed.was_killed, killed.detail


def test_what_an_earlier_session_left_in_the_log_explains_no_death_of_this_one(tmp_path: Path) -> None:
    log = tmp_path / "seconds-1.log"
    log.write_text("DefaultCPUAllocator: can't allocate memory\n")
    child = Child.start(Spec(WorkloadRef("zoo"), tmp_path), log)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildError) as caught:
        child.ask(StopTiming(), 60.0)
    assert caught.value.outcome is Outcome.CRASHED
    assert re.fullmatch(r"killed by SIGKILL from outside, [^:]+", caught.value.detail)
    assert log.read_text() == "DefaultCPUAllocator: can't allocate memory\n"


def test_the_last_lines_of_the_log_of_this_session_explain_a_death(tmp_path: Path) -> None:
    log = tmp_path / "seconds-1.log"
    child = Child.start(Spec(WorkloadRef("zoo"), tmp_path), log)
    with log.open("a") as lines:
        lines.write("terminate called without an active exception\n")
    os.kill(child.pid, signal.SIGABRT)
    with pytest.raises(ChildError) as caught:
        child.ask(StopTiming(), 60.0)
    assert caught.value.outcome is Outcome.CRASHED
    assert caught.value.detail == "killed by SIGABRT: terminate called without an active exception"


def test_a_plan_that_loses_plain_eager_beside_it_is_told_as_a_ratio_to_the_baseline(
    tripping: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = tripping
    alone = runner.baseline().baseline_seconds
    monkeypatch.setattr(runner, "_spec", replace(runner._spec, samples=4))
    kill_at_its_turn(monkeypatch, runner, ChildRole.EAGER_SECONDS, 2)
    seen = runner.measure(Plan.traced(runner.prepare().graph))
    assert (seen.outcome, seen.baseline_seconds) == (Outcome.OK, alone)
    assert len(seen.step_seconds) == len(alone) < 4  # a turn of one without one of the other's would be no ratio
    assert seen.detail.startswith("plain eager ended beside it (killed by SIGKILL")


def record_requests(monkeypatch: pytest.MonkeyPatch, runner: Harness) -> list[tuple[str, str]]:
    """Return a list that receives role and kind of every request."""
    ask, requests = runner._children.ask, []

    def recording(role: ChildRole, request: Expects[object], **options: object) -> object:
        requests.append((role.value, type(request).__name__))
        return ask(role, request, **options)

    monkeypatch.setattr(runner._children, "ask", recording)
    return requests


def test_a_plan_that_cannot_win_costs_a_comparison_and_a_few_steps_and_no_measurement_of_its_bytes(
    tripping: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = tripping
    plan = replace(Plan.traced(runner.prepare().graph), allocator="arena")
    monkeypatch.setattr(runner, "_spec", replace(runner._spec, samples=8))
    requests = record_requests(monkeypatch, runner)
    hopeless = runner.measure(plan, beat=1e-6)
    assert (hopeless.outcome, len(hopeless.step_seconds), len(hopeless.baseline_seconds)) == (
        Outcome.STOPPED_EARLY, 2, 2,
    )  # fmt: skip
    assert re.fullmatch(r"2 steps took .* of eager's time, surely more than 0.000: no more were timed", hopeless.detail)
    assert (hopeless.max_error, hopeless.peak_bytes, hopeless.verified) == (0.0, None, "bit-equal to eager")
    assert hopeless.step_charged_bytes is not None
    assert ("bytes", "PlanCheckRequest") not in requests
    assert [kind for role, kind in requests if role == "seconds"] == [
        "BeginTiming", "TimedDigestsRequest", "TimeBlock", "TimeBlock", "FinishTiming",
    ]  # fmt: skip
    monkeypatch.setattr(runner, "_spec", replace(runner._spec, samples=1))
    slower = runner.measure(plan, beat=1e-6)
    assert (slower.outcome, len(slower.step_seconds), slower.peak_bytes) == (Outcome.OK, 1, None)
    assert ("bytes", "PlanCheckRequest") not in requests, "a plan that is not faster cannot lead, whatever its bytes"
    monkeypatch.setattr(runner, "_spec", replace(runner._spec, samples=8))
    whole = runner.measure(plan, beat=1e6)
    assert (whole.outcome, len(whole.step_seconds)) == (Outcome.OK, 8)
    assert whole.step_charged_bytes == pytest.approx(hopeless.step_charged_bytes, abs=MIB / 2)
    assert requests[-1] == ("bytes", "PlanCheckRequest")
    assert ("beside", "StopTiming") not in requests, "eager's process stays ready for the next plan"
    requests.clear()
    runner.renew()
    again = runner.measure(plan)
    assert ("bytes", "PlanCheckRequest") not in requests, "the bytes of a plan are measured once"
    assert (again.outcome, again.step_peak_bytes, again.max_error) == (Outcome.OK, whole.step_peak_bytes, 0.0)
    assert ("seconds", "TimedDigestsRequest") in requests
    assert again.step_charged_bytes == pytest.approx(whole.step_charged_bytes, abs=MIB / 2)


def test_a_plan_far_over_the_budget_is_timed_no_longer_than_needed(
    tripping: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = tripping
    plan = Plan.traced(runner.prepare().graph)
    monkeypatch.setattr(runner, "_spec", replace(runner._spec, samples=8))
    over = runner.measure(plan, budget_bytes=-(2**30))
    assert (over.outcome, len(over.step_seconds), over.peak_bytes) == (Outcome.OVER_BUDGET, 2, None)
    assert over.charged_bytes is not None


@pytest.mark.parametrize(("share", "steps"), [(1.0, 8), (2.0, 2)])
def test_a_plan_that_fills_the_budget_is_timed_in_full_in_a_process_whose_floor_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, steps: int
) -> None:
    floor_bytes, budget_bytes = 2**30, 2**20

    def answer(role: ChildRole, request: Expects[Any], **options: object) -> object:
        match request:
            case BeginTiming():
                return TimingBegin(floor_bytes)
            case TimedDigestsRequest():
                return Digests({})
            case TimeBlock():
                charged_bytes = floor_bytes + int(share * budget_bytes)
                return TimedBlock((1.0,), (0.0,), (0,), 0, None, charged_bytes=charged_bytes, meter="fake")
        return TimingEnd(floor_bytes)

    with harness(tmp_path, "switched") as runner:
        monkeypatch.setattr(runner, "_spec", replace(runner._spec, samples=8))
        monkeypatch.setattr(runner, "_prepared", SimpleNamespace(floor_bytes=0, baseline_fits=False))
        monkeypatch.setattr(runner, "_baseline", Measurement(Outcome.OK, charged_bytes=budget_bytes))
        monkeypatch.setattr(runner._children, "ask", answer)
        timed = runner._measure_seconds(Plan((0,)), Measurement(Outcome.OK), None, {}, budget_bytes)
    assert timed.step_charged_bytes == share * budget_bytes
    assert len(timed.step_seconds) == steps


def test_where_memory_is_short_processes_return_theirs_between_blocks(
    tripping: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = tripping
    monkeypatch.setattr("autotune.measure.harness.KEEPING_FACTOR", 1e9)
    requests = record_requests(monkeypatch, runner)
    assert runner.measure(Plan.traced(runner.prepare().graph)).outcome is Outcome.OK
    assert ("beside", "StopTiming") in requests
    assert requests.count(("seconds", "TimeBlock")) == 1, "a block has two steps then"


def test_memory_that_the_children_take_changes_nothing_in_how_later_plans_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter([301, 200])
    monkeypatch.setattr("autotune.measure.harness.available_bytes", lambda: next(free))
    runner: Any = SimpleNamespace(_spec=SimpleNamespace(device_kind="cpu"), _free_bytes=None)
    assert [Harness._can_keep_memory(runner, 100) for _ in range(2)] == [True, True]


def test_a_wrong_result_beside_the_bytes_leaves_the_charge_on_the_floor_of_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Measurement(Outcome.OK, floor_bytes=40, charged_bytes=100, step_seconds=(1.0,))
    with harness(tmp_path, "switched") as runner:
        monkeypatch.setattr(runner, "_measure_seconds", lambda *_: timed)
        monkeypatch.setattr(
            runner, "_check_results_and_bytes", lambda *_: Measurement(Outcome.WRONG_RESULT, max_error=2.0)
        )
        wrong = runner._measure_seconds_first(Plan((0,)), {}, None, None)
    assert wrong.outcome is Outcome.WRONG_RESULT
    assert (wrong.floor_bytes, wrong.charged_bytes, wrong.step_charged_bytes) == (40, 100, 60)


def test_a_plan_of_another_graph_is_refused(tripping: tuple[Harness, Path]) -> None:
    runner, _ = tripping
    with pytest.raises(PlanError, match="another graph"):
        runner.measure(Plan((999,)))


def test_a_factory_that_raises_is_one_line_with_its_traceback_and_leaves_only_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # a training loop would have it too
    with (
        harness(tmp_path, "tells_threads") as runner,
        pytest.raises(ConfigError, match="OMP_NUM_THREADS is 3") as caught,
    ):
        runner.prepare()
    assert "\n" not in str(caught.value)
    assert_traceback(caught.value, "tells_threads")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["eager-1.log"]


@pytest.mark.usefixtures("children_in_process")
def test_a_lazy_layer_is_refused_before_plain_pytorch_could_fail_on_it(tmp_path: Path) -> None:
    refused = pytest.raises(CaptureError, match=r"^0\.weight is not initialized yet; call model\(batch\) once before")
    with harness(tmp_path, "lazy") as runner, refused:
        runner.prepare()


def test_an_error_of_the_users_step_carries_the_traceback_of_its_process(tmp_path: Path) -> None:
    said = r"fails with this batch \(crashed\): ValueError: no loss today at \S*workloads\.py:\d+ \(raise ValueError"
    refused = pytest.raises(ConfigError, match=said)
    with harness(tmp_path, "refuses_backward") as runner, refused as caught:
        runner.prepare()
    assert not runner.baseline().step_seconds
    assert_traceback(caught.value, "refuses_backward")


def assert_traceback(error: ConfigError, function: str) -> None:
    """Check that the error shows the line of the user's function, and its own text no traceback."""
    shown = "".join(traceback.format_exception(error))
    assert f'File "{WORKLOADS}"' in shown
    assert f", in {function}\n" in shown
    assert "Traceback" not in str(error)


LIMIT = 580 * MIB
TALL = {"depth": 48}  # 8 MiB a layer: eager needs 420 MiB beside the interpreter's


@pytest.mark.slow
@needs_cgroup
def test_where_eager_does_not_fit_a_plan_still_does_and_is_checked_on_a_smaller_batch(tmp_path: Path) -> None:
    with harness(tmp_path, "wide", TALL, limit_bytes=LIMIT) as runner:
        prepared, baseline = runner.prepare(), runner.baseline()
        plan = make_plan(prepared.graph, SPARING, 0, prepared.costs)
        traced, seen = runner.measure(Plan.traced(prepared.graph)), runner.measure(plan)
    assert baseline.outcome is traced.outcome is Outcome.OUT_OF_MEMORY
    assert (prepared.baseline_fits, prepared.capture_error) == (False, 0.0)
    assert re.fullmatch(r"bit-equal to eager; compared at batch \d+", seen.verified)
    assert seen.outcome is Outcome.OK
    assert (seen.max_error, seen.limit, seen.time_ratio) == (0.0, "cgroup", None)
    assert "batch" in seen.detail
    assert seen.charged_bytes is not None
    assert seen.charged_bytes <= LIMIT


class WithoutEager(InProcessChildren):
    """Children in which plain eager runs out of memory at the workload's own batch."""

    def ask(self, role: ChildRole, request: Expects[Any], **options: Any) -> Any:
        if isinstance(request, EagerPeakRequest) and options.get("arguments") is None:
            raise ChildError(Outcome.OUT_OF_MEMORY, "not enough memory")
        try:
            return super().ask(role, request, **options)
        except ConfigError as error:  # of a factory without such an argument
            raise ChildError(Outcome.CRASHED, str(error), type(error).__name__) from error


@pytest.mark.slow
@pytest.mark.usefixtures("children_in_process")
def test_a_plan_that_nobody_could_check_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.measure.harness.Children", WithoutEager)
    with harness(tmp_path, "fixed") as runner:
        prepared = runner.prepare()
        seen = runner.measure(make_plan(prepared.graph, SPARING, 0, prepared.costs))
    assert prepared.capture_error is seen.max_error is None
    assert prepared.verified == seen.verified == ""
    assert "not compared" in seen.detail


def test_without_cgroups_the_child_limits_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.measure.child._create_cgroup", lambda _: None)
    with harness(tmp_path, "wide", TALL, limit_bytes=LIMIT) as runner:
        seen = runner.baseline()
    assert (seen.outcome, seen.limit) == (Outcome.OUT_OF_MEMORY, "rlimit (emulated)")


COORDINATOR = """
import sys
from pathlib import Path
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.workloads.reference import WorkloadRef
folder = Path(sys.argv[2])
(folder / "switch").write_text("hang")
workload = WorkloadRef(sys.argv[1] + ":switched", {"switch": str(folder / "switch")})
Harness(Spec(workload, folder / "logs")).baseline()
"""


def test_children_hear_no_ctrl_c_and_die_with_the_coordinator(tmp_path: Path) -> None:
    script = subprocess.Popen([sys.executable, "-c", COORDINATOR, WORKLOADS, str(tmp_path)])
    try:
        coordinator = psutil.Process(script.pid)
        wait_for(lambda: coordinator.children() and not (tmp_path / "switch").exists())
        child = coordinator.children()[0]
        assert os.getsid(child.pid) == child.pid != os.getsid(script.pid)
        script.send_signal(signal.SIGKILL)
        wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        script.kill()
        script.wait()
    remove_stale()


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_an_update_of_several_steps_may_take_as_many_times_as_long(tmp_path: Path):
    config = load_config(f"{WORKLOADS}:wide", overrides={"runs": str(tmp_path), "loop": "accumulate=4"})
    with open_harness(config, tmp_path / "logs") as harness:
        assert harness._children.time_limit_seconds == 4 * harness._spec.time_limit_seconds
