"""The first steps under a plan are compared with eager in the training process itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.capture.tracer import capture
from autotune.errors import ConfigError, NumericsError
from autotune.ir.costs import Costs
from autotune.planners import make_plan
from autotune.runtime import step_selector
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.runtime.verification import gates, verify
from autotune.runtime.verification.snapshot import Snapshot
from autotune.workloads.factory import load_workload
from autotune.workloads.workload import Workload
from tests.measure.harness import seeded
from tests.runtime.test_train_step import RECOMPUTE
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import Tied, make, mlp, normalized
from tests.workloads.zoo.tiny import TINY

IMAGES = (2, 3, 8, 8)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


MADE: dict[str, Callable[[], Workload]] = {
    "mlp with dropout": lambda: make(lambda: mlp(0.5)),
    "norms": lambda: make(normalized, IMAGES),
    "tied": lambda: make(Tied, optimizer=adamw),
}


def step_of(workload: Workload, **options: Any) -> TrainStep:
    return TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, **options)


def everything(workload: Workload) -> dict[str, torch.Tensor]:
    return tensors(workload) | {"generator": torch.get_rng_state()}


def train(workload: Workload, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    with step_of(workload, **options) as step:
        for _ in range(steps):
            loss = step(workload.batch)
    return everything(workload) | {"loss": loss}


@pytest.mark.parametrize("name", MADE)
def test_verified_steps_leave_the_same_bits_and_generators_as_unverified_ones(name: str) -> None:
    graph = capture(MADE[name]()).graph
    plan = make_plan(graph, {**RECOMPUTE, "allocator": {"planner": "arena"}}, 0, Costs.unit(graph))
    assert worst_difference(train(MADE[name](), plan=plan, verify=True), train(MADE[name](), plan=plan)) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "verify": 3},
        {"before_update": lambda: None},
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=256.0)},
    ],
    ids=["accumulate", "before_update", "scaler"],
)
def test_verified_steps_that_keep_gradients_leave_the_same_bits(options: dict[str, Any]) -> None:
    def ended(verify: bool | int) -> dict[str, torch.Tensor]:
        arguments = {key: value() if key == "scaler" else value for key, value in options.items()} | {"verify": verify}
        return train(make(mlp, optimizer=adamw), **arguments)

    assert worst_difference(ended(options.get("verify", True)), ended(False)) == 0.0


def test_clipping_in_a_verified_step_is_that_of_the_step() -> None:
    planned, eager = make(mlp), make(mlp)
    clip = lambda: nn.utils.clip_grad_norm_(planned.model.parameters(), 0.01)  # noqa: E731
    with step_of(planned, before_update=clip, verify=1) as step:
        step(planned.batch)
        assert step.verified == "bit-equal to eager"
    assert eager.loss_fn is not None
    assert eager.optimizer is not None
    eager.loss_fn(eager.model, eager.batch).backward()
    nn.utils.clip_grad_norm_(eager.model.parameters(), 0.01)
    eager.optimizer.step()
    assert worst_difference(tensors(planned), tensors(eager)) == 0.0


def test_gradients_are_seen_once_in_a_verified_step() -> None:
    workload, names = make(mlp), []
    with step_of(workload, verify=1) as step:
        step.on_gradient = lambda name, gradient: names.append(name)
        step(workload.batch)
        assert step.on_gradient is not None
    assert sorted(names) == sorted(name for name, _ in workload.model.named_parameters())


@pytest.mark.parametrize(
    ("make_workload", "parameter", "loss_scale"),
    [
        (seeded.small_mlp, "3.weight", 1e-6),
        pytest.param(seeded.small_mlp, "3.weight", 1e6, marks=pytest.mark.slow),
        (seeded.small_mlp, "0.bias", 1e6),
        pytest.param(seeded.tiny_gpt2, "transformer.h.0.mlp.c_fc.weight", 1e-6, marks=pytest.mark.slow),
    ],
)
def test_a_gradient_off_by_a_thousandth_is_refused_and_eagers_step_stays(
    monkeypatch: pytest.MonkeyPatch, make_workload: Callable[[float], Workload], parameter: str, loss_scale: float
) -> None:
    monkeypatch.setattr(step_selector, "capture", seeded.scaling_capture(parameter, 1.001))
    wrong, right = make_workload(loss_scale), make_workload(loss_scale)
    torch.manual_seed(5)
    with (
        step_of(wrong, verify=True) as step,
        pytest.raises(
            NumericsError,
            match=rf"^verified step 1: gradient {parameter} is off by \d+ of its bound .*train without the plan",
        ),
    ):
        step(wrong.batch)
    ended = everything(wrong)
    torch.manual_seed(5)
    eager_step(right)
    assert worst_difference(ended, everything(right)) == 0.0
    assert all(weight.grad is None for weight in wrong.model.parameters())


def test_a_gradient_off_by_a_thousandth_is_refused_where_float64_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_selector, "capture", seeded.scaling_capture("3.weight", 1.001))
    weights = torch.ones(4)

    def weighted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return 1e6 * F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    workload = make(mlp, loss_fn=weighted)
    with (
        step_of(workload, verify=True) as step,
        pytest.raises(
            NumericsError, match=r"gradient 3.weight .*float64 cannot be used: RuntimeError: expected scalar"
        ),
    ):
        step(workload.batch)


@pytest.mark.parametrize(
    ("make_workload", "against"),
    [
        pytest.param(lambda: load_workload("segformer", TINY["segformer"]), "float64", marks=pytest.mark.slow),
        pytest.param(
            lambda: load_workload("segformer", {**TINY["segformer"], "dropout": 0.1}), "eager", marks=pytest.mark.slow
        ),
        pytest.param(lambda: seeded.language_model("Llama"), "float64", marks=pytest.mark.slow),
        pytest.param(lambda: seeded.language_model("Gemma"), "float64", marks=pytest.mark.slow),
        pytest.param(seeded.transposed_volumes, "float64", marks=pytest.mark.slow),
        (seeded.scaled_up, "float64"),
    ],
    ids=["segformer", "dropout", "llama", "gemma", "conv3d_transpose", "bilinear"],
)
def test_rounding_is_admitted(
    make_workload: Callable[[], Workload], against: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = make_workload()
    last = [name for name, _ in workload.model.named_parameters()][-1]
    monkeypatch.setattr(step_selector, "capture", seeded.scaling_capture(last, 1 + 2**-23))
    with step_of(workload, verify=2) as step:
        for _ in range(2):
            step(workload.batch)
            assert f"relative gate against {against}" in step.verified


def test_steps_that_differ_by_rounding_train_on_from_the_plans_own_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_selector, "capture", seeded.scaling_capture("3.weight", 1 + 2**-23))
    workload = seeded.small_mlp()
    with step_of(workload, verify=True) as step:
        step(workload.batch)
        assert "relative gate against float64" in step.verified
    assert worst_difference(train(seeded.small_mlp(), verify=2), train(seeded.small_mlp())) == 0.0


def test_each_captured_program_is_verified_and_no_step_after(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(mlp)
    ran: list[int] = []
    loss_fn = workload.loss_fn
    assert loss_fn is not None

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            ran.append(len(batch[0]))
        return loss_fn(model, batch)

    half = tuple(part[:3] for part in workload.batch)
    with TrainStep(workload.model, counted, workload.optimizer, workload.batch, verify=2) as step:
        for _ in range(4):
            step(workload.batch)
        with pytest.warns(UserWarning, match="a batch of 3x8"):
            step(half)
        step(half)
        step(half)
    assert ran == [6, 6, 3, 3]


def test_unless_asked_to_nothing_is_compared() -> None:
    workload = make(mlp)
    with step_of(workload, verify=False) as step:
        step(workload.batch)
        assert step.verified == ""


def test_a_negative_number_of_steps_and_hooks_that_would_run_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="verify is -1"):
        step_of(make(mlp), verify=-1)
    workload = make(mlp)
    assert workload.optimizer is not None
    before = tensors(workload)
    workload.optimizer.register_step_post_hook(lambda *_: None)
    with step_of(workload, verify=True) as step, pytest.raises(ConfigError, match="hooks of SGD's step"):
        step(workload.batch)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with (
            step_of(make(mlp), verify=True) as step,
            pytest.raises(ConfigError, match="hooks of every optimizer's step"),
        ):
            step(workload.batch)
    finally:
        handle.remove()
    assert worst_difference(tensors(workload), before) == 0.0


def test_inference_is_verified_too() -> None:
    model = mlp().eval()
    batch = (torch.randn(6, 8),)
    with TrainStep(model, None, None, batch, verify=True) as step:
        step(batch)
        assert step.verified == "bit-equal to eager"


def test_a_refused_step_leaves_no_gradient_and_an_accumulation_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_has_equal_bits", lambda *_: False)
    monkeypatch.setattr(gates, "error_share", lambda *_: 2.0)
    workload = make(mlp)
    with step_of(workload, accumulate=2, verify=True) as step:
        with pytest.raises(NumericsError, match="off by 2 of its bound"):
            step(workload.batch)
        assert all(weight.grad is None for weight in workload.model.parameters())
        assert not step._cycle.is_pending


def test_a_failure_between_eagers_step_and_the_planned_one_leaves_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, copies = make(mlp), iter([verify.Verifier._snapshot])

    def copy_once(verifier: verify.Verifier) -> Any:
        if (copy := next(copies, None)) is None:
            raise MemoryError("no memory for a copy of the state")
        return copy(verifier)

    monkeypatch.setattr(verify.Verifier, "_snapshot", copy_once)
    before = {name: tensor.clone() for name, tensor in tensors(workload).items()}
    with step_of(workload, verify=True) as step, pytest.raises(MemoryError, match="a copy of the state"):
        step(workload.batch)
    assert worst_difference(tensors(workload), before) == 0.0


def test_a_loss_function_that_takes_parts_out_of_its_batch_is_verified_and_the_users_batch_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def popping(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(batch["inputs"]), labels)

    monkeypatch.setattr(verify, "_has_equal_bits", lambda *_: False)
    monkeypatch.setattr(gates, "error_share", lambda *_: 0.5)
    workload = make(mlp)
    batch = dict(zip(("inputs", "labels"), workload.batch, strict=True))
    with TrainStep(workload.model, popping, workload.optimizer, batch, verify=1) as step:
        step(batch)
        assert step.verified.startswith("relative gate against float64")
    assert [*batch] == ["inputs", "labels"]


class MovingLoss(nn.Module):
    """Loss with a trained scale of the outputs and a running mean of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = (model(batch[0]) * self.scale).square().mean()
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss


