"""Programs of regions: the same step over fewer ops, under every plan, with regions run op by op or compiled."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from autotune.capture.program import Program
from autotune.capture.rewrites.batch_norm import REMADE_BY
from autotune.capture.tracer import capture
from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.kernels.region_program import fuse, list_regions
from autotune.planners import make_plan
from autotune.runtime.op_profiler import profile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.planned import (
    Case,
    difference,
    eager_trace,
    peak_difference,
    planned_trace,
    random_plan,
    with_stores,
)
from tests.support.random_models import draw

REBUILDING = 0.05
"""Price at which regions of the backward pass rebuild what is cheap to compute."""


def make(rows: int = 96) -> Workload:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.LayerNorm(128),
        torch.nn.Linear(128, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Workload(model, loss, optimizer, (torch.randn(rows, 64), torch.randint(8, (rows,))))


@cache
def captured() -> Program:
    """Capture the step once for all tests that run no step of it."""
    return capture(make())


@cache
def program() -> Program:
    return fuse(captured())


def fused_plan(plan: Plan, rebuild_price: float = REBUILD_PRICE) -> Plan:
    return replace(plan, kernels="inductor", rebuild_price=rebuild_price)


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))])
def test_regions_of_random_models_compute_the_captured_step_under_any_plan(seed: int):
    source = draw(seed)
    case = Case(f"seed{seed}", source.workload, source.batch)
    price = (REBUILDING, REBUILD_PRICE)[seed % 2]
    graph = fuse(capture(case.make(), case.name), price).graph
    costs = Costs.unit(graph)
    expected = eager_trace(case)
    for plan in (Plan.traced(graph), random_plan(graph, costs, random.Random(seed))):
        assert not difference(expected, planned_trace(case, fused_plan(plan, price), {})), str(source)


@pytest.mark.usefixtures("_op_by_op")
def test_a_plan_on_regions_offloads_as_any_other(tmp_path: Path):
    case = Case("regions", make, lambda number: make().batch)
    graph = program().graph
    costs = with_stores(Costs.unit(graph), ["ssd"])
    settings = {"recompute": {"planner": "keep"}, "offload": {"planner": "window", "store": "ssd"}}
    plan = replace(make_plan(graph, settings, graph.static_bytes + 1, costs), kernels="inductor")
    assert plan.offload
    assert not difference(eager_trace(case), planned_trace(case, plan, {"ssd": tmp_path}))


@pytest.mark.usefixtures("_op_by_op")
def test_a_planned_loss_on_regions_accumulates_the_gradients_of_eager():
    eager, planned = make(), make()
    traced = fused_plan(Plan.traced(fuse(capture(make(), gradients=True)).graph))
    loss = PlannedLoss(planned.model, planned.loss_fn, traced)
    for workload, compute in (
        (eager, lambda: eager.loss_fn(eager.model, eager.batch)),
        (planned, lambda: loss(planned.batch)),
    ):
        torch.manual_seed(7)
        for _ in range(2):
            compute().backward()
        assert workload.model[0].weight.grad is not None
    for one, other in zip(eager.model.parameters(), planned.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Averaging(torch.nn.Module):
    """Two buffers that change in each step; the second is computed from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 64)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps.add_(1)
            self.scale.mul_(0.9).add_(0.1 * self.steps)
        return self.linear(x) * self.scale


def make_averaging() -> Workload:
    torch.manual_seed(0)
    model = Averaging()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Workload(model, lambda model, x: model(x).square().sum(), optimizer, torch.randn(8, 32))


@pytest.mark.usefixtures("_op_by_op")
def test_a_buffer_is_computed_from_the_old_content_of_another_one():
    case = Case("averaging", make_averaging, lambda number: torch.full((8, 32), 1.0 + number))
    plan = fused_plan(Plan.traced(fuse(capture(make_averaging())).graph))
    assert not difference(eager_trace(case), planned_trace(case, plan, {}))


def test_rebuilt_values_are_not_saved_for_the_backward_pass():
    before, after = captured().graph, fuse(captured(), REBUILDING).graph
    gelu = next(value.id for value in before.values if "gelu" in value.name)
    kept = [value for value in after.values if value.name == before.values[gelu].name]
    assert before.consumers[gelu]
    assert not kept, "GELU's result lives inside of regions only"


