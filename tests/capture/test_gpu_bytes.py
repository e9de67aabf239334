"""Values of a step captured on a GPU that is not there have the bytes of whole blocks; on a CPU those requested."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from autotune.capture.fake.fake_workload import capture_on_fake_tensors
from autotune.capture.optimizers.optimizer import sum_on_device
from autotune.capture.program import Program
from autotune.ir.allocation import allocated_bytes
from autotune.ir.graph import Role
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload
from tests.support.traced_gpu import capture_on_gpu

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def make(device: str, optimizer: str = "adam", loop: str = "") -> Callable[[], Workload]:
    def workload() -> Workload:
        model = nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 3)).to(device)
        return Workload(
            model, lambda net, batch: net(batch).square().mean(), OPTIMIZERS[optimizer](model.parameters()),
            torch.randn(5, 7, device=device), loop=Loop.parse(loop),
        )  # fmt: skip

    return workload


@cache
def captured(device: str, optimizer: str, loop: str) -> Program:
    capture = capture_on_gpu if device == "cuda" else lambda made: capture_on_fake_tensors(made, "made-up")
    return capture(make(device, optimizer, loop))


@pytest.mark.parametrize("loop", ["", "clip", "accumulate=2"])
def test_every_value_on_a_gpu_has_whole_blocks(loop: str) -> None:
    graph = captured("cuda", "adam", loop).graph
    assert all(value.nbytes % 512 == 0 for value in graph.values)
    assert any(value.role is Role.ACTIVATION and value.nbytes for value in graph.values)


@pytest.mark.parametrize("loop", ["", "accumulate=2"])
def test_rounding_changes_sizes_alone(loop: str) -> None:
    cpu, gpu = captured("cpu", "sgd", loop), captured("cuda", "sgd", loop)
    by_name = {value.name: value.nbytes for value in cpu.graph.values}
    shared = [value for value in gpu.graph.values if value.name in by_name]
    assert {value.name for value in shared} >= {"0.weight", "1.bias", "0.weight.grad", "0.addmm"}
    assert all(value.nbytes == allocated_bytes(by_name[value.name], "cuda") for value in shared)


def test_the_step_count_of_adam_stays_on_the_cpu_and_each_moment_has_blocks_of_its_own() -> None:
    (state,) = [value for value in captured("cuda", "adam", "").graph.values if value.role is Role.STATE]
    assert state.nbytes == 2 * (allocated_bytes(4 * 7 * 33, "cuda") + 5 * 512)  # six parameters, updated together


def test_state_of_one_parameter_is_counted_per_tensor_of_its_device() -> None:
    state = [torch.empty((), device="cpu"), torch.empty(33, device="meta"), torch.empty(129, device="meta")]
    assert sum_on_device(state, "cuda") == 512 + 1024
    assert sum_on_device(state, "cpu") == 4 * (1 + 33 + 129)


def test_the_step_count_is_no_tensor_of_the_gpu_to_offload() -> None:
    for device in ("cuda", "cpu"):
        program = captured(device, "adam", "")
        assert program.updates is not None
        weight = next(program.tensors[value.id] for value in program.graph.values if value.name == "0.weight")
        sizes = program.updates.state_sizes(weight)
        assert sizes.count(4 * 7 * 33) == 2
        assert (4 in sizes) == (device == "cpu")


def test_a_cpu_step_counts_requested_bytes() -> None:
    values = {value.name: value for value in captured("cpu", "adam", "").graph.values}
    assert values["0.weight"].nbytes == 4 * 7 * 33
    assert values["0.bias.state"].nbytes == 2 * 4 * 33 + 4


def test_a_buffer_of_another_size_is_not_overwritten_because_both_fill_one_block() -> None:
    def workload() -> Workload:
        model = nn.Linear(8, 4).to("cuda")

        def loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            small = net(batch).exp()  # 2 x 4 floats
            return (small.repeat(1, 3).sigmoid() + 1).log().sum()

        return Workload(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 8, device="cuda"))

    program = capture_on_gpu(workload)
    assert any(op.inplace for op in program.graph.ops)
    for op in program.graph.ops:
        for value in op.inplace:
            before, after = program.metas[value], program.metas[op.outputs[0]]
            assert before is not None
            assert after is not None
            assert (before.shape, before.stride) == (after.shape, after.stride)
