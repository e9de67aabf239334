"""What leaves a step and comes back, whatever the store does: the step ends right, or with one clear error and the weights."""

import errno
import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import PlanError, StoreError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Phase, Role
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, Schedule, lower
from autotune.planners import make_plan
from autotune.planners.offload.window import OffloadWindow
from autotune.runtime.executor import Executor
from autotune.runtime.offload.engine import OffloadEngine
from autotune.runtime.offload.slots import offloaded_values, slot_sizes
from autotune.runtime.stores import open_store
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import make


class Memory:
    """A store that keeps clones, at once; a key in `broken` fails."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.broken: dict[int, str] = {}

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]":
        self.kept[key] = tensor.clone()
        return self._done(key, "write", None)

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]":
        back = self.kept[key] if into is None else into.copy_(self.kept[key])
        return self._done(key, "read", back)

    def transfers(self) -> list[tuple[str, float, float]]:
        return []

    def _done(self, key: int, verb: str, answer: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        if self.broken.get(key) == verb:
            future.set_exception(StoreError(f"cannot {verb} slot {key}"))
        else:
            future.set_result(answer)
        return future


MOVES: Mapping[str, Callable[[OffloadEngine], Any]] = {
    "start_write": lambda engine: engine.start_write(0, torch.ones(3)),
    "finish_write": lambda engine: engine.finish_write(0),
    "start_read": lambda engine: engine.start_read(0),
    "finish_read": lambda engine: engine.finish_read(0),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("done", range(len(MOVES) + 1))
def test_a_value_is_saved_gone_loaded_and_there_again_and_in_no_other_order(done: int, move: str):
    engine = OffloadEngine(Memory(), {}, 1)
    engine.begin()
    for before in [*MOVES][:done]:
        MOVES[before](engine)
    if [*MOVES, "start_write"][done] == move:
        MOVES[move](engine)
    else:
        with pytest.raises((PlanError, KeyError)):
            MOVES[move](engine)


def test_a_step_that_ends_with_something_away_is_refused():
    engine = OffloadEngine(Memory(), {}, 1)
    engine.begin()
    engine.start_write(0, torch.ones(3))
    with pytest.raises(PlanError, match="value 0 is being written at the end of the step"):
        engine.end()


def test_what_cannot_be_written_stays_and_is_written_again_in_the_next_gap():
    store = Memory()
    engine = OffloadEngine(store, {}, 1)
    tensor = torch.arange(4)
    store.broken = {0: "write"}
    with engine:
        engine.start_write(0, tensor)
        engine.finish_write(0)
        engine.start_read(0)
        assert engine.finish_read(0) is tensor
        assert "cannot write slot 0" in engine.problem
        store.broken = {}
        engine.start_write(0, tensor)
        engine.finish_write(0)
        engine.start_read(0)
        back = engine.finish_read(0)
    assert back is not tensor
    assert torch.equal(back, tensor)
    with engine:
        pass
    assert engine.problem == ""


def test_the_users_own_memory_is_given_back_and_the_tensor_stays_the_same_object():
    weight = torch.arange(1000.0)
    engine = OffloadEngine(Memory(), {0: lambda: [weight]}, 1)
    with engine:
        engine.start_write(0)
        engine.finish_write(0)
        assert weight.untyped_storage().nbytes() == 0
        engine.start_read(0)
        assert engine.finish_read(0) is None
    assert torch.equal(weight, torch.arange(1000.0))


@pytest.mark.parametrize("until", ["start_write", "finish_write", "start_read"])
def test_a_step_that_is_broken_off_leaves_the_users_own_as_it_was(until: str):
    weight = torch.arange(1000.0)
    engine = OffloadEngine(Memory(), {0: lambda: [weight]}, 1)

    def step() -> None:
        with engine:
            for move in (engine.start_write, engine.finish_write, engine.start_read):
                move(0)
                if move.__name__ == until:
                    raise KeyboardInterrupt

    for _ in range(2):  # and the next step begins anew
        with pytest.raises(KeyboardInterrupt):
            step()
        assert torch.equal(weight, torch.arange(1000.0))


class Interrupted(Memory):
    """A store in which an exception of a signal's handler arrives, once each, during the reads with these numbers."""

    def __init__(self, *reads: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.reads, self.error, self.count = {*reads}, error, 0

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]":
        self.count += 1
        if self.count in self.reads:
            raise self.error
        return super().fetch(key, into)


