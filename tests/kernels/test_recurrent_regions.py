"""Recurrent layers on compiled kernels: their ops are fused, all steps share kernels, and gradients of weights are sums in place."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.kernels.region_program import fuse, list_regions
from autotune.planners import make_plan
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.planned import Case, Trace, difference, eager_trace, planned_trace, random_plan

TOLERANCE = 1e-11
"""Relative difference in float64: sums in another order round differently, and nothing else may differ."""


class Cells(nn.Module):
    """A loop over cells, each on the outputs of the one below."""

    def __init__(self, kind: type[nn.RNNCellBase], width: int, depth: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(width, width) for _ in range(depth))

    def forward(self, sequence: Tensor) -> Tensor:
        states: list[Tensor | tuple[Tensor, Tensor]] = []
        for cell in self.cells:
            blank = sequence.new_zeros(sequence.shape[0], sequence.shape[2])
            states.append((blank, blank) if isinstance(cell, nn.LSTMCell) else blank)
        outputs = []
        for inputs in sequence.unbind(1):
            hidden = inputs
            for number, cell in enumerate(self.cells):
                states[number] = cell(hidden, states[number])
                hidden = states[number][0] if isinstance(cell, nn.LSTMCell) else states[number]
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class Layer(nn.Module):
    """A recurrent layer that runs all steps in one call."""

    def __init__(self, kind: type[nn.RNNBase], width: int, depth: int) -> None:
        super().__init__()
        self.layer = kind(width, width, depth, batch_first=True)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.layer(sequence)[0]


BODIES: dict[str, Callable[[], nn.Module]] = {
    "LSTM cells": lambda: Cells(nn.LSTMCell, 8, 2),
    "GRU cells": lambda: Cells(nn.GRUCell, 8, 1),
    "RNN cells": lambda: Cells(nn.RNNCell, 8, 2),
    "GRU": lambda: Layer(nn.GRU, 8, 2),
    "RNN": lambda: Layer(nn.RNN, 8, 1),
}


def make(body: str = "LSTM cells", steps: int = 6, dtype: torch.dtype = torch.float64) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), BODIES[body](), nn.Linear(8, 8)).to(dtype)
    return Workload(
        model,
        lambda model, batch: (model(batch) - batch).square().mean(),
        torch.optim.AdamW(model.parameters()),
        torch.randn(4, steps, 8, dtype=dtype),
    )


def worst(wanted: Trace, made: Trace) -> float:
    """Return the largest difference of a tensor, relative to its largest element; infinity where keys differ."""
    found = 0.0
    for one, other in zip(wanted, made, strict=True):
        if one.keys() != other.keys():
            return float("inf")
        for key, part in one.items():
            if isinstance(part, Tensor) and part.is_floating_point():
                size = part.abs().max().clamp(min=1e-3)
                found = max(found, float((part - other[key]).abs().max() / size))
    return found


def backward_targets(program: Program) -> Counter[str]:
    return Counter(op.target for op in program.graph.ops if op.phase is Phase.BACKWARD)


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize(
    "body", ["RNN", *(pytest.param(body, marks=pytest.mark.slow) for body in ("LSTM cells", "GRU"))]
)
def test_the_step_is_eagers_but_for_rounding_and_every_plan_has_the_same_bits(body: str):
    case = Case(body, lambda: make(body, 4), lambda number: make(body, 4).batch * (1 + number))
    graph = fuse(capture(case.make())).graph
    costs = Costs.unit(graph)
    plans = [Plan.traced(graph), random_plan(graph, costs, random.Random(0))]
    tight = make_plan(graph, {"recompute": {"planner": "greedy"}, "inplace": {"planner": "greedy"}}, 0, costs)
    traced, *others = (planned_trace(case, replace(plan, kernels="inductor"), {}) for plan in [*plans, tight])
    assert tight.inplace
    assert worst(eager_trace(case), traced) < TOLERANCE
    for other in others:
        assert not difference(traced, other)


@pytest.mark.parametrize("body", BODIES)
def test_layers_are_one_op_on_eagers_kernels_and_where_regions_rebuild_and_are_fused_by_default(body: str):
    captured = capture(make(body, 3))
    assert captured.opened is not None
    assert len(captured.opened.graph.ops) > len(captured.graph.ops)
    layers = {op.target for op in captured.graph.ops if op.target.startswith("autotune.regions.")}
    assert layers
    assert layers <= {op.target for op in fuse(captured, REBUILD_PRICE / 2).graph.ops}
    assert not layers & {op.target for op in fuse(captured).graph.ops}


def test_a_model_without_recurrent_layers_is_captured_once():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    assert capture(Workload(model, lambda model, x: model(x).sum(), None, torch.ones(3, 4))).opened is None


def test_longer_sequences_need_no_further_kernels():
    kernels = [len(list_regions(fuse(capture(make("LSTM cells", steps))))) for steps in (8, 10)]
    assert kernels[0] == kernels[1]


def test_the_gradient_of_a_weight_is_summed_by_the_matrix_products():
    steps = 4
    program = fuse(capture(make(steps=steps)))
    targets = backward_targets(program)
    assert targets["aten.addmm.default"] == 4 * (
        steps - 1
    )  # two cells have two weights each; the first product starts the sum
    assert not targets["aten.add.Tensor"]
    sums = [op for op in program.graph.ops if op.phase is Phase.BACKWARD and op.target == "aten.addmm.default"]
    for op in sums:
        assert op.inplace == (op.inputs[0],)
        assert program.graph.values[op.inputs[0]].nbytes == program.graph.values[op.outputs[0]].nbytes


def test_a_product_that_something_else_reads_too_stays_and_so_does_the_sum_of_a_model_without_recurrent_layers():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) @ self.second.weight + self.second(x) @ self.first.weight

    torch.manual_seed(0)
    program = fuse(capture(Workload(Twice(), lambda model, x: model(x).square().sum(), None, torch.randn(3, 8))))
    assert "aten.addmm.default" not in {op.target for op in program.graph.ops}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("body", ["LSTM cells", "GRU"])
def test_compiled_kernels_of_recurrent_layers_pass_the_gate_in_training(body: str):
    workload = make(body, dtype=torch.float32)
    plan = replace(Plan.traced(fuse(capture(make(body, dtype=torch.float32))).graph), kernels="inductor")
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, verify=3) as step:
        losses = [float(step(workload.batch)) for _ in range(12)]  # NumericsError where a verified step differs
    assert losses[-1] < losses[0]
