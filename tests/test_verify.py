"""The first steps under a plan are compared with eager in the training process itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.capture.tracer import capture
from autotune.errors import ConfigError, NumericsError
from autotune.ir.costs import Costs
from autotune.planners import make_plan
from autotune.runtime import train_step as apply
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load
from autotune.workloads.workload import Workload
from tests.eager import eager_step, tensors, worst_difference
from tests.harness import seeded
from tests.small import Tied, make, mlp, normalized
from tests.test_apply import RECOMPUTE
from tests.zoo.tiny import TINY

IMAGES = (2, 3, 8, 8)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


MADE: dict[str, Callable[[], Workload]] = {
    "mlp with dropout": lambda: make(lambda: mlp(0.5)),
    "norms": lambda: make(normalized, IMAGES),
    "tied": lambda: make(Tied, optimizer=adamw),
    "adamw": lambda: make(normalized, IMAGES, optimizer=adamw),
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
        {"accumulate": 2},
        {"accumulate": 2, "verify": 3},
        {"before_update": lambda: None},
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=256.0)},
    ],
    ids=["accumulate", "accumulate, three steps", "before_update", "scaler"],
)
def test_verified_steps_that_keep_gradients_leave_the_same_bits(options: dict[str, Any]) -> None:
    def ended(verify: bool | int) -> dict[str, torch.Tensor]:
        made = {key: value() if key == "scaler" else value for key, value in options.items()} | {"verify": verify}
        return train(make(mlp, optimizer=adamw), **made)

    assert worst_difference(ended(options.get("verify", True)), ended(False)) == 0.0


def test_clipping_in_a_verified_step_is_that_of_the_step() -> None:
    one, other = make(mlp), make(mlp)
    clip = lambda: nn.utils.clip_grad_norm_(one.model.parameters(), 0.01)  # noqa: E731
    with step_of(one, before_update=clip, verify=1) as step:
        step(one.batch)
        assert step.verified == "bit-equal to eager"
    assert other.loss_fn is not None
    assert other.optimizer is not None
    other.loss_fn(other.model, other.batch).backward()
    nn.utils.clip_grad_norm_(other.model.parameters(), 0.01)
    other.optimizer.step()
    assert worst_difference(tensors(one), tensors(other)) == 0.0


def test_gradients_are_seen_once_in_a_verified_step() -> None:
    workload, seen = make(mlp), []
    with step_of(workload, verify=1) as step:
        step.on_gradient = lambda name, gradient: seen.append(name)
        step(workload.batch)
        assert step.on_gradient is not None
    assert sorted(seen) == sorted(name for name, _ in workload.model.named_parameters())


@pytest.mark.parametrize("loss_scale", [1e-6, pytest.param(1.0, marks=pytest.mark.slow), 1e6])
@pytest.mark.parametrize(
    ("made", "parameter"),
    [
        (seeded.small_mlp, "3.weight"),
        (seeded.small_mlp, "0.bias"),
        (seeded.tiny_gpt2, "transformer.h.0.mlp.c_fc.weight"),
    ],
)
def test_a_gradient_off_by_a_thousandth_is_refused_and_eagers_step_stays(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[float], Workload], parameter: str, loss_scale: float
) -> None:
    monkeypatch.setattr(apply, "capture", seeded.scaling_capture(parameter, 1.001))
    wrong, right = made(loss_scale), made(loss_scale)
    torch.manual_seed(5)
    with (
        step_of(wrong, verify=True) as step,
        pytest.raises(NumericsError, match=rf"^verified step 1: gradient {parameter} is off by \d+ of its bound"),
    ):
        step(wrong.batch)
    ended = everything(wrong)
    torch.manual_seed(5)
    eager_step(right)
    assert worst_difference(ended, everything(right)) == 0.0
    assert all(one.grad is None for one in wrong.model.parameters())


@pytest.mark.parametrize("loss_scale", [1e-6, 1e6])
def test_a_gradient_off_by_a_thousandth_is_refused_where_float64_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, loss_scale: float
) -> None:
    monkeypatch.setattr(apply, "capture", seeded.scaling_capture("3.weight", 1.001))
    weights = torch.ones(4)

    def weighted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_scale * F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    workload = make(mlp, loss_fn=weighted)
    with (
        step_of(workload, verify=True) as step,
        pytest.raises(
            NumericsError, match=r"gradient 3.weight .*float64 cannot be used: RuntimeError: expected scalar"
        ),
    ):
        step(workload.batch)


@pytest.mark.parametrize(
    ("made", "against"),
    [
        (lambda: load("segformer", TINY["segformer"]), "float64"),
        (lambda: load("segformer", {**TINY["segformer"], "dropout": 0.1}), "eager"),
        (lambda: seeded.language_model("Llama"), "float64"),
        (lambda: seeded.language_model("Qwen2"), "float64"),
        (lambda: seeded.language_model("Gemma"), "float64"),
        (seeded.transposed_volumes, "float64"),
        (seeded.scaled_up, "float64"),
    ],
    ids=["segformer", "dropout", "llama", "qwen2", "gemma", "conv3d_transpose", "bilinear"],
)
def test_rounding_is_admitted(made: Callable[[], Workload], against: str) -> None:
    workload = made()
    with step_of(workload, verify=2) as step:
        for _ in range(2):
            step(workload.batch)
            assert step.verified == "bit-equal to eager" or f"relative gate against {against}" in step.verified


def test_steps_that_differ_by_rounding_train_on_from_the_plans_own_bits() -> None:
    def made() -> Workload:
        return load("segformer", TINY["segformer"])

    assert worst_difference(train(made(), steps=3, verify=2), train(made(), steps=3)) == 0.0


def test_each_captured_program_is_verified_and_no_step_after(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(mlp)
    ran: list[int] = []
    own = workload.loss_fn
    assert own is not None

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            ran.append(len(batch[0]))
        return own(model, batch)

    half = tuple(part[:3] for part in workload.batch)
    with TrainStep(workload.model, counted, workload.optimizer, workload.batch, verify=2) as step:
        for _ in range(4):
            step(workload.batch)
        with pytest.warns(UserWarning, match="a batch of 3x8"):
            step(half)
        step(half)
        step(half)
    assert ran == [6, 6, 3, 3]


@pytest.mark.parametrize("verify", [False, 0])
def test_unless_asked_to_nothing_is_compared(verify: bool | int) -> None:
    workload = make(mlp)
    with step_of(workload, verify=verify) as step:
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
    assert worst_difference(tensors(workload), before) == 0.0


def test_inference_is_verified_too() -> None:
    model = mlp().eval()
    batch = (torch.randn(6, 8),)
    with TrainStep(model, None, None, batch, verify=True) as step:
        step(batch)
        assert step.verified == "bit-equal to eager"