@pytest.mark.parametrize(("error", "raised"), [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError, ValueError)])
def test_a_second_interrupt_waits_until_all_weights_are_back(error: type[BaseException], raised: type[BaseException]):
    weights = [torch.arange(100.0) + number for number in range(4)]
    store = Interrupted(1, 3, error=error)
    engine = OffloadEngine(store, {key: lambda key=key: [weights[key]] for key in range(4)}, 4)

    def step() -> None:
        with engine:
            for key in range(4):
                engine.start_write(key)
                engine.finish_write(key)
            raise ValueError("the step failed")

    with pytest.raises(raised):
        step()
    assert all(torch.equal(weight, torch.arange(100.0) + number) for number, weight in enumerate(weights))
    with engine:
        pass


def test_an_interrupt_while_the_failed_steps_frames_are_cleared_does_not_lose_a_weight(monkeypatch: pytest.MonkeyPatch):
    weight = torch.arange(100.0)
    engine = OffloadEngine(Memory(), {0: lambda: [weight]}, 1)

    def interrupt(trace: Any) -> None:
        raise KeyboardInterrupt

    def step() -> None:
        with engine:
            engine.start_write(0)
            engine.finish_write(0)
            raise ValueError("the step failed")

    with monkeypatch.context() as patch:
        patch.setattr(traceback, "clear_frames", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
    assert torch.equal(weight, torch.arange(100.0))


def test_an_interrupt_just_before_a_weight_is_read_back_does_not_lose_it():
    weight = torch.arange(100.0)

    class Told:
        """The interrupt arrives while the allocator hears that the weight returns."""

        def set_offloaded(self, nbytes: int) -> None:
            if nbytes == 0 and weight.untyped_storage().nbytes() == 0 and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt

        def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
            storage.resize_(nbytes)

    stopped: list[bool] = []
    engine = OffloadEngine(Memory(), {0: lambda: [weight]}, 1, Told())

    def step() -> None:
        with engine:
            engine.start_write(0)
            engine.finish_write(0)
            engine.start_read(0)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert stopped
    assert torch.equal(weight, torch.arange(100.0))


def test_what_keeps_a_value_in_memory_is_logged_once_and_not_in_every_step():
    store, tensor = Memory(), torch.arange(4)
    engine = OffloadEngine(store, {}, 1)
    store.broken = {0: "write"}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autotune.runtime.offload.engine")
    logger.addHandler(handler)
    try:
        for _ in range(3):
            with engine:
                engine.start_write(0, tensor)
                engine.finish_write(0)
                engine.start_read(0)
                engine.finish_read(0)
            assert "cannot write slot 0" in engine.problem
    finally:
        logger.removeHandler(handler)
    assert len(lines) == 1


def test_a_weight_that_the_store_lost_is_told_with_the_way_out():
    weight, store = torch.arange(1000.0), Memory()
    engine = OffloadEngine(store, {0: lambda: [weight]}, 1)
    engine.begin()
    engine.start_write(0)
    engine.finish_write(0)
    store.broken = {0: "read"}
    with pytest.raises(StoreError, match=r"cannot read slot 0, and a weight .* is lost; load a checkpoint"):
        engine.abort()
    assert weight.untyped_storage().nbytes() == 4000, "a model of the right shape, for a checkpoint to be loaded into"


def test_a_weight_that_the_store_lost_is_nan_so_that_no_loop_goes_on_with_what_its_memory_holds():
    weights, store = [torch.arange(1000.0), torch.arange(500.0)], Memory()
    engine = OffloadEngine(store, {key: lambda key=key: [weights[key]] for key in (0, 1)}, 2)
    engine.begin()
    for key in (0, 1):
        engine.start_write(key)
        engine.finish_write(key)
    store.broken = {0: "read"}
    with pytest.raises(StoreError, match="cannot read slot 0"):
        engine.abort()
    assert weights[0].isnan().all()
    assert torch.equal(weights[1], torch.arange(500.0))


def test_a_weight_whose_read_cannot_start_is_nan_and_one_that_never_left_stays() -> None:
    weights = [torch.arange(100.0), torch.arange(50.0), torch.arange(20.0)]
    store = Interrupted(1, 2, 3, error=RuntimeError)
    engine = OffloadEngine(store, {key: lambda key=key: [weights[key]] for key in range(3)}, 3)
    engine.begin()
    for key in (0, 1, 2):
        engine.start_write(key)
    for key in (0, 1):
        engine.finish_write(key)
    with pytest.raises(StoreError, match="a weight or its optimizer state is lost"):
        engine.abort()
    assert weights[1].isnan().all()
    assert torch.equal(weights[0], torch.arange(100.0))
    assert torch.equal(weights[2], torch.arange(20.0))


# A whole step under a plan that sends away all that it can.


def deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))


