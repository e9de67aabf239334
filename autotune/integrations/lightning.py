"""Train a LightningModule under a plan, with Lightning's own Trainer."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from autotune.errors import ConfigError, install_command
from autotune.integrations.compiled_models import refuse_compiled
from autotune.integrations.method_code import may_read_gradients
from autotune.integrations.plan_source import resolve_plan
from autotune.integrations.planned_method import MethodLoss, PlannedMethod
from autotune.integrations.signal_handlers import PostponedHandlers
from autotune.runtime.planned_loss import PlannedLoss, run_in_autocast
from autotune.runtime.prepared_step import PlanSource
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.step_selector import OtherShapes
from autotune.workloads.workload import Workload

try:
    import lightning.pytorch as pl
    from lightning.pytorch import strategies
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.plugins import precision as plugins
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(f"autotune.integrations.lightning needs lightning; {install_command('lightning')}") from error

STRATEGIES = (strategies.SingleDeviceStrategy, strategies.DDPStrategy)
"""Strategies whose training equals that without a plan."""
PRECISIONS = (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision, plugins.DoublePrecision)
"""Precision plugins whose training equals that without a plan."""
_PACKAGES = ("lightning.", "autotune.")
"""Prefixes of the modules whose callbacks and hooks read no gradients."""
MIXED_PRECISIONS = ("bf16-mixed", "16-mixed")
"""Values of the Trainer's `precision` that run the step under autocast."""
TRUE_PRECISIONS = ("32-true", "64-true", "bf16-true", "16-true")
"""Values of the Trainer's `precision` that convert the module and the batch."""


