"""A loss that is a module belongs to the step with its tensors; a loss function that returns no loss is refused."""

from pathlib import Path

import pytest

from autotune.errors import ConfigError
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


@pytest.mark.parametrize("loop", ["", "clip"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", r"loss_fn returned NoneType; return the loss, a tensor with one number, or \(loss, extras\)"),
        ("dict", r"loss_fn returned dict; return the loss"),
        ("number", r"loss_fn returned float; return the loss"),
        ("extras first", r"loss_fn returned a tuple that begins with str; return the loss"),
        ("vector", r"loss_fn returned a loss of shape \(2,\); reduce it to one number, e.g. with .mean\(\)"),
        ("constant", r"loss_fn returned a loss that does not depend on the model's parameters; look for detach\(\)"),
    ],
)
def test_a_loss_function_that_returns_no_loss_is_refused_with_what_to_return(
    kind: str, message: str, loop: str, tmp_path: Path
) -> None:
    reference = WorkloadRef(f"{workloads.__file__}:misreturns", {"kind": kind})
    eager = EagerWorkload(Spec(reference, tmp_path, loop=loop, scratch=tmp_path))
    with pytest.raises(ConfigError, match=f"^{message}"):
        eager.step()
