"""Two ways to run one loop: in plain PyTorch, and under a plan. A case uses only this interface."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.planners.auto import best_plan
from autotune.predict.simulate import peak_bytes, simulate
from autotune.records.plan_file import PlanFile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload

LossFn = Callable[[Any, Any], Any]
SHARE = 0.6
"""Budget of every plan: this share of the traced step's bytes above the static ones."""


class Way(Protocol):
    """How the step of a loop runs."""

    is_planned: bool

    def loss(self, model: nn.Module, loss_fn: LossFn, **options: Any) -> Callable[[Any], Any]:
        """Return a function of the batch whose result has `backward`."""

    def step(self, model: nn.Module, loss_fn: LossFn, optimizer: Any, batch: Any, **options: Any) -> Any:
        """Return a function of the batch that runs a whole step."""


class SmallPlans:
    """A maker of plans that recompute, in the arena. Seconds do not matter here, so ops cost one each."""

    stores: Mapping[str, str | Path] = {}
    kernels = memory_format = ""
    rebuild_price = REBUILD_PRICE

    def __call__(self, workload: Workload, graph: TrainGraph) -> PlanFile:
        """Return a plan for `SHARE` of the step's bytes, or the smallest one."""
        costs = Costs.unit(graph)
        budget = graph.static_bytes + int(SHARE * (peak_bytes(graph, Plan.traced(graph), costs) - graph.static_bytes))
        settings = {**best_plan(graph, costs, budget).settings, "allocator": {"planner": "arena"}}
        plan = make_plan(graph, settings, budget, costs)
        estimate = simulate(graph, lower(graph, plan), costs)
        workload_ref = WorkloadRef("loops:case", {})
        return PlanFile(
            workload_ref, graph.digest, f"{SHARE:.0%}", budget, 0, settings, plan, estimate, loop=str(workload.loop)
        )


class Planned:
    """The step under a plan."""

    is_planned = True

    def loss(self, model: nn.Module, loss_fn: LossFn, **options: Any) -> Callable[[Any], Any]:
        """Return a planned loss."""
        return PlannedLoss(model, loss_fn, SmallPlans(), **options)

    def step(self, model: nn.Module, loss_fn: LossFn, optimizer: Any, batch: Any, **options: Any) -> TrainStep:
        """Return a planned step."""
        return TrainStep(model, loss_fn, optimizer, batch, SmallPlans(), **options)


class Plain:
    """The step in plain PyTorch."""

    is_planned = False

    def loss(self, model: nn.Module, loss_fn: LossFn, **_: Any) -> Callable[[Any], Any]:
        """Return the loss function of this model."""
        return lambda batch: loss_fn(model, batch)

    def step(self, model: nn.Module, loss_fn: LossFn, optimizer: Any, batch: Any, **options: Any) -> "PlainStep":
        """Return the step as a loop writes it."""
        del batch
        return PlainStep(model, loss_fn, optimizer, **options)


class PlainStep:
    """Forward, backward, and an update every `accumulate` steps."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: Any,
        *,
        accumulate: int = 1,
        before_update: Callable[[], Any] | None = None,
        scaler: Any = None,
        **_: Any,
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._accumulate, self._before_update, self._scaler = accumulate, before_update, scaler
        self._count = 0

    def __call__(self, batch: Any) -> Any:
        """Run one step; return its results, detached."""
        results = self._loss_fn(self._model, batch)
        loss = results[0] if isinstance(results, tuple) else results
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self._count += 1
        if self._count % self._accumulate == 0:
            self._update()
        return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, results)

    def flush(self) -> None:
        """Update with the remainder."""
        if self._count % self._accumulate:
            self._update()
            self._count = 0

    def close(self) -> None:
        """Do nothing; a planned step releases its memory here."""

    def _update(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._before_update is not None:
            self._before_update()
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        self._optimizer.zero_grad()


Case = Callable[[Way], Iterator[torch.Tensor]]
"""A loop that yields what must be equal. Its docstring's first line describes it; `REFUSED` of its module names refusals."""
