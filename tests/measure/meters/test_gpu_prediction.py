"""The bytes that are predicted for a plan on a GPU are those that the GPU's meters read, on a made-up GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.allocation import allocated_bytes
from autotune.ir.costs import Costs
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.limits import limit_fraction
from autotune.measure.meters.cuda import CudaMeter
from autotune.planners.auto import best_plan
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import simulate
from autotune.runtime.executor import Executor
from autotune.workloads.workload import Workload
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_gpu_memory import CountedTensors

MIB = 2**20


def convolutions() -> Workload:
    """Activations from half a MiB to 14 MiB, so that every kind of segment is reserved."""
    model = nn.Sequential(
        nn.Conv2d(3, 28, 3, padding=1), nn.ReLU(), nn.Conv2d(28, 9, 3, padding=1), nn.Tanh(),
        nn.Conv2d(9, 1, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(125 * 125, 37),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, lambda net, batch: net(batch).square().mean(), optimizer, torch.randn(8, 3, 125, 125))


@pytest.fixture(scope="module")
def program() -> Program:
    """Return a step of the CPU whose values are counted as a GPU counts them."""
    program = capture(convolutions())
    values = tuple(replace(value, nbytes=allocated_bytes(value.nbytes, "cuda")) for value in program.graph.values)
    return replace(program, graph=replace(program.graph, values=values))


def gpu_costs(graph: TrainGraph) -> Costs:
    return replace(Costs.unit(graph), device_kind="cuda")


def run_step(program: Program, executor: Executor, batch: torch.Tensor) -> torch.Tensor:
    assert program.updates is not None
    with program.updates.step():
        result: torch.Tensor = executor([batch])
    return result


def read_meters(program: Program, plan: Plan, cuda: FakeCuda) -> tuple[int, int]:
    """Run steps of a plan, and return peak and charge as a measurement computes them: beyond the floor."""
    graph, batch = program.graph, torch.randn(8, 3, 125, 125)
    executor = Executor(program, lower(graph, plan))
    run_step(program, executor, batch)  # creates the optimizer's state
    tensors = CountedTensors(cuda)
    assert program.updates is not None
    for value in graph.inputs:
        if value in program.batch:
            tensors.count(batch)
        elif value == program.tangent:
            tensors.count(executor.tangent)
        elif graph.values[value].role is Role.STATE:
            parameter = graph.consumers[value]
            tensors.count(program.updates.state_tensors(_parameter(program, parameter[0])))
        else:
            tensors.count(program.tensors[value])
    floor = CudaMeter(cuda=cuda, charged=False).now_bytes() - graph.static_bytes
    cuda.empty_cache()
    with CudaMeter(cuda=cuda, charged=False) as allocated, CudaMeter(cuda=cuda) as reserved, tensors:
        for _ in range(4):
            run_step(program, executor, batch)
    return allocated.peak_bytes - floor, reserved.peak_bytes - floor


def _parameter(program: Program, update: int) -> torch.Tensor:
    written = next(v for v in program.graph.ops[update].writes if program.graph.values[v].role is Role.PARAM)
    return program.tensors[written]


@pytest.mark.parametrize(("share", "allocator"), [(1.0, "system"), (1.0, "arena"), (0.75, "arena"), (0.5, "system")])
def test_peak_and_charge_of_a_plan_are_predicted_to_the_byte(program: Program, share: float, allocator: str) -> None:
    graph, costs = program.graph, gpu_costs(program.graph)
    traced = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    plan = Plan.traced(graph) if share == 1 else best_plan(graph, costs, int(share * traced), accept_first=True).plan
    assert (plan == Plan.traced(graph)) == (share == 1)
    plan = replace(plan, allocator=allocator)
    expected = add_layout(graph, plan, costs, simulate(graph, lower(graph, plan), costs))
    measured = read_meters(program, plan, FakeCuda(expandable=allocator == "arena"))
    assert measured == (expected.peak_bytes, expected.charged_bytes)
    assert measured[1] > measured[0]


def test_a_limit_below_the_predicted_peak_is_out_of_memory_and_one_at_the_charge_is_not(program: Program) -> None:
    graph, costs = program.graph, gpu_costs(program.graph)
    plan = Plan.traced(graph)
    expected = add_layout(graph, plan, costs, simulate(graph, lower(graph, plan), costs))
    assert expected.charged_bytes is not None
    for limit, fits in ((expected.charged_bytes, True), (expected.peak_bytes - MIB, False)):
        cuda = FakeCuda()
        limit_fraction(limit, 0, cuda)
        if fits:
            read_meters(program, plan, cuda)
        else:
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                read_meters(program, plan, cuda)
