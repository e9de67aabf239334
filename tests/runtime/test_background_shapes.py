"""New batch shapes are captured and planned in another process, and the training process goes on with the same bits."""

import io
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autotune.capture.signature import ModelState, make_signature
from autotune.capture.tracer import capture
from autotune.errors import ConfigError
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.runtime import prepared_step, step_selector
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.shapes import background as background_shapes
from autotune.runtime.shapes import background_worker
from autotune.runtime.shapes.background import Answer, BackgroundShapes, Job
from autotune.runtime.shapes.program_change import ProgramChange, describe_change, dump
from autotune.runtime.shapes.step_costs import StepCosts, scale_costs
from autotune.runtime.train_step import TrainStep
from autotune.workloads.batch import flatten_batch
from autotune.workloads.workload import Workload
from tests.support import waiting


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 3))


def linear() -> nn.Module:
    return nn.Linear(6, 3)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"logits": logits}


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def make(
    loss: Callable[[nn.Module, Any], Any] = loss_fn, rows: int = 8, make_model: Callable[[], nn.Module] = net
) -> Workload:
    torch.manual_seed(1)
    model = make_model()
    return Workload(model, loss, torch.optim.AdamW(model.parameters()), batch(rows))


def captures_of(workload: Workload, *rows: int) -> list[Any]:
    return [capture(Workload(workload.model, workload.loss_fn, workload.optimizer, batch(count))) for count in rows]