def test_the_state_of_a_loss_module_moves_once_in_a_step_that_is_verified() -> None:
    workload, other = make(mlp), make(mlp)
    loss, expected = MovingLoss(), MovingLoss()
    with TrainStep(workload.model, loss, workload.optimizer, workload.batch, verify=True) as step:
        for _ in range(3):
            step(workload.batch)
            other.optimizer.zero_grad()
            expected(other.model, other.batch).backward()
            other.optimizer.step()
    assert torch.equal(loss.mean, expected.mean)


class WeightedLoss(nn.Module):
    """Cross entropy with a weight for each class, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(4))

    def forward(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.loss(model(batch[0]), batch[1])
        return loss


def test_the_tensors_of_a_loss_module_are_in_float64_where_the_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(mlp, loss_fn=WeightedLoss())
    monkeypatch.setattr(step_selector, "capture", seeded.scaling_capture("3.weight", 1 + 2**-20))
    with step_of(workload, verify=True) as step:
        step(workload.batch)
        assert "against float64" in step.verified
    assert workload.loss_fn.loss.weight.dtype is torch.float32


def test_a_verified_planned_loss_trains_the_parameters_of_a_loss_module() -> None:
    workload, other = make(mlp), make(mlp)
    loss, expected = MovingLoss(), MovingLoss()
    planned = PlannedLoss(workload.model, loss, verify=True)
    planned(workload.batch).backward()
    expected(other.model, other.batch).backward()
    assert planned.verified == "bit-equal to eager"
    assert torch.equal(loss.scale.grad, expected.scale.grad)
    assert torch.equal(loss.mean, expected.mean)


def test_a_loss_module_within_autocast_trains_its_parameters_and_moves_its_buffers_once() -> None:
    workload, other = make(mlp), make(mlp)
    loss, expected = MovingLoss(), MovingLoss()
    planned = PlannedLoss(workload.model, loss, verify=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = planned(workload.batch), expected(other.model, other.batch)
    for result in results:
        result.backward()
    assert torch.equal(loss.scale.grad, expected.scale.grad)
    assert torch.equal(loss.mean, expected.mean)


def test_a_buffer_that_was_assigned_in_inference_mode_is_restored_with_the_rest():
    workload = make(mlp)
    with torch.inference_mode():
        workload.model.register_buffer("scale", torch.ones(3))
    snapshot = Snapshot(workload.model, workload.optimizer, None)
    with torch.inference_mode():
        workload.model.scale.zero_()
    snapshot.restore()
    assert torch.equal(workload.model.scale, torch.ones(3))
