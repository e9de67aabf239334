"""The executor holds exactly the bytes that the simulator predicts, after every instruction."""

import bisect
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Offload, Prefetch, Run, Schedule, lower
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import simulate, timeline
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import peak_step_bytes, slot_sizes
from autotune.runtime.op_profiler import profile, read_allocations
from autotune.runtime.stores import open_store
from autotune.testing.graphs import Builder
from autotune.workloads.factory import load_workload
from tests.support.eager import eager_step
from tests.support.small import make, normalized

MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"batch": 2, "size": 32, "width": 16, "depth": 1},
    "gpt2": {"batch": 2, "depth": 1, "width": 48, "tokens": 16, "vocabulary": 64, "dropout": 0.1},
    "lstm": {"batch": 2, "width": 32, "tokens": 6, "vocabulary": 64},
    "lstm_fused": {"batch": 2, "width": 32, "tokens": 6, "vocabulary": 64},
}
SETTINGS: dict[str, Settings] = {
    "traced": {"recompute": {"planner": "keep"}, "inplace": {"planner": "never"}},
    "in place": {"recompute": {"planner": "keep"}, "inplace": {"planner": "greedy"}},
    "recompute": {"update": {"planner": "with_gradient"}, "recompute": {"planner": "greedy"}},
    "offload": {
        "recompute": {"planner": "keep"},
        "offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0},
    },
    "offload all": {
        "recompute": {"planner": "keep"},
        "offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0, "what": "all"},
    },
}