def test_a_program_for_another_shape_is_the_first_one_with_its_change():
    runs = []
    for is_changed in (False, True):
        workload = make()
        if is_changed:
            first, other = captures_of(workload, 8, 5)
            change = describe_change(first, other)
            assert isinstance(change, ProgramChange)
            assert dump(change)
            changed = change.apply(first)
            assert changed.graph == other.graph
            assert [(call.args, call.kwargs) for call in changed.calls] == [
                (call.args, call.kwargs) for call in other.calls
            ]
            assert changed.updates is first.updates
            assert changed.guards.hold(list(batch(5)), [])
            other = changed
        else:
            (other,) = captures_of(workload, 5)
        torch.manual_seed(2)
        execute = Executor(other, lower(other.graph, Plan.traced(other.graph)))
        for number in range(3):
            with other.updates.step():
                loss, extras = execute(list(batch(5, number)))
        runs.append([loss, extras["logits"], *workload.model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_guards_of_a_changed_program_notice_python_values_and_other_kinds_of_tensors():
    workload = make()
    first, other = captures_of(workload, 8, 5)
    change = describe_change(first, other)
    assert isinstance(change, ProgramChange)
    guards = change.apply(first).guards
    with torch.inference_mode():
        unusual = [part.clone() for part in batch(5)]
    assert not guards.hold(unusual, [])
    assert guards.hold(list(batch(5)), [])
    workload.model[3].p = 0.5
    assert not guards.hold(list(batch(5)), [])
    failure = guards.first_failure(list(batch(5)), [])
    assert failure is not None
    assert failure.name == "model.3.p"


def test_a_condition_on_the_batchs_numbers_is_that_of_the_shape():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        if (batch[0] > -50).sum() == batch[0].numel():  # as libraries ask whether a mask is all ones
            return F.cross_entropy(logits, batch[1])
        return logits.sum()

    first, other = captures_of(make(loss, make_model=linear), 8, 5)
    change = describe_change(first, other)
    assert isinstance(change, ProgramChange)
    guards = pickle.loads(dump(change)).apply(first).guards
    inputs, labels = batch(5)
    assert guards.hold([inputs, labels], [])
    assert guards.first_failure([inputs, labels], []) is None
    inputs[0, 0] = -100
    assert not guards.hold([inputs, labels], [])
    assert "a condition on batch.0" in str(guards.first_failure([inputs, labels], []))


def scaled_if_short(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss * model.weight_of_short if len(batch[0]) < 6 else loss


def of_another_kernel(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]) if len(logits) < 6 else F.nll_loss(logits.log_softmax(1).sin(), batch[1])


@pytest.mark.parametrize(
    ("loss", "reason"), [(scaled_if_short, "other ops"), (of_another_kernel, "other ops for this shape")]
)
def test_a_shape_with_another_step_is_declined_with_the_reason(loss: Any, reason: str):
    workload = make(loss, make_model=linear)
    workload.model.weight_of_short = 0.5
    change = describe_change(*captures_of(workload, 8, 5))
    assert isinstance(change, str)
    assert reason in change


def test_a_shape_that_reads_another_python_value_is_declined():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        factor = model.long if len(batch[0]) > 6 else model.short
        return F.cross_entropy(model(batch[0]), batch[1]) * factor

    workload = make(loss, make_model=linear)
    workload.model.long, workload.model.short = 2.0, 2.0
    assert describe_change(*captures_of(workload, 8, 5)) == "the step reads other Python values for this shape"


def test_one_profile_serves_every_shape_and_scaled_scratch_bounds_the_measured():
    workload = make(rows=64)
    profiled = []

    def measure(program: Any) -> Costs:
        profiled.append(program)
        return profile(program)

    costs = StepCosts(measure)
    large, small = captures_of(workload, 64, 48)
    estimates = [costs.estimate(program) for program in (large, small)]
    assert profiled == [large]
    assert all(a >= b for a, b in zip(estimates[1].scratch_bytes, profile(small).scratch_bytes, strict=True))
    back = scale_costs(estimates[1], small.graph, large.graph)
    assert all(a >= b for a, b in zip(back.scratch_bytes, estimates[0].scratch_bytes, strict=True))


def eager(workload: Workload, data: list[Any], between: Callable[[int], None]) -> list[torch.Tensor]:
    return steps(workload, data, between, lambda each: _eager_step(workload, each))


def _eager_step(workload: Workload, each: Any) -> Any:
    loss, _ = workload.loss_fn(workload.model, each)
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return loss.detach()


def steps(
    workload: Workload, data: list[Any], between: Callable[[int], None], step: Callable[[Any], Any]
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    losses = []
    for number, each in enumerate(data):
        between(number)
        result = step(each)
        losses.append((result[0] if isinstance(result, tuple) else result).detach().clone())
    return [*losses, *workload.model.state_dict().values(), torch.get_rng_state()]


def wait_for(background: BackgroundShapes, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(background._answers) < count and time.monotonic() < deadline:
        time.sleep(0.05)
        background._receive()
    assert len(background._answers) == count


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Batches captured by this process."""
    captured: list[Any] = []

    def record(workload: Workload, *args: Any, **kwargs: Any) -> Any:
        captured.append(workload.batch)
        return capture(workload, *args, **kwargs)

    monkeypatch.setattr(step_selector, "capture", record)
    monkeypatch.setattr(prepared_step, "profile", pytest.fail)
    return captured


@pytest.mark.filterwarnings("ignore:.*runs in plain eager until another process")
def test_new_shapes_run_in_eager_until_a_process_that_outlives_the_thread_that_started_it_has_planned_them(
    captures: list[Any],
):
    rows = [8, 5, 12, 8, 5, 12, 5, 8]
    data = [batch(count, seed) for seed, count in enumerate(rows)]
    workload = make()
    first_thread = ThreadPoolExecutor(1)
    made = partial(TrainStep, workload.model, loss_fn, workload.optimizer, data[0], other_shapes="background")
    step = first_thread.submit(made).result()
    planned: list[bool] = []

    def between(number: int) -> None:
        if number:
            planned.append(not step.is_eager)
        if number == 2:
            first_thread.submit(wait_for, step._selector._background, 1).result()
            first_thread.shutdown()
        if number == 4:
            wait_for(step._selector._background, 2)

    def call(each: Any) -> Any:
        return first_thread.submit(step, each).result() if len(planned) < 2 else step(each)

    with step:
        got = steps(workload, data, between, call)
        process = step._selector._background._process
    twin = make()
    assert all(torch.equal(one, two) for one, two in zip(eager(twin, data, lambda _: None), got, strict=True))
    assert planned == [True, False, False, True, True, True, True]
    assert len(captures) == 1
    assert process.poll() is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs in plain eager until another process")
@pytest.mark.filterwarnings("ignore:.*changed. the captured step is valid")
def test_a_value_that_changed_since_the_copy_is_never_used(captures: list[Any]):
    data = [batch(count, seed) for seed, count in enumerate([8, 5, 5, 8, 5])]
    runs = []
    for is_planned in (True, False):
        workload = make()
        step = TrainStep(workload.model, loss_fn, workload.optimizer, data[0], other_shapes="background")

        def between(number: int, step: TrainStep = step, waits: bool = is_planned) -> None:
            if number == 2:
                step.model[3].p = 0.6
                if waits:
                    wait_for(step._selector._background, 1)

        runs.append(steps(workload, data, between, step) if is_planned else eager(workload, data, between))
        step.close()
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@pytest.mark.slow
def test_a_planned_loss_serves_new_shapes_too(captures: list[Any]):
    data = [batch(count, seed) for seed, count in enumerate([8, 5, 8, 5, 5])]
    workload = make()
    planned = PlannedLoss(workload.model, loss_fn, other_shapes="background")

    def step(each: Any) -> torch.Tensor:
        loss, _ = planned(each)
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        return loss

    def between(number: int) -> None:
        if number == 3:
            wait_for(next(iter(planned._selectors.values()))[0]._background, 1)

    with pytest.warns(UserWarning, match="plain eager until another process has captured and planned it"):
        got = steps(workload, data, between, step)
    planned.close()
    assert all(torch.equal(one, two) for one, two in zip(eager(make(), data, lambda _: None), got, strict=True))
    assert len(captures) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs in plain eager until another process")
def test_without_the_other_process_shapes_are_captured_here(captures: list[Any], tmp_path: Path):
    data = [batch(count, seed) for seed, count in enumerate([8, 5, 5])]
    workload = make()
    step = TrainStep(workload.model, loss_fn, workload.optimizer, data[0], other_shapes="background")
    step._selector._background._process.kill()
    step._selector._background._process.wait()
    time.sleep(0.5)
    with pytest.warns(UserWarning, match="captured by the training process, which waits for it"):
        got = steps(workload, data, lambda _: None, step)
    assert all(torch.equal(one, two) for one, two in zip(eager(make(), data, lambda _: None), got, strict=True))
    assert len(captures) == 2


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BackgroundShapes]:
    """Starts a process that never reads a request; its copy of the workload lies in `tmp_path`."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(["sleep", "30"], **options))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first: Any = SimpleNamespace(graph=SimpleNamespace(digest=""))
    return lambda workload=None: BackgroundShapes(first, first, workload or make(), None, {}, gradients=False)


def test_a_large_request_does_not_wait_for_a_process_that_reads_none(idle: Callable[[], BackgroundShapes]):
    background, call, begin = idle(), Any, time.monotonic()
    assert background.take(call, torch.zeros(1 << 20)) is None
    assert time.monotonic() - begin < 10
    background.close()


def test_the_other_process_gets_the_bytes_of_a_batch_and_not_of_the_data_around_it(
    idle: Callable[..., BackgroundShapes], tmp_path: Path
):
    workload = make()
    workload.batch = torch.zeros(1 << 20, 6)[:8], workload.batch[1]
    background, call = idle(workload), Any
    assert sum(path.stat().st_size for path in tmp_path.rglob("workload")) in range(1, 1_000_000)
    background._requests = queue.SimpleQueue()  # a thread empties the first one
    data = torch.arange(1 << 20).reshape(-1, 4)
    rows = data[5:9]
    whole = {"rows": rows, "again": rows, "columns": data[2:6, 1:3]}
    assert background.take(call, whole) is None
    message = background._requests.get_nowait()
    assert message is not None
    assert len(message) < 10_000
    sent = pickle.loads(pickle.loads(message)[1])
    assert sent["rows"] is sent["again"]
    for name, tensor in whole.items():
        assert torch.equal(sent[name], tensor)
        assert sent[name].stride() == tensor.stride()
    background.close()


def test_a_forked_process_captures_its_shapes_itself(
    idle: Callable[[], BackgroundShapes], monkeypatch: pytest.MonkeyPatch
):
    background = idle()
    call = make_signature(flatten_batch(batch(5)), ModelState(0, (), has_parameter_hooks=False), "")
    background._first_call = call
    assert background.serves(call)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert not background.serves(call)
    background.close()


def test_a_batch_that_the_other_process_cannot_load_is_answered_and_the_next_one_is_planned():
    workload = make()
    job = Job(Path(), "", False, capture(workload).graph.digest, None, {})
    absent = b"c__main__\nAbsentBatch\n."  # a batch of a class of the training script
    requests = [(0, absent), (1, pickle.dumps(batch(5)))]
    answers = io.BytesIO()
    background_worker.serve(job, workload, io.BytesIO(b"".join(map(pickle.dumps, requests))), answers)
    answers.seek(0)
    first, second = pickle.load(answers), pickle.load(answers)
    assert first.change is None
    assert "AbsentBatch" in first.reason
    assert second.change is not None
    assert second.plan is not None


def test_a_process_that_writes_something_else_is_given_up_and_not_waited_for(idle: Callable[[], BackgroundShapes]):
    background, call, begin = idle(), Any, time.monotonic()
    background._arrived.put(None)  # its output was no answer
    with pytest.warns(UserWarning, match="wrote something that is no answer"):
        assert background.take(call, torch.zeros(1)) is None
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_the_copy_of_the_workload_goes_with_its_owner(how: str, idle: Callable[[], BackgroundShapes], tmp_path: Path):
    background = idle()
    process = background._process
    assert process is not None
    assert list(tmp_path.glob("autotune-shapes-*/workload"))
    if how == "closed":
        background.close()
    del background
    assert not list(tmp_path.iterdir())
    assert process.poll() is not None


def test_a_full_disk_leaves_no_copy_and_shapes_to_the_training_process(
    idle: Callable[[], BackgroundShapes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill(workload: Workload, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autotune.runtime.shapes.background.save_workload", fill)
    with pytest.warns(UserWarning, match="captured by the training process, which waits for it: .*No space left"):
        background = idle()
    assert not list(tmp_path.iterdir())
    background.close()


def test_a_copy_that_cannot_be_loaded_is_removed(tmp_path: Path):
    path = tmp_path / "copy" / "workload"
    path.parent.mkdir()
    path.write_bytes(b"half")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="the saved step cannot be loaded"):
        background_worker.load(Job(path, "", False, "", None, {}))
    assert not path.parent.exists()


def test_shapes_that_wait_and_answers_that_nobody_takes_are_bounded(
    idle: Callable[[], BackgroundShapes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(background_shapes, "MAX_OUTSTANDING", 2)
    monkeypatch.setattr(background_shapes, "MAX_ANSWERS", 3)
    background = idle()
    calls: list[Any] = ["a", "b", "c", "d", "e"]
    change: Any = SimpleNamespace()

    def take(*asked: Any) -> list[Answer | None]:
        return [background.take(call, torch.zeros(1)) for call in asked]

    assert take(*calls) == [None] * 5
    assert list(background._numbers) == ["a", "b"], "the others are requested when they come again"
    answers = [Answer(number, change, None) for number in range(4)]
    for pair, asked in ((answers[:2], ("c", "d", "e")), (answers[2:], ("e",))):
        for answer in pair:
            background._arrived.put(answer)
        assert take(*asked) == [None] * len(asked)
    assert list(background._answers.values()) == answers[1:]
    assert take("c", "d", "b") == [answers[2], answers[3], answers[1]]
    assert take("a") == [None]
    assert list(background._numbers) == ["e", "a"], "a shape whose answer was dropped is requested again"
    background.close()


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_other_process_ends_with_its_parent_while_a_fork_keeps_standard_input_open():
    code = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-P', '-m', sys.argv[1], str(os.getpid())]\n"
        "print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, background_shapes.WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.1)
        parent.kill()
        parent.wait()
        waiting.wait_for(lambda: has_ended(worker))