class PlanCallback(pl.Callback):
    """Compute the loss of a LightningModule, and its gradients, under a plan: `Trainer(callbacks=[PlanCallback(plan)])`.

    During `fit`, calls of the module's method `loss` run forward and backward under the plan. Lightning's own backward
    then hands the gradients over. So clipping, accumulation, precision plugins, manual optimization, DDP, loggers,
    `global_step` and checkpoints work as without the callback, with the same bits on eager's kernels. The module itself stays
    as it is: no submodule and no key of its `state_dict` is added.

    The method's Python code runs once, when it is captured. Its calls of `self.log` and `self.log_dict` are repeated with
    the values of each step. Further results beside the loss are detached. Without gradients, as in validation, the
    method runs as ever.

    A method that updates a metric or a list, or that reads the trainer's counters, cannot be captured. Keep such lines in
    `training_step`, move the loss to a method `compute_loss(self, batch)`, and pass `loss="compute_loss"`. So does a
    module that optimizes manually: one callback for each of its losses.

    Args:
        plan: Path of a plan file, a `PlanFile`, a `Plan`, or an `AutoPlan`, for the graph of `workload(module, batch, loss)`.
            "auto" tunes at the first step, and `AutoPlan(budget="65%", kernels="inductor")` on compiled regions. None runs the
            method as traced.
        loss: Name of the method. It returns the loss, a tuple that begins with it, or a dict with the key "loss".
        stores: Directory of each store that the plan offloads to, such as `{"ssd": "/mnt/nvme"}`.
        other_shapes: Action for a batch of another shape, or after a change of a captured Python value; see `TrainStep`.
        buckets: Sizes to pad batches to; see `PlannedLoss`.
        budget: Budget of `plan="auto"`: a share of the eager step's bytes ("65%", the default), or bytes of the process.

    Raises:
        ConfigError: In `fit`: the trainer or the module does something that a plan does not support.
        CaptureError: At the first step: the method cannot be captured.
        PlanError: The plan is for another graph, or `other_shapes="error"` applies.
        StoreError: A store cannot be opened or read back from.

    Examples:
        >>> import torch, lightning
        >>> from autotune.integrations.lightning import PlanCallback
        >>> class Net(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        ...     def training_step(self, batch, batch_idx):
        ...         loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        ...         self.log("loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters())
        >>> data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, 1))
        >>> quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=[PlanCallback()], **quiet)
        >>> trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8))
        >>> trainer.global_step
        4
    """

    def __init__(
        self,
        plan: PlanSource | None = None,
        *,
        loss: str = "training_step",
        stores: Mapping[str, str | Path] | None = None,
        other_shapes: OtherShapes = "replan",
        buckets: Buckets | None = None,
        budget: str | int | None = None,
    ) -> None:
        self._plan, self._loss = resolve_plan(plan, budget, stores), loss
        self._options = {"stores": stores, "other_shapes": other_shapes, "buckets": buckets}
        self._method: PlannedMethod | None = None
        self._handlers: PostponedHandlers | None = None
        self._clears = self._reads_gradients = False

    @property
    def planned(self) -> PlannedLoss | None:
        """The planned loss during `fit`; None before and after."""
        return self._method.planned if self._method is not None else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse trainers and modules that a plan does not support."""
        if stage == "fit":
            _refuse_trainer(trainer)
            _refuse_module(pl_module, self._loss)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the module's method by its planned version."""
        _refuse_module(pl_module, self._loss)  # again: another callback may have replaced the method since `setup`
        refuse_compiled(pl_module)
        # training_step may go on after the loss
        self._reads_gradients = may_read_gradients(pl_module, "training_step", self._loss)
        self._method = PlannedMethod(
            pl_module,
            self._loss,
            self._plan,
            skips_backward=partial(_skips_backward, trainer),
            clear_gradients=partial(self._clear_gradients, trainer, pl_module),
            loss_gradient=partial(_scale, trainer, pl_module),
            **self._options,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let handlers of signals wait for the end of a step that offloads; Lightning has registered its own by now."""
        if self._method is not None:
            self._handlers = PostponedHandlers(self._method.running_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the planned call clear the gradients of the step before; Lightning clears them only after that call."""
        is_cleared = pl_module.automatic_optimization and not _skips_backward(trainer)
        self._clears = is_cleared and batch_idx % trainer.accumulate_grad_batches == 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Release the memory that the plan keeps between steps; a validation needs its own."""
        if self._method is not None:
            self._method.planned.release_memory()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the module's method."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the module's method."""
        self._stop()

    def _stop(self) -> None:
        if self._handlers is not None:
            self._handlers.restore()
        if self._method is not None:
            self._method.close()
        self._method = self._handlers = None

    def _clear_gradients(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Clear the gradients of the step before, at the first planned call of a batch."""
        clears, self._clears = self._clears, False
        if clears and not self._reads_gradients and not _uses_gradients_again(trainer, module):
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            for parameter in (parameter for group in groups for parameter in group["params"]):
                parameter.grad = None


def workload(
    module: pl.LightningModule,
    batch: Any,
    loss: str = "training_step",
    *,
    precision: str = "32-true",
    unpack: bool = False,
) -> Workload:
    """Return the step that `PlanCallback` plans, for `autotune.tune` and for the factory of `autotune tune`.

    Args:
        module: A module for tuning only: what it logs is dropped.
        batch: A batch as its method receives it. For a callback with `buckets`, pass it in the largest size:
            `buckets.resize(batch, buckets.largest)`.
        loss: Name of the method, as for `PlanCallback`.
        unpack: True if `batch` is the tuple of all arguments of the method, such as `(real, noise)`.
        precision: The Trainer's `precision`, because autocast is part of the step. With "bf16-true" and the like, pass a
            converted module and batch, and set torch's default dtype in the factory if the step creates tensors without one.

    Raises:
        ConfigError: The module has no such method, `training_step` optimizes manually, or the precision is unknown.

    Examples:
        >>> import torch, lightning
        >>> from autotune.integrations.lightning import workload
        >>> class Net(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        >>> step = workload(Net(), torch.ones(8, 4))
        >>> step.loss_fn(step.model, step.batch)[0].shape
        torch.Size([])
    """
    if precision not in TRUE_PRECISIONS + MIXED_PRECISIONS:
        known = ", ".join(TRUE_PRECISIONS + MIXED_PRECISIONS)
        raise ConfigError(f"precision is {precision!r}; known: {known}")
    _refuse_module(module, loss)
    loss_fn = MethodLoss(type(module), loss)
    loss_fn.recorder.install(module)
    batch = loss_fn.split_arguments(tuple(batch) if unpack else (batch, 0), {})
    if precision in TRUE_PRECISIONS:
        return Workload(module, loss_fn, None, batch)
    is_cuda = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(batch))
    plugin = plugins.MixedPrecision(precision, "cuda" if is_cuda else "cpu")  # type: ignore[arg-type]
    autocast = plugin.autocast_context_manager()
    mode = autocast.device, autocast.fast_dtype, autocast._cache_enabled
    return Workload(module, partial(run_in_autocast, loss_fn, mode), None, batch)


def _scale(trainer: pl.Trainer, module: pl.LightningModule, one: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss that Lightning's backward passes: scaled, and divided by the accumulated batches."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    gradient = one if scaler is None else scaler.scale(one)
    return gradient / trainer.accumulate_grad_batches if module.automatic_optimization else gradient


def _skips_backward(trainer: pl.Trainer) -> bool:
    """Return True in the last epoch of StochasticWeightAveraging, which only updates the statistics of batch norm."""
    return bool(getattr(trainer.fit_loop, "_skip_backward", False))


def _uses_gradients_again(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return True if a hook or an optimizer may read or keep the gradients until Lightning clears them."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    users = [callback for callback in callbacks if isinstance(callback, LambdaCallback) or _is_of_the_user(callback)]
    hooks = "on_train_batch_start", "on_before_zero_grad"
    # the hooks of a LambdaCallback are its attributes, and may be any callable
    reads = any(
        hook in vars(callback) or is_overridden(hook, callback, pl.Callback) for hook in hooks for callback in users
    )
    # the optimizer calls these before the closure that computes the new gradients
    pre_hooks = list(_global_optimizer_pre_hooks.values())
    for optimizer in trainer.optimizers:
        pre_hooks += getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    steps = "optimizer_step", "optimizer_zero_grad"
    reads = reads or any(is_overridden(hook, module) for hook in (*hooks, *steps))
    reads = reads or any(map(_replaces_zero_grad, trainer.optimizers))
    return reads or any(_is_of_the_user(hook) for hook in pre_hooks)


def _replaces_zero_grad(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for an optimizer whose `zero_grad` is not that of torch: it may keep the gradients."""
    return "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad


def _is_of_the_user(code: object) -> bool:
    """Return True for a callback or a hook that neither Lightning nor autotune defines."""
    return not str(getattr(code, "__module__", "")).startswith(_PACKAGES)


def _refuse_trainer(trainer: pl.Trainer) -> None:
    if not isinstance(trainer, pl.Trainer):
        raise ConfigError(
            f"the trainer is a {type(trainer).__module__.partition('.')[0]} Trainer; PlanCallback needs that of the package "
            "lightning: import lightning.pytorch instead"
        )
    if type(trainer.strategy) not in STRATEGIES:
        raise ConfigError(
            f"the trainer's strategy is {type(trainer.strategy).__name__}, under which a planned loss is not supported; "
            f"supported: {_names(STRATEGIES)}. Choose one of them, or leave PlanCallback out"
        )
    if type(trainer.precision_plugin) not in PRECISIONS:
        raise ConfigError(
            f"the trainer's precision plugin is {type(trainer.precision_plugin).__name__}, under which a planned loss is not "
            f"supported; supported: {_names(PRECISIONS)}. Choose one of them, or leave PlanCallback out"
        )
    if (kind := trainer.strategy.root_device.type) not in ("cpu", "cuda"):
        raise ConfigError(
            f"the trainer's device is {kind}, and a plan runs on cpu or cuda; pass accelerator='cpu' or 'cuda'"
        )


def _refuse_module(module: pl.LightningModule, loss: str) -> None:
    name = type(module).__name__
    if not callable(getattr(type(module), loss, None)):
        raise ConfigError(
            f"{name} has no method {loss!r}; pass loss=... with the name of its method that returns the loss"
        )
    if loss in module.__dict__:
        raise ConfigError(
            f"{loss} of {name} is replaced on the object, as by torch.compile or by another PlanCallback; leave the "
            "replacement or this callback out"
        )
    if loss == "training_step" and not module.automatic_optimization:
        raise ConfigError(
            f"{name} optimizes manually, so its training_step also updates; move each loss to a method, and pass "
            "PlanCallback(loss=...) with that method's name"
        )


def _names(kinds: tuple[type, ...]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