def test_a_weight_that_came_back_before_the_step_broke_off_is_not_read_again():
    weights, store = [torch.arange(1000.0), torch.arange(500.0)], Memory()
    engine = OffloadEngine(store, {key: lambda key=key: [weights[key]] for key in (0, 1)}, 2)
    engine.begin()
    for key in (0, 1):
        engine.start_write(key)
        engine.finish_write(key)
    engine.start_read(0)
    store.broken = {0: "read", 1: "read"}
    with pytest.raises(StoreError, match="cannot read slot 1"):
        engine.abort()
    assert torch.equal(weights[0], torch.arange(1000.0))


def test_where_there_is_no_memory_for_one_weight_the_others_come_back_all_the_same():
    weights = [torch.arange(1000.0), torch.arange(500.0)]
    updates: list[int] = []

    class Scarce:
        def set_offloaded(self, nbytes: int) -> None:
            updates.append(nbytes)

        def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
            if nbytes > 2000:
                raise MemoryError(f"no {nbytes} B to be had")
            storage.resize_(nbytes)

    engine = OffloadEngine(Memory(), {key: lambda key=key: [weights[key]] for key in (0, 1)}, 2, Scarce())
    engine.begin()
    for key in (0, 1):
        engine.start_write(key)
        engine.finish_write(key)
    with pytest.raises(MemoryError):
        engine.start_read(0)
    with pytest.raises(StoreError, match=r"no 4000 B to be had, .*; start the process again and load a checkpoint"):
        engine.abort()
    assert torch.equal(weights[1], torch.arange(500.0))
    assert updates == [0, 4000, 6000, 2000, 0]


def test_a_weight_comes_back_where_only_the_failed_steps_values_stood_in_its_way():
    weight, values = torch.arange(1000.0), list[Any]()

    class Scarce:
        def set_offloaded(self, nbytes: int) -> None:
            pass

        def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
            if any(value() is not None for value in values):
                raise torch.OutOfMemoryError("CUDA out of memory")
            storage.resize_(nbytes)

    engine = OffloadEngine(Memory(), {0: lambda: [weight]}, 2, Scarce())

    def step() -> None:
        value, sent = torch.ones(10), torch.ones(20)
        values.extend((weakref.ref(value), weakref.ref(sent)))
        engine.start_write(1, sent)
        engine.start_write(0)
        engine.finish_write(0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), engine:
        step()
    assert torch.equal(weight, torch.arange(1000.0))


