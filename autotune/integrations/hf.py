"""Hugging Face `Trainer` under a plan: every training step's loss and gradients come from a `PlannedLoss`.

`AutotuneTrainer` is the `Trainer` itself; `PlannedTrainerMixin` adds the same to a subclass such as TRL's.
"""

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autotune.errors import CaptureError, ConfigError, PlanError, install_command
from autotune.integrations.hf_checks import refuse_arguments
from autotune.integrations.plan_source import resolve_plan
from autotune.integrations.side_effects import refuse_side_effects
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.prepared_step import PlanSource
from autotune.runtime.shapes.batch_padding import BatchPadding
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.step_selector import OtherShapes
from autotune.workloads.workload import Workload

try:
    import transformers
except ImportError as error:
    raise ImportError(f"autotune.integrations.hf needs transformers; {install_command('hf')}") from error


class PlannedTrainerMixin:
    """Training steps of a `transformers.Trainer` under a plan; name it before the trainer's class.

    Each training step's `compute_loss`, with whatever overrides it, runs forward and backward under the plan, and
    `backward()` hands the gradients over. Everything else is the trainer's own: accumulation, clipping, mixed precision,
    schedulers, logs, evaluation, checkpoints. Evaluation runs in plain PyTorch.

    Further keyword arguments of the constructor, beside the trainer's own:

    Args:
        plan: Path of a plan file, a `PlanFile`, or a `Plan`, for the workload that `workload` returns. "auto" tunes at the
            first step for `budget`; an `AutoPlan` does so with its own limits and kernels, such as
            `AutoPlan(budget="65%", kernels="inductor")`. None runs the step as traced.
        budget: Budget of the plan "auto", as of `AutoPlan`: bytes, or a share; by default "65%".
        stores: Directory of each store that the plan offloads to, such as `{"ssd": "/mnt/nvme"}`.
        other_shapes: Action for a batch of another shape, such as the last one: "replan", "background", "eager" or "error";
            see `TrainStep`.
        buckets: Sizes to pad batches of many lengths to; see `autotune.Buckets`.

    Raises:
        CaptureError: At the first step: `compute_loss` cannot be captured.
        ConfigError: An argument is invalid, or the trainer has a setting that a plan does not support.
        PlanError: At the first step: the plan is for another graph.

    Examples:
        >>> from autotune.integrations.hf import PlannedTrainerMixin
        >>> from transformers import Trainer
        >>> class WeightedTrainer(Trainer):
        ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ...         return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        >>> class PlannedTrainer(PlannedTrainerMixin, WeightedTrainer):
        ...     pass
    """

    def __init__(
        self,
        *args: Any,
        plan: PlanSource | None = None,
        budget: str | int | None = None,
        stores: Mapping[str, str | Path] | None = None,
        other_shapes: OtherShapes = "replan",
        buckets: Buckets | None = None,
        **kwargs: Any,
    ) -> None:
        plan = resolve_plan(plan, budget, stores)
        super().__init__(*args, **kwargs)
        refuse_arguments(self)
        if "compute_loss" in vars(self):
            raise ConfigError(f"compute_loss of {type(self).__name__} {_SET_ON_OBJECT}")
        self._planned_loss: PlannedLoss | None = None
        self._planned_arguments: dict[str, Any] = {
            "plan": plan, "stores": stores, "other_shapes": other_shapes, "buckets": buckets,
        }  # fmt: skip
        self._first_step: Callable[[torch.nn.Module, Any], None] | None = None
        self._inputs_class: tuple[type[UserDict[str, Any]], dict[str, None]] | None = None
        """Class and further attributes of inputs whose items a loss reads as attributes: it makes them of the padded dict."""
        self._unplanned = "does not call self.compute_loss, so the plan has no effect; call it there"
        # on the instance, where it stands before the method of any subclass
        vars(self)["compute_loss"] = self._compute_planned_loss
        self.add_callback(_PlanCheck(self))  # type: ignore[attr-defined]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, and release the plan's memory and stores at the end."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._close_plan()

    def workload(self, ranks: int | None = None) -> Workload:
        """Return the first training step as a workload, to tune or plan it; with `buckets` in their largest size.

        Call it in a factory, on a trainer made for it: `train` starts and stops before the first step. No callback and no
        evaluation runs.

        Args:
            ranks: Number of processes of the training, by default as many as now. The `Trainer` multiplies its loss by
                that number, so a plan for another one is refused.

        Raises:
            ConfigError: `train` runs no step that calls `compute_loss`, its batch has no field of `buckets`, or `ranks`
                is less than 1.

        Examples:
            >>> from autotune.integrations.hf import AutotuneTrainer
            >>> def factory():
            ...     return AutotuneTrainer(model, arguments, train_dataset=dataset).workload()
            >>> factory().optimizer is None
            True
        """
        if ranks is not None and ranks < 1:
            raise ConfigError(f"ranks is {ranks}; pass the number of processes of the training")

        def stop(model: torch.nn.Module, batch: Any) -> None:
            raise _FirstStepError(model, batch)

        self._first_step = stop
        arguments: Any = self.args  # type: ignore[attr-defined]
        evaluates, arguments.eval_on_start = arguments.eval_on_start, False
        try:
            with _without_callbacks(self):
                self.train()
        except _FirstStepError as step:
            loss_fn = _TrainerLoss(self if ranks is None else _copy_for_ranks(self, ranks))
            padding = BatchPadding(self._planned_arguments["buckets"], step.model, loss_fn)
            return Workload(step.model, loss_fn, None, padding.resize_first(step.batch))
        finally:
            self._first_step, self.is_in_train, arguments.eval_on_start = None, False, evaluates
        raise ConfigError(f"{type(self).__name__}.train() calls compute_loss in no step; give it a training batch")

    def _compute_planned_loss(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        options = {**dict(zip(_LOSS_OPTIONS, args, strict=False)), **kwargs}
        if options.pop("return_outputs", False) or not model.training or not torch.is_grad_enabled():
            if torch.is_grad_enabled():  # not the loss of an evaluation
                self._unplanned = _explain_unplanned(model)
            if self._planned_loss is not None:
                self._planned_loss.release_memory()  # an evaluation needs memory of its own
            return _class_loss(self)(self, model, inputs, *args, **kwargs)
        count = options.pop("num_items_in_batch", None)
        if options:
            raise ConfigError(
                f"training_step of {type(self).__name__} passes {next(iter(options))} to compute_loss, which is not "
                "supported under a plan; pass it in the inputs as a tensor, or train without a plan"
            )
        if isinstance(count, int):
            count = torch.tensor(count)  # a number would be a constant of the plan
        batch = {"inputs": self._copy_inputs(inputs), "num_items_in_batch": count}
        parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        inner = model.get_submodule("module") if parallel else model
        if self._first_step is not None:
            self._choose_problem_type(inner, inputs)
            self._first_step(inner, batch)
        if self._planned_loss is None or self._planned_loss.model is not inner:
            self._close_plan()
            self._choose_problem_type(inner, inputs)
            self._planned_loss = PlannedLoss(inner, _TrainerLoss(self), **self._planned_arguments)
        with _checking_capture(self):
            if parallel:
                with _module_replaced(model, self._planned_loss):
                    return model(batch)
            return self._planned_loss(batch)

    def _copy_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs in a dict, from which a loss may take items.

        A tokenizer's mapping keeps its class where an overridden `compute_loss` reads an item as an attribute, such as
        `inputs.labels`. With `buckets` the loss makes it again, from a padded dict.
        """
        code = getattr(inspect.unwrap(_class_loss(self)), "__code__", None)
        reads_attributes = bool({*getattr(code, "co_names", ())} & {"data", *inputs})
        if not (reads_attributes and isinstance(inputs, UserDict)):
            return dict(inputs)
        if self._planned_arguments["buckets"] is None:
            return copy.copy(inputs)
        others = [name for name in vars(inputs) if name != "data"]
        if self._inputs_class is None and all(getattr(inputs, name) is None for name in others):
            self._inputs_class = type(inputs), dict.fromkeys(others)
        return dict(inputs)

    def _choose_problem_type(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
        """Let a classifier choose its loss from the labels, as its first forward does; a plan does not repeat that."""
        is_classifier = "Classification" in str(getattr(model, "loss_type", ""))
        model_computes_loss = _class_loss(self) is transformers.Trainer.compute_loss and not (
            self.label_smoother or self.compute_loss_func  # type: ignore[attr-defined]
        )
        if is_classifier and model_computes_loss and getattr(model.config, "problem_type", "") is None:
            with _in_eval_mode(model), torch.no_grad():
                model(**inputs)

    def _close_plan(self) -> None:
        if self._planned_loss is not None:
            self._planned_loss.close()
        self._planned_loss = None


class AutotuneTrainer(PlannedTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with its training steps under a plan.

    It has the constructor of `Trainer`, and the keyword arguments of `PlannedTrainerMixin`.

    Examples:
        >>> from autotune.integrations.hf import AutotuneTrainer
        >>> trainer = AutotuneTrainer(model, arguments, train_dataset=dataset, plan=None)
        >>> trainer.train().global_step
        2
    """


class _TrainerLoss:
    """Loss of a trainer's class, as a function of model and batch.

    A copy for another process leaves out the parts of the trainer that hold data, callbacks, optimizer and plan.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return what `compute_loss` of the trainer's class returns."""
        count, inputs, kind = batch["num_items_in_batch"], batch["inputs"], self._trainer._inputs_class
        if kind is not None:
            inputs = _make_mapping(kind[0], kind[1], inputs)
        return _class_loss(self._trainer)(self._trainer, model, inputs, num_items_in_batch=count)

    def __getstate__(self) -> dict[str, Any]:
        trainer, accelerator = copy.copy(self._trainer), copy.copy(self._trainer.accelerator)
        vars(trainer).update(dict.fromkeys(_UNCOPIED & vars(trainer).keys()), accelerator=accelerator)
        vars(trainer)["model_wrapped"] = trainer.model  # a wrapper needs a process group, which the copy lacks
        del vars(trainer)["compute_loss"]
        for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
            setattr(accelerator, name, [])
        accelerator.gradient_state = None
        return {"_trainer": trainer}


_UNCOPIED = {
    "train_dataset", "eval_dataset", "data_collator", "callback_handler", "optimizer", "lr_scheduler", "model_init", "compute_metrics",
    "preprocess_logits_for_metrics", "optimizer_cls_and_kwargs", "state", "control", "_memory_tracker", "_planned_loss",
    "_planned_arguments", "_first_step", "gather_function", "_eval_dataloaders",
}  # fmt: skip
"""Attributes of a trainer that a loss does not read."""

_LOSS_OPTIONS = ("return_outputs", "num_items_in_batch", "a further positional argument")
"""Names of the arguments of `compute_loss` after model and inputs, in their order."""
_SET_ON_OBJECT = "is set on the object, but a plan is for that of the class; define it as a method of the class"
"""End of the message about a `compute_loss` that the class does not define."""


def _make_mapping(kind: type[UserDict[str, Any]], others: dict[str, None], items: dict[str, Any]) -> UserDict[str, Any]:
    """Return a mapping of a class with these items, without its `__init__`, which a tracer might refuse."""
    mapping = kind.__new__(kind)
    mapping.__dict__.update({**others, "data": items})
    return mapping


def _class_loss(trainer: Any) -> Callable[..., Any]:
    """Return the function `compute_loss` of the trainer's class, which a plan replaces on the trainer itself."""
    function: Callable[..., Any] = type(trainer).compute_loss
    return function


def _copy_for_ranks(trainer: Any, ranks: int) -> Any:
    """Return a copy of a trainer whose `compute_loss` gives the loss of one process among `ranks` processes."""
    trainer, accelerator = copy.copy(trainer), copy.copy(trainer.accelerator)
    accelerator.state = copy.copy(accelerator.state)  # states share their attributes, but not with a copy
    accelerator.state.num_processes = ranks
    trainer.accelerator = accelerator
    return trainer


class _FirstStepError(Exception):
    """End of a `train` that `workload` started."""

    def __init__(self, model: torch.nn.Module, batch: Any) -> None:
        super().__init__("the first training step")
        self.model, self.batch = model, batch


def _explain_unplanned(model: torch.nn.Module) -> str:
    """Return why a call of `compute_loss` runs without the plan, and what to change.

    The text continues a message that begins with the trainer's step.
    """
    if not model.training:
        return f"runs {type(model).__name__} in eval mode, in which the plan has no effect; call model.train() there"
    return "calls self.compute_loss with return_outputs=True, with which the plan has no effect; leave it out"


class _PlanCheck(transformers.TrainerCallback):  # type: ignore[misc]
    """Refuse, after the first step, a trainer whose steps never call `compute_loss`."""

    def __init__(self, trainer: PlannedTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Raise ConfigError if the step ran without the plan."""
        trainer = self._trainer
        if trainer._planned_loss is None:
            name = type(trainer).__name__
            if vars(trainer).get("compute_loss") != trainer._compute_planned_loss:
                raise ConfigError(f"compute_loss of {name} {_SET_ON_OBJECT}")
            raise ConfigError(f"training_step of {name} {trainer._unplanned}, or train without a plan")


@contextmanager
def _checking_capture(trainer: Any) -> Iterator[None]:
    """Raise CaptureError for a `compute_loss` that changes a Python object: a metric, say, would be lost.

    With several processes, a PlanError of the first step also advises `workload(ranks=...)`: the `Trainer` multiplies
    its loss by the number of processes, so each number needs a plan of its own.
    """
    with refuse_side_effects("in a callback for example, and leave it out of compute_loss"):
        try:
            yield
        except PlanError as error:
            ranks = trainer.accelerator.num_processes
            if ranks == 1 or trainer._planned_loss.graph is not None:
                raise
            remedy = f"this is one of {ranks} processes, so make the plan of workload(ranks={ranks})"
            raise PlanError(f"{error}; {remedy}") from error
        except CaptureError as error:
            owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
            if owner is transformers.Trainer:
                raise
            raise CaptureError(
                f"{error}; compute_loss is that of {owner.__name__}: override it in a subclass without that line, or with "
                "compute_loss = transformers.Trainer.compute_loss"
            ) from error


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the modules of a model into eval mode for the block, without their `train`, which a user may override."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _module_replaced(wrapper: torch.nn.Module, module: torch.nn.Module) -> Iterator[None]:
    """Put another module into DistributedDataParallel for the block, so that its forward calls that one."""
    inner = wrapper._modules["module"]
    wrapper._modules["module"] = module
    try:
        yield
    finally:
        wrapper._modules["module"] = inner


@contextmanager
def _without_callbacks(trainer: Any) -> Iterator[None]:
    """Remove a trainer's callbacks for the block."""
    callbacks, trainer.callback_handler.callbacks = trainer.callback_handler.callbacks, []
    try:
        yield
    finally:
        trainer.callback_handler.callbacks = callbacks
