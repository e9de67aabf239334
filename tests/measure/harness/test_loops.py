"""The baseline and the plans of a loop run the loop, and end at the same bits."""

from pathlib import Path

import pytest

from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.planners import make_plan
from autotune.records.measurement import Outcome
from autotune.workloads.reference import WorkloadRef
from tests.measure.harness import workloads


@pytest.mark.usefixtures("children_in_process")
@pytest.mark.parametrize("loop", ["clip,scaler,accumulate=3", "gradients"])
def test_a_plan_for_a_loop_ends_at_the_bits_of_eagers_loop_under_the_harness(loop: str, tmp_path: Path) -> None:
    reference = WorkloadRef(f"{workloads.__file__}:wide", {"batch": 64, "width": 16, "depth": 4})
    with Harness(Spec(reference, tmp_path / "logs", samples=2, loop=loop)) as runner:
        prepared = runner.prepare()
        settings = {"update": {"planner": "with_gradient"}, "recompute": {"planner": "segments", "count": 2}}
        plan = make_plan(prepared.graph, settings, 0, prepared.costs)
        measured = runner.measure(plan)
    assert (prepared.loop, prepared.capture_error, prepared.baseline_fits) == (loop, 0.0, True)
    assert (measured.outcome, measured.max_error) == (Outcome.OK, 0.0)
    assert len(measured.step_seconds) == len(measured.baseline_seconds) == 2
