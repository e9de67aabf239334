"""Compilation before any measurement: a process without a memory limit compiles what the usual plans run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.kernels import region_program
from autotune.kernels.compiled_region import CompiledRegion
from autotune.measure.messages import CompileRequest, Done
from autotune.measure.spec import Spec
from autotune.measure.worker.bench import Bench
from autotune.measure.worker.main import answer
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.runtime.executor import Executor
from autotune.workloads.reference import WorkloadRef

WORKLOADS = str(Path(__file__).with_name("workloads.py"))


@pytest.mark.usefixtures("children_in_process")
def test_a_plan_in_place_needs_no_compiler_after_the_compilation_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[str] = []

    def compile_in_pool(regions: Sequence[CompiledRegion], listen: object = None) -> None:
        compiled.extend(region.signature for region in regions)

    monkeypatch.setattr(region_program, "compile_in_pool", compile_in_pool)
    monkeypatch.setattr(CompiledRegion, "compile", lambda region: None)
    monkeypatch.setattr(CompiledRegion, "is_loaded", property(lambda region: region.signature in compiled))
    monkeypatch.setattr(CompiledRegion, "is_cached", property(lambda region: region.signature in compiled))
    workload = WorkloadRef(f"{WORKLOADS}:wide", {"batch": 64})
    bench = Bench(Spec(workload, tmp_path, kernels="inductor", scratch=tmp_path))
    assert answer(bench, CompileRequest()) == Done()
    assert any(" into " in signature for signature in compiled)
    before = list(compiled)
    program = bench._plans.program
    settings: Settings = {name: {"planner": planner} for name, planner in (("update", "at_end"), ("recompute", "keep"))}
    plan = make_plan(program.graph, settings, 0, Costs.unit(program.graph))
    assert plan.order == Plan.traced(program.graph).order
    assert plan.inplace
    Executor(program, lower(program.graph, plan))
    assert compiled == before


def test_a_plan_for_other_threads_is_refused(tmp_path: Path):
    spec = Spec(WorkloadRef("mine.py:factory"), tmp_path, threads=4)
    spec.refuse_other_capture(Plan((0,)))
    spec.refuse_other_capture(Plan((0,), threads=4))
    with pytest.raises(PlanError, match="is for 2 threads, the workload for 4; prepare it with threads=2"):
        spec.refuse_other_capture(Plan((0,), threads=2))


def test_a_plan_for_regions_of_another_rebuild_price_is_refused(tmp_path: Path):
    spec = Spec(WorkloadRef("mine.py:factory"), tmp_path, kernels="inductor", rebuild_price=0.5)
    spec.refuse_other_capture(Plan((0,)))
    spec.refuse_other_capture(Plan((0,), kernels="inductor", rebuild_price=0.5))
    with pytest.raises(PlanError, match="prepare it with rebuild_price=4"):
        spec.refuse_other_capture(Plan((0,), kernels="inductor", rebuild_price=4.0))