class Step:
    """A step of `deep` with weights, state and activations away; the store's disk is whatever the test says."""

    def __init__(self, directory: Path, window: int = 1, **seams: Any) -> None:
        self.workload, self.other = (make(deep, (64, 8)) for _ in range(2))
        self.program = capture(self.workload)
        self.schedule = all_away(self.program, window)
        self.store = open_store("ssd", directory, slot_sizes(self.program, self.schedule), **seams)

    def run(self, *, after: Callable[[int], None] | None = None) -> tuple[torch.Tensor, Executor]:
        step = Executor(self.program, self.schedule, self.store, after_instruction=after)
        assert self.program.updates is not None
        with self.program.updates.step():
            return step(list(self.workload.batch)), step

    def first(self, phase: Phase) -> int:
        """Its first op of this phase."""
        return next(op.id for op in self.program.graph.ops if op.phase is phase)

    def assert_equals_eager(self, loss: torch.Tensor) -> None:
        assert torch.equal(loss, eager_step(self.other)[0])
        assert worst_difference(tensors(self.workload), tensors(self.other)) == 0.0


def all_away(program: Program, window: int) -> Schedule:
    costs = replace(Costs.unit(program.graph), stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    schedule = lower(
        program.graph, OffloadWindow(window, what="all").plan(program.graph, Plan.traced(program.graph), 0, costs)
    )
    roles = {program.graph.values[value].role for value in offloaded_values(schedule)}
    assert {Role.PARAM, Role.STATE, Role.ACTIVATION} <= roles
    return schedule


class Disk:
    """A disk that can be broken and mended."""

    def __init__(self) -> None:
        self.fails = ""

    def pwritev(self, file: int, buffers: list[memoryview], offset: int) -> int:
        return self._move("write", os.pwritev, file, buffers, offset)

    def preadv(self, file: int, buffers: list[memoryview], offset: int) -> int:
        return self._move("read", os.preadv, file, buffers, offset)

    def _move(self, verb: str, call: Any, file: int, buffers: list[memoryview], offset: int) -> int:
        if verb in self.fails:
            number = errno.ENOSPC if "full" in self.fails else errno.EIO
            raise OSError(number, os.strerror(number))
        moved = int(call(file, buffers, offset))
        if verb == "read" and self.fails == "bits":
            buffers[0][0] ^= 1
        return moved


def test_a_step_whose_writes_fail_ends_right_and_the_next_one_too(tmp_path: Path):
    disk = Disk()
    step = Step(tmp_path, pwritev=disk.pwritev)
    with step.store:
        for broken in ("", "write", "write, full", ""):
            disk.fails = broken
            loss, executor = step.run()
            step.assert_equals_eager(loss)
            assert bool(executor.problem) == bool(broken)
        assert executor.transfer_bytes > 0


@pytest.mark.parametrize("fails", ["read", "bits"])
def test_a_step_whose_reads_fail_is_one_error_and_after_a_checkpoint_the_next_is_right(tmp_path: Path, fails: str):
    disk = Disk()
    step = Step(tmp_path, preadv=disk.preadv, checksums="all")
    with step.store:
        step.assert_equals_eager(step.run()[0])
        saved = {name: tensor.clone() for name, tensor in tensors(step.workload).items()}
        disk.fails = fails
        with pytest.raises(StoreError, match="load a checkpoint"):
            step.run()
        disk.fails = ""
        for name, tensor in tensors(step.workload).items():
            tensor.copy_(saved[name])
        step.assert_equals_eager(step.run()[0])


def test_a_read_that_fails_once_costs_the_step_and_not_the_weights(tmp_path: Path):
    left = [3]

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(file, buffers, offset)

    step = Step(tmp_path, preadv=preadv)
    with step.store:
        before = {name: tensor.clone() for name, tensor in step.workload.model.state_dict().items()}
        with pytest.raises(StoreError, match="cannot read slot"):
            step.run()
        assert worst_difference(dict(step.workload.model.state_dict()), before) == 0.0
        step.assert_equals_eager(step.run()[0])


def test_a_step_interrupted_anywhere_leaves_the_weights_in_memory(tmp_path: Path):
    step = Step(tmp_path)
    with step.store:
        step.assert_equals_eager(step.run()[0])
        for stop in range(0, len(step.schedule.instructions), 5):

            def interrupt(index: int, stop: int = stop) -> None:
                if index == stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                step.run(after=interrupt)
            full = [p.untyped_storage().nbytes() == p.numel() * 4 for p in step.workload.model.parameters()]
            assert all(full)


def test_a_step_that_is_closed_while_it_runs_brings_its_weights_back_and_closes_then(tmp_path: Path):
    workload, other = (make(deep, (4, 8)) for _ in range(2))
    graph = capture(workload).graph
    costs = replace(Costs.unit(graph), stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    planners = {"offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0, "what": "all"}}
    plan = make_plan(graph, planners, 0, costs)
    assert {swap.value for swap in plan.offload} & set(graph.static)
    step = TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, stores={"ssd": tmp_path}
    )
    step.on_gradient = lambda *_: step.close()  # as the handler of a signal may
    loss = step(workload.batch)
    assert torch.equal(loss, eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    assert not list(tmp_path.iterdir())


def test_a_backward_that_never_comes_leaves_the_next_step_right(tmp_path: Path):
    step = Step(tmp_path)
    turn = next(
        index
        for index, instruction in enumerate(step.schedule.instructions)
        if instruction == Run(step.first(Phase.BACKWARD))
    )

    def interrupt(index: int) -> None:
        if index == turn:
            raise KeyboardInterrupt

    with step.store:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                step.run(after=interrupt)
            step.assert_equals_eager(step.run()[0])


def test_a_slow_disk_costs_waiting_and_nothing_else(tmp_path: Path):
    def slowed(call: Any) -> Any:
        def slow(*arguments: Any) -> int:
            time.sleep(2e-3)
            return int(call(*arguments))

        return slow

    step = Step(tmp_path, pwritev=slowed(os.pwritev), preadv=slowed(os.preadv))
    with step.store:
        for _ in range(2):
            loss, executor = step.run()
            step.assert_equals_eager(loss)
    trace = executor.transfer_trace
    assert len(trace.saves) == len(trace.loads) > len(offloaded_values(step.schedule)) / 2
    assert all(end - start >= 2e-3 for start, end in (*trace.saves, *trace.loads))
    assert 0 < trace.stall_seconds < trace.seconds
    assert trace.hidden is not None
    assert 0 <= trace.hidden < 1


def test_a_weight_whose_memory_numpy_was_shown_stays_and_the_step_ends_right(tmp_path: Path):
    step = Step(tmp_path)
    with step.store:
        step.assert_equals_eager(step.run()[0])
        shown = step.workload.model[2].weight.detach().numpy()  # makes its storage unresizable for ever
        loss, executor = step.run()
        step.assert_equals_eager(loss)
        assert "Tensor.numpy() was called on it" in executor.problem
        assert executor.transfer_bytes > 0
        assert shown.shape == (8, 8)


def test_a_directory_that_vanishes_and_a_second_run_in_it_disturb_nobody(tmp_path: Path):
    directory = tmp_path / "store"
    directory.mkdir()
    first, second = Step(directory), Step(directory, window=2)
    with first.store, second.store:
        assert not list(directory.iterdir())
        directory.rmdir()
        for _ in range(2):
            first.assert_equals_eager(first.run()[0])
            second.assert_equals_eager(second.run()[0])


def test_a_weight_that_shares_its_memory_may_not_leave(tmp_path: Path):
    def shared() -> nn.Module:
        model = deep()
        flat = torch.cat([model[0].weight.detach().flatten(), model[2].weight.detach().flatten()])
        model[0].weight.data, model[2].weight.data = flat[:64].view(8, 8), flat[64:].view(8, 8)
        return model

    workload: Workload = make(shared, (64, 8))
    program = capture(workload)
    schedule = all_away(program, 1)
    with (
        open_store("ssd", tmp_path, slot_sizes(program, schedule)) as store,
        pytest.raises(
            PlanError,
            match=r"0\.weight shares its memory with .*; clone it .* or tune with planners: \{offload: \[keep\]\}",
        ),
    ):
        Executor(program, schedule, store)
