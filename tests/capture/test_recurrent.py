"""Recurrent layers stay one op per layer and direction of time, with eager's bits under every plan."""

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
from autotune.planners import make_plan
from autotune.runtime.op_profiler import profile
from tests.support.eager import assert_equals_eager
from tests.support.kernel_models import MODELS, square_loss
from tests.support.small import make
from tests.support.value_bytes import too_small

RECURRENT = [name for name in MODELS if name.startswith(("gru", "rnn", "lstm"))]


def of(name: str, dtype: torch.dtype = torch.float32):
    model, shape = MODELS[name]
    workload = make(lambda: model().to(dtype), shape, loss_fn=square_loss)
    workload.batch = (workload.batch[0].to(dtype), workload.batch[1])
    return workload


@pytest.mark.parametrize("name", RECURRENT)
def test_float64_layers_end_at_eagers_bits_too(name: str):
    assert_equals_eager(of(name, torch.float64), of(name, torch.float64), steps=3)


@pytest.mark.parametrize("planner", ["greedy", "segments"])
@pytest.mark.parametrize("name", ["gru", "gru_bidirectional", "rnn_tanh", "lstm_projected", "gru_cells"])
def test_a_layer_that_is_recomputed_ends_at_eagers_bits(name: str, planner: str):
    workload = of(name)
    graph = capture(workload).graph
    plan = make_plan(graph, {"recompute": {"planner": planner}}, 0, Costs.unit(graph))
    assert_equals_eager(workload, of(name), plan, steps=3)


def test_a_gru_of_two_layers_is_two_ops_each_way_however_many_steps():
    counts = []
    for steps in (3, 9):
        workload = make(lambda: nn.GRU(8, 16, 2, dropout=0.3), (steps, 2, 8), loss_fn=square_loss)
        ops = capture(workload).graph.ops
        assert sum("gru_forward" in op.target for op in ops) == sum("gru_backward" in op.target for op in ops) == 2
        counts.append(len(ops))
    assert counts[0] == counts[1] < 25


def test_a_longer_gru_has_another_signature_and_another_digest():
    graphs = [capture(make(lambda: nn.GRU(8, 16), (steps, 2, 8), loss_fn=square_loss)).graph for steps in (3, 3, 4)]
    signatures = [[op.signature for op in graph.ops if "gru" in op.target] for graph in graphs]
    assert signatures[0] == signatures[1] != signatures[2]
    assert graphs[0].digest == graphs[1].digest != graphs[2].digest


def test_a_regions_scratch_is_measured_and_its_outputs_are_not_below_the_truth():
    program = capture(of("gru"))
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
