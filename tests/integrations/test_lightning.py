"""A planned loss in Lightning's Trainer: every bit, counter and logged value is that of the Trainer without a plan."""

import copy
import functools
import inspect
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import BitsandbytesPrecision
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch import nn

from autotune.api import auto_plan
from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError, PlanError
from autotune.integrations.lightning import PlanCallback, workload
from autotune.integrations.planned_method import MethodLoss
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.auto import best_plan
from autotune.planners.offload.window import OffloadWindow
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.plan_file import PlanFile
from autotune.runtime import recapture
from autotune.runtime.executor import Executor
from autotune.runtime.offload.engine import OffloadEngine
from autotune.runtime.op_profiler import profile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.workloads.factory import load_workload
from tests.integrations.lightning_training import Net, loader, train
from tests.integrations.trees import assert_equal
from tests.support.checkout import run_python

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the plan is for a batch of"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TRAININGS: dict[str, dict[str, Any]] = {
    "clipped by value, accumulated with a remainder": {
        "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3,
    },
    "bf16-mixed": {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "rows": 32},
    "bf16-true, clipped by norm": {"precision": "bf16-true", "gradient_clip_val": 0.1, "rows": 32},
    "ended by max_steps, validated within the epoch": {
        "max_epochs": -1, "max_steps": 5, "val_check_interval": 2, "rows": 32,
    },
    "64-true, inference mode off": {"precision": "64-true", "inference_mode": False, "num_sanity_val_steps": -1, "rows": 32},
}  # fmt: skip
SLOW = ("bf16-true, clipped by norm", "64-true, inference mode off")


@pytest.mark.parametrize(
    "options",
    [pytest.param(TRAININGS[name], id=name, marks=pytest.mark.slow if name in SLOW else ()) for name in TRAININGS],
)
def test_a_training_ends_in_every_bit_where_lightning_ends_and_no_batch_runs_twice(
    options: dict[str, Any], runs: list[Executor]
):
    expected = train(**options)
    assert not runs
    assert_equal(expected, train([PlanCallback()], **options))
    assert len(runs) == (5 if "max_steps" in options else 8)


def test_a_scaler_with_overflows_changes_no_bit():
    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        return {"plugins": plugins, "max_epochs": 6, "gradient_clip_val": 1.0, "rows": 32}

    expected = train(**options())
    assert expected["scaler"]["scale"] < 2.0**60
    assert_equal(expected, train([PlanCallback()], **options()))


def test_accumulation_that_changes_between_epochs_changes_no_bit_and_no_batch_runs_twice(runs: list[Executor]):
    def schedule() -> pl.Callback:
        return GradientAccumulationScheduler({0: 1, 1: 3})

    assert_equal(train([schedule()], rows=32), train([schedule(), PlanCallback()], rows=32))
    assert len(runs) == 8


def test_a_loss_in_a_method_leaves_training_step_to_the_user():
    assert_equal(train(build=Split, rows=32), train([PlanCallback(loss="compute_loss")], Split, rows=32))