def test_at_a_high_price_every_value_is_saved_and_planners_decide_what_is_recomputed():
    free, dear = (fuse(captured(), rebuild_price=price).graph for price in (0.0, 100.0))
    saved = [sum(value.nbytes for value in graph.values if _crosses(graph, value.id)) for graph in (free, dear)]
    unfused = captured().graph
    assert saved[0] < saved[1] == sum(value.nbytes for value in unfused.values if _crosses(unfused, value.id))


def _crosses(graph: TrainGraph, value: int) -> bool:
    """Return whether a value is created in the forward pass and read in the backward pass."""
    producer = graph.producer[value]
    return (
        producer is not None
        and graph.ops[producer].phase is Phase.FORWARD
        and any(graph.ops[reader].phase is Phase.BACKWARD for reader in graph.consumers[value])
    )


def test_dropout_draws_outside_of_regions_so_that_masks_are_those_of_eager():
    graph = program().graph
    assert sum(op.random for op in graph.ops) == 1
    assert not any(op.random for op in graph.ops if op.target == "autotune.kernels.fused")


def test_one_model_has_one_digest_and_equal_regions_share_a_kernel():
    assert program().graph.digest == fuse(capture(make())).graph.digest != captured().graph.digest
    signatures = [region.signature for region in list_regions(program())]
    assert len(signatures) == len(set(signatures))


def test_a_plan_for_other_kernels_is_refused_by_name():
    workload = make()
    with pytest.raises(PlanError, match="kernels"):
        TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch,
                  replace(Plan.traced(program().graph), kernels="triton"))  # fmt: skip


def make_regression() -> Workload:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 64))

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]).tanh(), batch[1])

    return Workload(model, loss, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(256, 32), torch.randn(256, 64)))


@pytest.mark.usefixtures("_op_by_op")
def test_a_plan_runs_on_regions_of_its_own_rebuild_price_and_on_no_others():
    case = Case("regions", make, lambda number: make().batch)
    graph = fuse(captured(), REBUILDING).graph
    assert graph.digest != program().graph.digest
    plan = fused_plan(Plan.traced(graph), REBUILDING)
    assert not difference(eager_trace(case), planned_trace(case, plan, {}))
    with pytest.raises(PlanError):
        planned_trace(case, replace(plan, rebuild_price=REBUILD_PRICE), {})
    with pytest.raises(PlanError, match="rebuild_price of the regions is -1"):
        planned_trace(case, replace(plan, rebuild_price=-1.0), {})


def test_a_compiled_loss_is_one_number_where_eager_keeps_its_terms():
    unfused = capture(make_regression())
    graphs = unfused.graph, fuse(unfused).graph
    assert [graph.values[graph.outputs[0]].nbytes for graph in graphs] == [256 * 64 * 4, 4]


def test_batch_norms_with_another_constant_run_other_kernels():
    def signatures(eps: float) -> set[str]:
        norm = torch.nn.BatchNorm2d(4, eps)
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), norm, torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        workload = Workload(model, lambda model, x: model(x).square().sum(), optimizer, torch.rand(2, 2, 32, 32))
        compiled = list_regions(fuse(capture(workload)))
        return {
            region.signature for region in compiled for call in region.region.calls if hasattr(call.target, REMADE_BY)
        }

    first, again, other = map(signatures, (1e-5, 1e-5, 1e-3))
    assert first
    assert first == again
    assert first.isdisjoint(other)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_the_peak_of_a_compiled_loss_is_predicted():
    case = Case("regression", make_regression, lambda number: make_regression().batch)
    program = fuse(capture(make_regression()))
    plan = fused_plan(Plan.traced(program.graph))
    assert not peak_difference(program, case, plan, profile(program), {})


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_a_compiled_step_passes_the_gate_and_every_plan_gives_its_bits_at_the_predicted_bytes():
    graph = program().graph
    traced = fused_plan(replace(Plan.traced(graph), allocator="arena"))
    workload = make()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, traced, verify=2) as step:
        step(workload.batch)
        step(workload.batch)
        assert "float64" in step.verified
    case, stepped = Case("regions", make, lambda number: make().batch), fuse(capture(make()))
    costs = profile(stepped)
    plans = [fused_plan(random_plan(graph, costs, random.Random(seed))) for seed in range(3)]
    expected = planned_trace(case, traced, {})
    for plan in plans:
        assert not difference(expected, planned_trace(case, plan, {}))
        assert not peak_difference(stepped, case, plan, costs, {})
