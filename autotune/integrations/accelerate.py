"""Train under a plan in a loop with Accelerate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import ConfigError, install_command
from autotune.integrations.compiled_models import refuse_compiled
from autotune.integrations.data_parallel import run_in_wrapper
from autotune.integrations.plan_source import resolve_plan
from autotune.ir.graph import TrainGraph
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.prepared_step import PlanSource
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.step_selector import OtherShapes
from autotune.workloads.workload import LossFn

try:
    import accelerate
    from accelerate.utils import DistributedType, DynamoBackend
except ImportError as error:
    raise ImportError(f"autotune.integrations.accelerate needs accelerate; {install_command('accelerate')}") from error

TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of distributed training that equal those without a plan: one process, or DistributedDataParallel."""
PRECISIONS = ("no", "bf16", "fp16")
"""Values of the accelerator's `mixed_precision` under which training equals that without a plan."""


def plan_loss(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    loss_fn: LossFn,
    plan: PlanSource | None = None,
    *,
    stores: Mapping[str, str | Path] | None = None,
    other_shapes: OtherShapes = "replan",
    buckets: Buckets | None = None,
    budget: str | int | None = None,
) -> "AcceleratedLoss":
    """Return a planned loss for a loop with Accelerate: `loss = planned(batch)` replaces `loss = loss_fn(model, batch)`.

    The call runs forward and backward under the plan. `accelerator.backward(loss)` hands the gradients over. Mixed
    precision, `accumulate`, `clip_grad_norm_`, `gather`, `save_state` and `load_state` work as without a plan, on one
    process and with DistributedDataParallel. On eager's kernels the results have the same bits.

    Args:
        accelerator: The accelerator of the loop.
        model: The model that `accelerator.prepare` returned.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, or a tuple of the loss and any nested extras.
        plan: Path of a plan file, a `PlanFile`, a `Plan`, or an `AutoPlan`, for a workload of the prepared model with a loss
            and without an optimizer. "auto" tunes at the first step, and
            `AutoPlan(budget="65%", kernels="inductor")` on compiled regions. None runs the step as traced.
        stores: Directory of each store that the plan offloads to, such as `{"ssd": "/mnt/nvme"}`.
        other_shapes: Action for a batch of another shape, or after a change of a captured Python value; see `TrainStep`.
        buckets: Sizes to pad batches to; see `PlannedLoss`.
        budget: Budget of `plan="auto"`: a share of the eager step's bytes ("65%", the default), or bytes of the process.

    Raises:
        ConfigError: An argument is invalid, the model was not prepared, or the accelerator trains in a way that a plan does
            not support: FSDP, DeepSpeed, fp8, a compiled or a dispatched model.
        CaptureError: At the first call: the step cannot be captured.
        PlanError: The plan is for another graph, or `other_shapes="error"` applies.
        StoreError: A store cannot be opened or read back from.

    Examples:
        >>> import accelerate, torch
        >>> from autotune.integrations.accelerate import plan_loss
        >>> accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> planned = plan_loss(accelerator, model, loss_fn)
        >>> for _ in range(4):
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(planned((torch.ones(16, 4), torch.zeros(16, 1))))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> planned.close()
    """
    plan = resolve_plan(plan, budget, stores)
    return AcceleratedLoss(accelerator, model, loss_fn, plan, stores=stores, other_shapes=other_shapes, buckets=buckets)


class AcceleratedLoss:
    """A planned loss in a loop with Accelerate; `plan_loss` creates it and has its documentation."""

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        model: torch.nn.Module,
        loss_fn: LossFn,
        plan: PlanSource | None,
        **options: Any,
    ) -> None:
        _refuse_accelerator(accelerator)
        _refuse_model(accelerator, model)
        self._accelerator = accelerator
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.planned = PlannedLoss(
            model if self._wrapper is None else self._wrapper.module,
            loss_fn,
            plan,
            loss_gradient=self._scale,
            **options,
        )
        """The planned loss of the model within DistributedDataParallel."""

    @property
    def graph(self) -> TrainGraph | None:
        """Graph that was captured for the first batch; None before the first call."""
        return self.planned.graph

    def __call__(self, batch: Any) -> Any:
        """Return the loss, ready for `accelerator.backward`, with the detached extras if the loss function has any."""
        if self._wrapper is None:
            return self.planned(batch)
        return run_in_wrapper(self._wrapper, self.planned, batch)

    def close(self) -> None:
        """Release the stores' space and the arenas. The model stays as it is."""
        self.planned.close()

    def _scale(self, one: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the loss that `accelerator.backward` passes: scaled, and divided by the accumulated steps."""
        scaler = self._accelerator.scaler
        gradient: torch.Tensor = one if scaler is None else scaler.scale(one)
        return gradient / int(self._accelerator.gradient_accumulation_steps)


def _refuse_accelerator(accelerator: accelerate.Accelerator) -> None:
    if accelerator.distributed_type not in TYPES:
        raise ConfigError(
            f"the accelerator trains with {accelerator.distributed_type.value}, under which a planned loss is not supported; "
            f"supported: {', '.join(kind.value for kind in TYPES)}. Choose one of them, or train without a plan"
        )
    if accelerator.mixed_precision not in PRECISIONS:
        raise ConfigError(
            f"the accelerator's mixed_precision is {accelerator.mixed_precision!r}, under which a planned loss is not "
            f"supported; supported: {', '.join(PRECISIONS)}. Choose one of them, or train without a plan"
        )
    if (backend := accelerator.state.dynamo_plugin.backend) != DynamoBackend.NO:
        raise ConfigError(
            f"the accelerator compiles models with {backend.value}, but a plan chooses its own kernels; leave "
            "dynamo_backend out, or train without a plan"
        )
    if accelerator.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the accelerator's device is {accelerator.device.type}, and a plan runs on cpu or cuda; pass cpu=True"
        )


def _refuse_model(accelerator: accelerate.Accelerator, model: torch.nn.Module) -> None:
    is_wrapped = isinstance(model, DistributedDataParallel)
    inner = model.module if is_wrapped else model
    is_prepared = any(prepared is model or prepared is inner for prepared in accelerator._models)
    if not is_prepared or is_wrapped == (accelerator.distributed_type == DistributedType.NO):
        raise ConfigError(
            f"the accelerator did not prepare this {type(model).__name__}; call plan_loss with the model that "
            "accelerator.prepare(model, ...) returned"
        )
    refuse_compiled(model)
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise ConfigError(
                f"{name or 'the model'} has Accelerate's hook {type(module._hf_hook).__name__}, which moves weights between "
                "devices in forward; load the model without device_map, or train without a plan"
            )