class Split(Net):
    """A net whose training step updates a metric and reads the trainer, around its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def compute_loss(self, batch: Any) -> Any:
        logits = self(batch[0])
        self.log("peak", logits.max())
        return nn.functional.cross_entropy(logits, batch[1]), logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.compute_loss(batch)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss", loss)
        self.log("product", loss.detach() * (batch_idx + self.global_step))
        return loss


class Parts(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class ReturnsParts(Split):
    """A net whose loss method returns a named tuple."""

    def compute_loss(self, batch: Any) -> Parts:
        logits = self(batch[0])
        return Parts(nn.functional.cross_entropy(logits, batch[1]), logits)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = self.compute_loss(batch)
        self.log("peak", parts.logits.max())
        return parts.loss


def test_a_method_that_returns_a_named_tuple_returns_one_under_a_plan():
    options: dict[str, Any] = {"build": ReturnsParts, "rows": 8, "max_epochs": 1}
    assert_equal(train(**options), train([PlanCallback(loss="compute_loss")], **options))


class Result(dict[str, torch.Tensor]):
    """A result whose items are read as attributes."""


class ReturnsResult(Split):
    def compute_loss(self, batch: Any) -> Result:
        return Result(loss=self(batch[0]).square().mean())


def test_a_method_that_returns_a_mapping_of_another_class_than_dict_is_refused():
    with pytest.raises(CaptureError, match="compute_loss returned a Result, of which a plan would keep no attribute"):
        train([PlanCallback(loss="compute_loss")], ReturnsResult, rows=8)


class LogsGradients(Split):
    """A net whose training step logs the gradients of the step before, in a method of its own."""

    def gradient_norm(self) -> Any:
        return sum((part.grad.norm() for part in self.parameters() if part.grad is not None), torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("norm", self.gradient_norm())
        return self.compute_loss(batch)[0]


def test_a_training_step_reads_the_gradients_of_the_step_before_as_without_a_plan():
    expected = train(build=LogsGradients, rows=32)
    assert expected["metrics"]["norm"] > 0
    assert_equal(expected, train([PlanCallback(loss="compute_loss")], LogsGradients, rows=32))


class Gan(pl.LightningModule):
    """Two optimizers under manual optimization, of which one loss freezes what the other trains."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.toggles = toggles
        self.automatic_optimization = False

    def generator_loss(self, noise: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.softplus(-self.critic(self.generator(noise))).mean()
        self.log("generated", loss)
        return loss

    def critic_loss(self, batch: Any, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            generated = self.generator(noise)
        real, false = self.critic(batch[0]), self.critic(generated)
        return (nn.functional.softplus(-real) + nn.functional.softplus(false)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.randn(len(batch[0]), 2)
        for optimizer, clip, compute in zip(
            self.optimizers(), (0.1, 0.2),
            (lambda: self.generator_loss(noise), lambda: self.critic_loss(batch, noise=noise)), strict=True,
        ):  # fmt: skip
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = compute()
            self.log("loss", loss)
            optimizer.zero_grad()
            self.manual_backward(loss / 2)
            self.clip_gradients(optimizer, clip, "norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]


@pytest.mark.parametrize("toggles", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_optimizers_under_manual_optimization_have_a_callback_for_each_loss(toggles: bool):
    callbacks = [PlanCallback(loss="generator_loss"), PlanCallback(loss="critic_loss")]
    assert_equal(train(build=lambda: Gan(toggles), rows=32), train(callbacks, lambda: Gan(toggles), rows=32))


def test_a_closure_that_an_optimizer_calls_several_times_changes_no_bit():
    class Newton(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    assert_equal(train(build=Newton, rows=32), train([PlanCallback()], Newton, rows=32))


class ReadsGradients(pl.Callback):
    """A callback that reads the gradients of the step before when Lightning is about to clear them."""

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients = [parameter.grad for parameter in module.parameters()]


class OverridesStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class HooksOptimizer(Net):
    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        optimizers[0].register_step_pre_hook(lambda *_: None)
        return optimizers, schedulers


class NamesGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.training:
            self.gradients = [parameter.grad for parameter in self.parameters()]
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def remember(net: Any) -> None:
    if not net.training:
        net.gradients = [parameter.grad for parameter in net.parameters()]


class CallsHelper(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        remember(self)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class CallsBase(NamesGradients):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class KeepsGradients(torch.optim.SGD):
    """An optimizer that keeps the gradients of the step before."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients = [parameter.grad for parameter in self.param_groups[0]["params"]]
        super().zero_grad(set_to_none)


class HasKeepingOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return KeepsGradients(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("callbacks", "options", "expected"),
    [
        ([], {}, [False, False, False, False]),
        ([], {"accumulate_grad_batches": 2}, [False, True, False, True]),
        ([ReadsGradients()], {}, [False, True, True, True]),
        ([LambdaCallback(on_before_zero_grad=lambda *_: None)], {}, [False, True, True, True]),
        ([], {"build": OverridesStep}, [False, True, True, True]),
        ([], {"build": HooksOptimizer}, [False, True, True, True]),
        ([], {"build": NamesGradients}, [False, True, True, True]),
        ([], {"build": CallsHelper}, [False, True, True, True]),
        ([], {"build": CallsBase}, [False, True, True, True]),
        ([], {"build": HasKeepingOptimizer}, [False, True, True, True]),
    ],
    ids=[
        "each step",
        "accumulation",
        "a callback reads them",
        "a function as callback",
        "an overridden step",
        "a hook before the step",
        "a step that names them",
        "a step whose helper names them",
        "a step whose base names them",
        "an optimizer that clears them itself",
    ],
)
def test_a_planned_step_begins_without_the_gradients_of_the_step_before(
    callbacks: list[pl.Callback], options: dict[str, Any], expected: list[bool], monkeypatch: pytest.MonkeyPatch
):
    held: list[bool] = []
    forward = PlannedLoss.forward

    def watched(planned: PlannedLoss, batch: Any) -> Any:
        held.append(any(parameter.grad is not None for parameter in planned.model.parameters()))
        return forward(planned, batch)

    monkeypatch.setattr(PlannedLoss, "forward", watched)
    train([PlanCallback(), *callbacks], rows=32, max_epochs=1, **options)
    assert held == expected


def test_the_epoch_of_averaged_weights_that_only_runs_batch_norm_changes_no_bit(runs: list[Executor]):
    def averaging() -> pl.Callback:
        return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)

    assert_equal(train([averaging()], rows=32), train([averaging(), PlanCallback()], rows=32))
    assert len(runs) == 8


def test_checkpoints_and_trainings_that_resume_from_them_are_those_without_a_plan(tmp_path: Path):
    def training(name: str, **options: Any) -> dict[str, Any]:
        keeper = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        callbacks = [keeper, PlanCallback()] if name == "planned" else [keeper]
        return train(callbacks, enable_checkpointing=True, rows=32, **options)

    resumed, saved = [], []
    for name in ("plain", "planned"):
        training(name, max_epochs=2)
        saved.append(torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=False))
        resumed.append(training(name, max_epochs=3, ckpt_path=tmp_path / name / "epoch=1.ckpt"))
    for key in ("state_dict", "optimizer_states", "global_step", "epoch", "lr_schedulers"):
        assert_equal(saved[0][key], saved[1][key])
    assert resumed[0]["counters"][0] == 12
    assert_equal(*resumed)


class Copies(pl.Callback):
    """Copies the module in the middle of training, as callbacks that average weights do."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.copied = copy.deepcopy(module)
        self.pickled = pickle.loads(pickle.dumps(module))
        self.planned = "training_step" in module.__dict__


def test_copies_of_the_module_and_the_module_afterwards_have_the_plain_method():
    copies, callback, net = Copies(), PlanCallback(), Net()
    train([callback, copies], lambda: net, rows=32)
    assert copies.planned
    assert "training_step" not in net.__dict__
    assert callback.planned is None
    batch = next(iter(loader()))
    net.first.weight.grad = gradient = torch.ones_like(net.first.weight)
    for plain in (copies.copied, copies.pickled):
        plain._trainer = None
        loss = plain.training_step(batch, 0)["loss"]
        assert "HandOver" not in type(loss.grad_fn).__name__
        loss.backward()
        assert plain.first.weight.grad is not None
    assert net.first.weight.grad is gradient
    assert bool((gradient == 1).all())


def test_the_method_is_restored_after_an_exception():
    class Fails(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ArithmeticError

    net = Net()
    with pytest.raises(ArithmeticError):
        train([PlanCallback(), Fails()], lambda: net)
    assert not {"training_step", "log", "log_dict"} & set(net.__dict__)


class Deep(pl.LightningModule):
    """A net with weights that are idle from the forward to the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.layers = nn.Sequential(nn.Linear(4, 8), *hidden, nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plan_with_an_offloaded_weight(module: pl.LightningModule) -> Plan:
    graph = capture(workload(module, next(iter(loader())))).graph
    costs, traced = replace(Costs.unit(graph), stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)}), Plan.traced(graph)
    gaps = OffloadWindow(1, "ssd", what="all")._gaps(graph, traced, costs)
    swap = next(gap.swap for gap in gaps if gap.swap.value in graph.static and gap.swap.gap >= 0)
    return replace(traced, offload=(swap,), store="ssd")


def test_a_handler_of_a_signal_that_saves_the_module_during_a_step_saves_every_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    net, released, saved = Deep(), list[bool](), list[list[int]]()
    finish_write = OffloadEngine.finish_write

    def sizes() -> list[int]:
        return [weight.untyped_storage().nbytes() for weight in net.parameters()]

    def finish_with_signal(engine: OffloadEngine, key: int) -> None:
        finish_write(engine, key)
        released.append(0 in sizes())
        signal.raise_signal(signal.SIGUSR1)

    def save(*_: Any) -> None:
        saved.append(sizes())

    monkeypatch.setattr(OffloadEngine, "finish_write", finish_with_signal)
    before = signal.signal(signal.SIGUSR1, save)
    try:
        callback = PlanCallback(plan_with_an_offloaded_weight(Deep()), stores={"ssd": tmp_path})
        train([callback], lambda: net, rows=16, max_epochs=1)
        assert signal.getsignal(signal.SIGUSR1) is save
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert released == [True, True]
    assert len(saved) == 2
    assert not any(0 in each for each in saved)


def test_a_plan_for_the_workload_of_a_module_is_for_its_training(runs: list[Executor]):
    program = capture(workload(Net(), next(iter(loader()))))
    costs = profile(program)
    traced = simulate(program.graph, lower(program.graph, Plan.traced(program.graph)), costs).peak_bytes
    smallest = best_plan(program.graph, costs, program.graph.static_bytes).plan
    assert simulate(program.graph, lower(program.graph, smallest), costs).peak_bytes < traced
    assert smallest.recomputed
    assert_equal(train(rows=32), train([PlanCallback(smallest, other_shapes="error")], rows=32))
    assert {run.program.graph.digest for run in runs} == {program.graph.digest}


def test_a_workload_of_all_arguments_of_a_method_is_that_of_its_training(runs: list[Executor]):
    arguments = next(iter(loader())), torch.randn(8, 2)
    graph = capture(workload(Gan(False), arguments, "critic_loss", unpack=True)).graph
    callback = PlanCallback(Plan.traced(graph), loss="critic_loss", other_shapes="error")
    train([callback], lambda: Gan(False), rows=8, max_epochs=1)
    assert {run.program.graph.digest for run in runs} == {graph.digest}


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.slow)])
def test_the_workload_has_the_autocast_of_the_trainer(precision: Any, runs: list[Executor]):
    program = capture(workload(Net(), next(iter(loader())), precision=precision))
    plugin = MixedPrecision(precision, "cpu")
    train([PlanCallback(Plan.traced(program.graph), other_shapes="error")], rows=8, plugins=[plugin], max_epochs=1)
    assert [run.program.graph.digest for run in runs] == [program.graph.digest]


@pytest.mark.parametrize("loss", ["training_step", pytest.param("compute_loss", marks=pytest.mark.slow)])
def test_a_training_can_tune_its_own_step(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    budgets = []

    def study(config: Config, run_dir: Path, digest: str, log: Path) -> Path:
        program = capture(load_workload(config.workload))
        assert program.graph.digest == digest
        plan = Plan.traced(program.graph)
        estimate = simulate(program.graph, lower(program.graph, plan), profile(program))
        planfile.write(run_dir / "plan.json", PlanFile(config.ref, digest, config.budget, 0, 0, {}, plan, estimate))
        budgets.append(config.budget)
        return run_dir / "plan.json"

    monkeypatch.setattr(auto_plan, "_run_study", study)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    build = Split if loss == "compute_loss" else Net
    assert_equal(train(build=build, rows=32), train([PlanCallback("auto", loss=loss, budget="50%")], build, rows=32))
    assert budgets == ["50%"]


def test_a_budget_beside_a_plan_that_exists_is_refused():
    with pytest.raises(ConfigError, match="budget is '50%', but the plan exists already"):
        PlanCallback("plan.json", budget="50%")


def test_a_smaller_last_batch_can_run_in_plain_eager_or_be_refused(runs: list[Executor]):
    assert_equal(train(), train([PlanCallback(other_shapes="eager")]))
    assert len(runs) == 6
    with pytest.raises(PlanError, match="made for a batch of 8x4, 8; this is"):
        train([PlanCallback(other_shapes="error")])


def test_a_logged_number_that_changes_is_logged_as_it_is():
    class Annealed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("weight", self.weight)
            return self.weight * nn.functional.cross_entropy(self(batch[0]), batch[1])

        def on_train_epoch_end(self) -> None:
            self.weight /= 2

    assert_equal(train(build=Annealed, rows=88), train([PlanCallback()], Annealed, rows=88))


class ReadsItsIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean() * (1 + batch_idx)


class ReadsItsIndexUntraced(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inspect.currentframe()  # Dynamo refuses it
        return self(batch[0]).square().mean() * (1 + batch_idx)


class Untraced(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inspect.currentframe()
        return self(batch[0]).square().mean()


def test_an_index_that_a_step_does_not_read_may_change_where_dynamo_refuses_the_step(runs: list[Executor]):
    assert_equal(train(build=Untraced, rows=32), train([PlanCallback()], Untraced, rows=32))
    assert runs


def weighted(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapper(self: Any, batch: Any, batch_idx: int) -> Any:
        return step(self, batch, batch_idx) * (1 + batch_idx)

    return wrapper


class DecoratorReadsItsIndex(Net):
    @weighted
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inspect.currentframe()
        return self(batch[0]).square().mean()


def passed_on(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return wrapper


def test_an_index_that_a_decorator_only_passes_on_is_not_read():
    for decorator, expected in ((passed_on, {"batch_idx": 3}), (weighted, {})):
        kind = type("Decorated", (Net,), {"training_step": decorator(Untraced.training_step)})
        loss = MethodLoss(kind, "training_step")
        loss.split_arguments((torch.ones(2, 4), 3), {})
        assert loss.arguments == expected


class UpdatesMetric(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])


class KeepsList(Net):
    """A net that collects its losses, as many do for the mean of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.losses.append(loss.detach())
        return loss


class KeepsListLater(KeepsList):
    """A net that collects its losses from the second epoch on, after its step was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        if self.keeps:
            self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.keeps = True


class Forwards(Net):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class KeepsGraph(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss, enable_graph=True)
        return loss


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("net", "error", "message"),
    [
        (ReadsItsIndex, PlanError, "batch_idx"),
        (ReadsItsIndexUntraced, PlanError, "batch_idx"),
        (DecoratorReadsItsIndex, PlanError, "batch_idx"),
        (UpdatesMetric, CaptureError, "accuracy"),
        (KeepsList, CaptureError, r"losses.*or keep it in training_step, and pass PlanCallback\(loss="),
        (KeepsListLater, CaptureError, "losses.*or keep it in training_step"),
        (Forwards, ConfigError, r"training_step takes .* as \*args.*: \(self, batch, batch_idx\)"),
        (KeepsGraph, CaptureError, "enable_graph"),
        (Skips, CaptureError, "training_step returned None"),
    ],
)
def test_what_a_captured_step_cannot_do_is_refused_by_name(
    net: type[Net], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recapture, "BATCH_CAPTURES", 2)  # each takes half a second
    with pytest.raises(error, match=message):
        train([PlanCallback()], net, rows=160)


class IgnoresRest(Net):
    def training_step(self, batch: Any, *_: Any, **options: Any) -> Any:
        return self(batch[0]).square().mean()


def test_a_step_need_not_name_what_it_does_not_read(runs: list[Executor]):
    assert_equal(train(build=IgnoresRest, rows=32), train([PlanCallback()], IgnoresRest, rows=32))
    assert runs


def test_a_second_callback_for_the_same_method_is_refused():
    with pytest.raises(ConfigError, match="replaced on the object"):
        train([PlanCallback(), PlanCallback()])


def refused(match: str, callback: PlanCallback | None = None, build: Any = Net, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        train([callback or PlanCallback()], build, **options)


def test_strategies_and_precisions_that_change_the_training_are_refused_by_name():
    class Own(SingleDeviceStrategy):
        pass

    refused("strategy is Own", strategy=Own(torch.device("cpu")))
    quantized = BitsandbytesPrecision.__new__(BitsandbytesPrecision)
    for strategy, precision, match in (
        (FSDPStrategy.__new__(FSDPStrategy), None, "strategy is FSDPStrategy"),
        (None, quantized, "precision plugin is BitsandbytesPrecision"),
    ):
        trainer = pl.Trainer(accelerator="cpu", logger=False, barebones=True)
        trainer.strategy._precision_plugin = precision or trainer.strategy.precision_plugin
        if strategy is not None:
            trainer._accelerator_connector.strategy = strategy
        with pytest.raises(ConfigError, match=match):
            PlanCallback().setup(trainer, Net(), "fit")


def test_compiled_modules_are_refused_by_name():
    net = Net()
    net.first.compile()
    refused("first is compiled by torch.compile", build=lambda: net)
    refused("training_step of Net is replaced on the object, as by torch.compile", build=lambda: torch.compile(Net()))


def test_methods_that_are_no_loss_are_refused_by_name():
    refused("Net has no method 'los'", PlanCallback(loss="los"))
    refused("Net optimizes manually", build=lambda: Net(manual=True))
    refused("anomaly mode is on", detect_anomaly=True)


def test_a_trainer_of_the_other_package_is_refused_by_name():
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(
        ConfigError, match="a pytorch_lightning Trainer; PlanCallback needs that of the package lightning"
    ):
        PlanCallback().setup(other.Trainer(accelerator="cpu", barebones=True), Net(), "fit")


RANK = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lightning.pytorch.strategies import DDPStrategy
from autotune.integrations.lightning import PlanCallback
from autotune.workloads.factory import load_workload
from tests.integrations.lightning_training import train
from tests.integrations.trees import assert_equal

def options(finds):
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=finds)
    return {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "rows": 52}

for finds in (False, True):
    assert_equal(train(**options(finds)), train([PlanCallback()], **options(finds)))
    Path(sys.argv[1], f"equal on rank {torch.distributed.get_rank()}, {finds}").touch()  # ranks share one stdout
"""


@pytest.mark.slow
def test_two_ranks_of_ddp_train_to_the_bits_of_ddp(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    reached = tmp_path / "reached"
    reached.mkdir()
    ranks = run_python("-W", "ignore", script, reached)
    assert ranks.returncode == 0, ranks.stderr[-4000:]
    assert sorted(path.name for path in reached.iterdir()) == [
        f"equal on rank {rank}, {finds}" for rank in (0, 1) for finds in (False, True)
    ]
