"""What a GPU runs can be recomputed as on a CPU: captured on a GPU that is not there; on a real one the bits are compared."""

from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.program import Program
from autotune.capture.rewrites import lstm
from autotune.capture.rewrites.dropout import gpu_scale
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.planners.auto import best_plan
from autotune.workloads.workload import Workload
from tests.support.traced_gpu import capture_on_gpu

aten = torch.ops.aten


def captured(make_model: Any, *shape: int) -> Program:
    def make() -> Workload:
        network = make_model().to("cuda")
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return Workload(network, lambda net, batch: _mean(net(batch)), optimizer, torch.randn(shape, device="cuda"))

    return capture_on_gpu(make)


def _mean(result: Any) -> torch.Tensor:
    return (result[0] if isinstance(result, tuple) else result).square().mean()


def ops_of(program: Program, target: str) -> list[Any]:
    return [op for op in program.graph.ops if target in op.target]


def test_a_dropouts_product_is_recomputed_from_its_mask() -> None:
    program = captured(lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 4)), 32, 8)
    (drawn,) = ops_of(program, "native_dropout.default")
    product, gradient = ops_of(program, "native_dropout_backward")
    assert not drawn.repeatable
    assert product.repeatable
    assert product.alias_of == drawn.outputs[0]
    assert product.inputs[1] == gradient.inputs[1] == drawn.outputs[1]
    assert program.calls[product.id].args[2] == gpu_scale(0.1, torch.float32)


def test_a_batch_norms_result_is_recomputed_from_its_statistics() -> None:
    program = captured(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), 4, 3, 16, 16)
    (statistics,) = ops_of(program, "_native_batch_norm_legit_functional")
    (result,) = ops_of(program, "batch_norm_elemt")
    assert result.repeatable
    assert result.alias_of == statistics.outputs[0]
    assert list(result.inputs[-2:]) == list(statistics.outputs[1:3])


def block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))


def test_the_smallest_plan_for_a_net_with_both_recomputes_them() -> None:
    program = captured(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), *(block() for _ in range(4))), 16, 3, 32, 32)
    graph = program.graph
    order = best_plan(graph, Costs.unit(graph), 0, accept_first=True).plan.order
    repeated = {graph.ops[op].target for op in order if order.count(op) > 1}
    assert any("batch_norm_elemt" in target for target in repeated)
    assert any("native_dropout_backward" in target for target in repeated)


def test_scales_are_rounded_as_the_forward_kernel_rounds_them() -> None:
    assert gpu_scale(0.5, torch.float32) == 2.0
    assert gpu_scale(0.1, torch.float64) == 1.0 / 0.9
    keep = torch.tensor(0.9).double()
    assert gpu_scale(0.1, torch.bfloat16) == (1.0 / keep).float().item()


def test_the_size_is_asked_of_the_kernel_with_the_layers_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernel(data: torch.Tensor, weights: list[torch.Tensor], *rest: object) -> tuple[Any, ...]:
        calls.append((data.shape, [weight.shape for weight in weights]))
        return None, None, None, torch.empty(77, dtype=torch.uint8)

    graph = torch.fx.Graph()
    data, weight = graph.placeholder("data"), graph.placeholder("weight")
    data.meta["val"], weight.meta["val"] = torch.empty(5, 4, 8), torch.empty(64, 8)
    monkeypatch.setattr(lstm, "CUDNN", kernel)
    node = graph.call_function(kernel, (data, [weight], 4))
    traced = torch.empty(0, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lstm.measure_reserve(node, traced) is traced
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    output = torch.empty(5, 4, 16)
    target, result = lstm.with_workspace(node, [output, None, None, traced, None])
    assert (target, result[0], result[lstm.RESERVE].nbytes, len(result)) == (node.target, output, 77, 5)
    assert calls == [((5, 4, 8), [(64, 8)])]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_real_gpu_a_dropouts_product_has_the_forwards_bits(dtype: torch.dtype) -> None:
    data = torch.randn(1 << 20, device="cuda", dtype=dtype)
    for p in (0.1, 0.3, 0.5, 0.9):
        product, mask = aten.native_dropout(data, p, True)
        assert torch.equal(aten.native_dropout_backward(data, mask, gpu_scale(p, dtype)), product)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_real_gpu_a_batch_norms_result_has_the_forwards_bits(dtype: torch.dtype) -> None:
    data = torch.randn(16, 32, 28, 28, device="cuda", dtype=dtype)
    weight, bias = torch.rand(32, device="cuda"), torch.randn(32, device="cuda")
    for mean, variance in ((None, None), (torch.zeros(32, device="cuda"), torch.ones(32, device="cuda"))):
        result, average, inverse = aten.native_batch_norm(data, weight, bias, mean, variance, True, 0.1, 1e-5)
        assert torch.equal(aten.batch_norm_elemt(data, weight, bias, average, inverse, 1e-5), result)


@pytest.mark.gpu
def test_on_a_real_gpu_the_bytes_that_an_lstm_saves_for_backward_are_in_the_graph() -> None:
    model = nn.LSTM(8, 16).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 4, 8, device="cuda")
    program = capture(Workload(model, lambda net, data: _mean(net(data)), optimizer, batch))
    (forward,) = ops_of(program, "_cudnn_rnn.default")
    assert program.graph.values[forward.outputs[lstm.RESERVE]].nbytes > 0
