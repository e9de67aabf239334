"""Recurrent layers stay one op per layer and direction of time, with eager's bits under every plan."""

from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import fx, nn

from autotune.capture.program import Call, Meta, Read
from autotune.capture.regions import Region, region_signature
from autotune.capture.rewrites import recurrent, slices
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners import make_plan
from autotune.runtime.op_profiler import profile
from autotune.workloads.workload import Workload
from tests.capture.test_eager_kernels import beside
from tests.support.eager import assert_equals_eager
from tests.support.kernel_models import MODELS, square_loss
from tests.support.small import make
from tests.support.value_bytes import too_small

DOUBLE = ("gru_bidirectional", "rnn_tanh", "lstm_two_layers", "lstm_without_bias", "lstm_projected")
"""A layer of each kind, and each LSTM, which oneDNN runs in float32 only."""
RECOMPUTED = ("gru", "gru_bidirectional", "rnn_tanh", "lstm_projected", "gru_cells")


def of(name: str, dtype: torch.dtype) -> Workload:
    model, shape = MODELS[name]
    workload = make(lambda: model().to(dtype), shape, loss_fn=square_loss)
    workload.batch = (workload.batch[0].to(dtype), workload.batch[1])
    return workload


@pytest.mark.parametrize("name", DOUBLE)
def test_float64_layers_end_at_eagers_bits_too(name: str):
    assert_equals_eager(of(name, torch.float64), of(name, torch.float64), steps=3)


@pytest.mark.parametrize("planner", ["greedy", "segments"])
@pytest.mark.parametrize("name", RECOMPUTED, scope="module")
def test_a_layer_that_is_recomputed_ends_at_eagers_bits(name: str, planner: str):
    twins = beside(name).twins
    plan = make_plan(twins.graph, {"recompute": {"planner": planner}}, 0, Costs.unit(twins.graph))
    twins.assert_equals_eager(plan)


@cache
def gru_of(steps: int) -> TrainGraph:
    return capture(make_gru(steps)).graph


def make_gru(steps: int) -> Workload:
    return make(lambda: nn.GRU(8, 16, 2, dropout=0.3), (steps, 2, 8), loss_fn=square_loss)


def test_a_gru_of_two_layers_is_two_ops_each_way_however_many_steps():
    counts = []
    for steps in (3, 6):
        ops = gru_of(steps).ops
        assert sum("gru_forward" in op.target for op in ops) == sum("gru_backward" in op.target for op in ops) == 2
        counts.append(len(ops))
    assert counts[0] == counts[1] < 25


def test_a_longer_gru_has_another_signature_and_another_digest():
    graphs = [gru_of(3), capture(make_gru(3)).graph, gru_of(6)]
    signatures = [[op.signature for op in graph.ops if "gru" in op.target] for graph in graphs]
    assert signatures[0] == signatures[1] != signatures[2]
    assert graphs[0].digest == graphs[1].digest != graphs[2].digest


def test_a_regions_scratch_is_measured_and_its_outputs_are_not_below_the_truth():
    program = beside("gru").twins.program
    assert too_small(program) == []
    costs = profile(program)
    whole = [op.id for op in program.graph.ops if isinstance(program.calls[op.id].target, Region)]
    assert whole
    assert all(costs.scratch_bytes[op] > 0 for op in whole)


def test_the_signature_of_a_region_does_not_depend_on_the_address_of_a_function():
    metas = [Meta((4,), (1,), torch.float32, torch.device("cpu"))] * 3
    code = slices.write_part.__code__
    loaded = [FunctionType(code, vars(slices), "write_part") for _ in range(2)]  # as two processes have it
    signatures = {
        region_signature([Call(function, (Read(0), Read(1), ()), (), 2)], [0, 1, 2], [2], metas) for function in loaded
    }
    assert len(signatures) == 1


class CountedMeta(dict[str, Any]):
    """Entries of a node that count how often they are looked up."""

    lookups = 0

    def get(self, *arguments: Any) -> Any:
        CountedMeta.lookups += 1
        return super().get(*arguments)

    def __contains__(self, key: object) -> bool:
        CountedMeta.lookups += 1
        return super().__contains__(key)


def test_marking_the_regions_of_cells_takes_time_in_proportion_to_their_number():
    lookups = []
    for cells in (20, 80):
        graph = fx.Graph()
        state = graph.placeholder("state")
        for number in range(cells):
            for _ in range(2):
                state = graph.call_function(torch.tanh, (state,))
                state.meta = CountedMeta(custom={recurrent._CALL: f"call_{number} lstm_cell"})
        before = CountedMeta.lookups
        recurrent.mark_regions(graph)
        lookups.append(CountedMeta.lookups - before)
        assert len({node.meta[recurrent.REGION] for node in graph.nodes if node.op == "call_function"}) == cells
    assert lookups[1] < 5 * lookups[0]
