"""A loss that is a module: its parameters and buffers belong to the step."""

from pathlib import Path

import pytest

from autotune.ir.plan import Plan
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.measure.worker.eager import EagerWorkload
from autotune.planners import make_plan
from autotune.records.measurement import Outcome
from autotune.workloads.reference import WorkloadRef
from tests.measure.harness import workloads

DISTILLED = WorkloadRef(f"{workloads.__file__}:distilled")

pytestmark = pytest.mark.usefixtures("children_in_process")


@pytest.mark.parametrize("loop", ["", "gradients"])
def test_plans_for_a_loss_with_a_trained_scale_and_a_moving_buffer_are_measured(loop: str, tmp_path: Path) -> None:
    with Harness(Spec(DISTILLED, tmp_path / "logs", samples=2, loop=loop)) as runner:
        prepared = runner.prepare()
        settings = {
            "update": {"planner": "with_gradient"}, "recompute": {"planner": "segments", "count": 2},
            "allocator": {"planner": "arena"},
        }  # fmt: skip
        plans = Plan.traced(prepared.graph), make_plan(prepared.graph, settings, 0, prepared.costs)
        measured = [runner.measure(plan) for plan in plans]
    assert [(each.outcome, each.max_error) for each in measured] == [(Outcome.OK, 0.0)] * 2


def test_the_tensors_of_a_loss_are_live_between_steps(tmp_path: Path) -> None:
    eager = EagerWorkload(Spec(DISTILLED, tmp_path, loop="gradients", scratch=tmp_path))
    model, loss_fn, batch = eager.workload.model, eager.workload.loss_fn, eager.workload.batch
    tensors = [*model.parameters(), *loss_fn.parameters(), *loss_fn.buffers(), batch]
    assert eager.static_bytes() == sum(tensor.nbytes for tensor in tensors)


def test_the_buffers_and_gradients_of_a_loss_are_restored_with_the_models(tmp_path: Path) -> None:
    eager = EagerWorkload(Spec(DISTILLED, tmp_path, loop="gradients", scratch=tmp_path))
    loss_fn = eager.workload.loss_fn
    eager.step()
    assert loss_fn.center.any()
    assert loss_fn.scale.grad is not None
    eager.restore()
    assert not loss_fn.center.any()
    assert loss_fn.scale.grad is None