@cache
def profiled(name: str) -> tuple[Program, Costs, list[torch.Tensor]]:
    """Capture and profile a model once for all its plans; return its batch as well."""
    workload = load_workload(name, MODELS[name])
    program = capture(workload)
    measured = profile(program)
    costs = Costs(measured.seconds, measured.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    return program, costs, [leaf for leaf in pytree.tree_leaves(workload.batch) if isinstance(leaf, torch.Tensor)]


def allocator_bytes(
    program: Program, schedule: Schedule, batch: list[torch.Tensor], directory: Path
) -> tuple[list[int], int]:
    """What the allocator's own events add up to after every instruction of a step, and their highest sum."""
    begun: list[int] = []

    def mark(index: int) -> None:
        with torch.profiler.record_function(f"autotune {index} of {len(begun)}"):
            pass

    slots: Mapping[int, int] = slot_sizes(program, schedule)
    with open_store("ssd", directory, slots) as store:
        step = Executor(program, schedule, store, after_instruction=mark)
        for _ in range(2):  # optimizer state exists from the second step on
            step(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
            for again in range(2):  # it sees no freeing of what was there before: weights leave in both
                begun.append(again)
                mark(-1)
                result = step(batch)
                del result
    windows, changes = read_allocations(recorded)
    sums = [0]
    for _, nbytes in changes:
        sums.append(sums[-1] + nbytes)
    times = [time_ns for time_ns, _ in changes]
    indices = [
        bisect.bisect_right(times, windows[f"autotune {i} of 2"][0]) for i in range(-1, len(schedule.instructions))
    ]
    before = sums[indices[0]]
    return [sums[index] - before for index in indices[1:]], max(sums[indices[0] :]) - before


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_simulated_bytes_are_the_allocators_after_every_instruction(name: str, kind: str, tmp_path: Path):
    program, costs, batch = profiled(name)
    schedule = lower(program.graph, make_plan(program.graph, SETTINGS[kind], 0, costs))
    after, highest = allocator_bytes(program, schedule, batch, tmp_path)
    static = program.graph.static_bytes
    assert after == [moment.after_bytes - static for moment in timeline(program.graph, schedule, costs)]
    assert highest == simulate(program.graph, schedule, costs).peak_bytes - static
    away = {
        program.graph.values[instruction.value].role
        for instruction in schedule.instructions
        if isinstance(instruction, Offload)
    }
    if kind.startswith("offload") and name != "lstm_fused":  # too few layers to leave memory between any two
        assert away
    if kind == "offload all" and name != "lstm_fused":
        assert {Role.PARAM, Role.STATE} <= away
    if kind != "traced":
        assert any(
            isinstance(instruction, Run) and instruction.reuses_buffer_of is not None
            for instruction in schedule.instructions
        )


class SlowStore:
    """Transfers that take a moment, so that everyone who needs one waits for it."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.asked: list[str] = []
        self.worker = ThreadPoolExecutor(1)

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]":
        self.kept[key] = tensor.clone()
        self.asked.append(f"put {key}")
        return self.worker.submit(time.sleep, 1e-3)

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]":
        self.asked.append(f"fetch {key}")
        return self.worker.submit(self._back, key)

    def _back(self, key: int) -> torch.Tensor:
        time.sleep(1e-3)
        return self.kept.pop(key)

    def transfers(self) -> list[tuple[str, float, float]]:
        return []


def test_every_wait_for_the_store_is_a_recorded_stall():
    program, _, batch = profiled("resnet18")
    costs = Costs.unit(program.graph)
    costs = Costs(costs.seconds, costs.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    schedule = lower(program.graph, make_plan(program.graph, SETTINGS["offload"], 0, costs))
    store = SlowStore()
    step = Executor(program, schedule, store)
    step(batch)
    moved = [instruction for instruction in schedule.instructions if isinstance(instruction, (Offload, Prefetch))]
    assert store.asked == [f"put {m.value}" if isinstance(m, Offload) else f"fetch {m.value}" for m in moved]
    assert 0 < len(step.transfer_trace.save_stalls) <= len(moved) // 2
    assert 0 < len(step.transfer_trace.load_stalls) <= len(moved) // 2
    assert 0 < step.stall_seconds < step.transfer_trace.seconds
    assert step.transfer_bytes == sum(program.graph.values[instruction.value].nbytes for instruction in moved)


def test_a_step_that_fails_leaves_the_next_one_right():
    workload, other = (make(normalized, (2, 3, 8, 8)) for _ in range(2))
    program = capture(workload)
    schedule = lower(program.graph, Plan.traced(program.graph))
    half = sum(isinstance(instruction, Run) for instruction in schedule.instructions) // 4

    def stop(index: int) -> None:
        if index == half:
            raise KeyboardInterrupt

    batch = list(workload.batch)
    with pytest.raises(KeyboardInterrupt):
        Executor(program, schedule, after_instruction=stop)(batch)
    loss = Executor(program, schedule)(batch)
    assert torch.equal(loss, eager_step(other)[0])


def test_a_step_runs_on_its_plans_threads_and_leaves_the_processs_own():
    program, own = capture(workload := make(normalized, (2, 3, 8, 8))), torch.get_num_threads()
    schedule, seen = lower(program.graph, Plan.traced(program.graph)), set[int]()

    def note(index: int) -> None:
        seen.add(torch.get_num_threads())
        if index == len(schedule.instructions) - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Executor(program, schedule, after_instruction=note, threads=own + 1)(list(workload.batch))
    assert (seen, torch.get_num_threads()) == ({own + 1}, own)


def test_what_the_step_takes_beyond_what_is_away_is_the_most_at_one_time():
    built = Builder("small")
    built.value("w", 100, Role.PARAM)
    built.op("first", ["w"], [("a", 10)])
    built.op("second", ["a"], [("b", 7)])
    built.op("third", ["b", "w"], [("loss", 1)])
    graph = built.graph("loss")
    leaves = (Offload(0), Free(0))
    before, between, after = (Run(0),), (Run(1), Free(1)), (Prefetch(0), Run(2), Free(2))
    for instructions, most in (
        ((*before, *between, *after[1:]), 17),
        ((*before, *leaves, *between, *after), 10),  # the second op's 17 bytes while 100 are away
        ((*before, *between, *leaves, *after), 17),
    ):
        assert peak_step_bytes(graph, Schedule(instructions, "ssd")) == most
