"""What one process does with threads and memory between the plans that it runs."""

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.ir.plan import Plan
from autotune.measure.messages import UNMEASURED_STEPS
from autotune.measure.meters.rss import resident_bytes
from autotune.measure.spec import Spec
from autotune.measure.worker import planned_steps
from autotune.measure.worker.bench import Bench
from autotune.runtime.arena import SharedBlock, StepArena
from autotune.workloads.reference import WorkloadRef

WORKLOADS = str(Path(__file__).with_name("workloads.py"))
WORKLOAD = WorkloadRef(f"{WORKLOADS}:wide", {"batch": 8})

pytestmark = pytest.mark.usefixtures("children_in_process")


def test_the_baseline_keeps_the_processs_threads_and_plans_and_their_reference_have_others(tmp_path: Path) -> None:
    own = torch.get_num_threads()
    seen: dict[str, int] = {}

    def note(name: str) -> Callable[[str, torch.Tensor], None]:
        return lambda *_: seen.update({name: torch.get_num_threads()})

    bench = Bench(Spec(WORKLOAD, tmp_path, threads=own + 1, scratch=tmp_path))
    try:
        for name, plan in (("baseline", None), ("plan", Plan.traced(bench._plans.program.graph))):
            bench.begin_timing(plan)
            assert bench._timing is not None
            bench._timing.step(note(name))
            bench.stop_timing()
        bench._eager.step(note("reference"))
        environment = bench.survey().device.environment
    finally:
        torch.set_num_threads(own)
    assert seen == {"baseline": own, "plan": own + 1, "reference": own + 1}
    assert environment["torch threads"] == str(own)


@pytest.mark.parametrize(
    ("allocator", "rests", "unmeasured"),
    [("system", False, UNMEASURED_STEPS), ("arena", False, 0), ("arena", True, UNMEASURED_STEPS)],
)
def test_a_step_that_takes_its_memory_anew_after_the_hashes_is_not_timed(
    tmp_path: Path, allocator: str, rests: bool, unmeasured: int
) -> None:
    bench = Bench(Spec(WORKLOAD, tmp_path, scratch=tmp_path))
    bench.begin_timing(replace(Plan.traced(bench._plans.program.graph), allocator=allocator), rests=rests)
    bench.hash_timed()
    assert bench._timing is not None
    if bench._timing.arena is not None and not bench._timing.arena.works:
        pytest.skip("no g++")
    assert bench._timing.unmeasured == unmeasured
    bench.stop_timing()


def test_without_a_compiler_the_first_steps_after_the_hashes_of_a_plan_in_an_arena_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_compiler(replays: bool, block: SharedBlock) -> StepArena:
        return StepArena(replays, block=block, _library=None)

    monkeypatch.setattr(planned_steps, "StepArena", without_compiler)
    bench = Bench(Spec(WORKLOAD, tmp_path, scratch=tmp_path))
    bench.begin_timing(replace(Plan.traced(bench._plans.program.graph), allocator="arena"), rests=False)
    bench.hash_timed()
    assert bench._timing is not None
    assert bench._timing.unmeasured == UNMEASURED_STEPS
    bench.stop_timing()


@pytest.mark.parametrize("rests", [True, False])
def test_an_arena_holds_no_memory_before_the_first_block_where_another_process_runs_first(
    tmp_path: Path, rests: bool
) -> None:
    bench = Bench(Spec(replace(WORKLOAD, arguments={"batch": 1 << 15}), tmp_path, scratch=tmp_path))
    plan = replace(Plan.traced(bench._plans.program.graph), allocator="arena")
    for request in (lambda: bench.begin_timing(plan, rests=rests), bench.hash_timed):
        request()
        assert bench._timing is not None
        arena = bench._timing.arena
        assert arena is not None
        if not arena.works:
            pytest.skip("no g++")
        before = resident_bytes()
        arena.release()
        assert (before - resident_bytes() < arena.bytes / 2) == rests
    bench.stop_timing()


def test_a_plan_begins_with_the_floor_of_its_own_process(tmp_path: Path) -> None:
    bench = Bench(Spec(WORKLOAD, tmp_path, scratch=tmp_path))
    begin = bench.begin_timing(Plan.traced(bench._plans.program.graph))
    end = bench.finish_timing(verify=False)
    assert begin.floor_bytes == pytest.approx(end.floor_bytes, rel=0.2)


def mapped_bytes() -> int:
    """Return the bytes of this process that a limit on data counts."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def begin_in_arena(bench: Bench, plan: Plan) -> StepArena:
    """Begin to time a plan and return its arena."""
    bench.begin_timing(plan)
    assert bench._timing is not None
    assert bench._timing.arena is not None
    if not bench._timing.arena.works:
        pytest.skip("no g++")
    return bench._timing.arena


def test_each_further_plan_in_an_arena_maps_no_block_of_its_own(tmp_path: Path) -> None:
    bench = Bench(Spec(replace(WORKLOAD, arguments={"batch": 1 << 15}), tmp_path, scratch=tmp_path))
    plan = replace(Plan.traced(bench._plans.program.graph), allocator="arena")
    mapped, sizes = [], []
    for _ in range(3):
        arena = begin_in_arena(bench, plan)
        mapped.append(mapped_bytes())
        sizes.append(arena.bytes)
    bench.stop_timing()
    assert mapped[2] - mapped[0] < sizes[0]


def test_addresses_that_an_earlier_plan_left_mapped_take_no_room_of_an_emulated_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    workload = replace(WORKLOAD, arguments={"batch": 1 << 15})
    limits, sizes = [], []
    try:
        bench = Bench(Spec(workload, tmp_path, limit_bytes=resident_bytes() + 2**30, scratch=tmp_path))
        bench._eager.step()  # the pages of libraries that a first step loads count as memory, but not as data
        plan = replace(Plan.traced(bench._plans.program.graph), allocator="arena")
        for _ in range(2):
            arena = begin_in_arena(bench, plan)
            limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
            sizes.append(arena.bytes)
        bench.stop_timing()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert limits[1] - limits[0] > sizes[0] / 2


def test_the_data_set_around_a_batch_is_memory_of_the_process_and_not_of_the_step(tmp_path: Path) -> None:
    small, large = (
        Bench(Spec(WorkloadRef(f"{WORKLOADS}:sliced", {"rows": rows}), tmp_path / str(rows), scratch=tmp_path))
        for rows in (64, 1 << 17)
    )
    assert large._eager.static_bytes() == small._eager.static_bytes()
    assert large._plans.program.graph.digest == small._plans.program.graph.digest


def test_offsets_of_an_embedding_bag_keep_their_order_in_another_batch(tmp_path: Path) -> None:
    bench = Bench(Spec(WorkloadRef(f"{WORKLOADS}:bags"), tmp_path, scratch=tmp_path))
    ids, offsets = bench._eager.workload.batch
    bench.write_eager_results(tmp_path / "eager")  # the second step has another batch
    with bench._eager.other_batch(1):
        others = bench._eager.workload.batch
    assert torch.equal(others[1], offsets)
    assert not torch.equal(others[0], ids)
