"""Graphs of one capture share a pool and a stream, and a capture that fails is closed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune import TrainStep
from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.runtime.gpu.cuda_recorder import CudaRecorder
from autotune.runtime.prepared_step import PreparedStep, StepPreparer
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_graphs import FakeRecorder


class GraphCuda(FakeCuda):
    """A made-up `torch.cuda` that logs captures; `fails` makes the end of one raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.captured: list[tuple[Any, Any, Any, str]] = []

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        def end(*_: object) -> None:
            if self.fails:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        self.captured.append((graph, pool, stream, capture_error_mode))
        return type("Capture", (), {"__enter__": lambda _: None, "__exit__": end})()


def test_graphs_of_one_capture_share_memory_and_stream() -> None:
    cuda = GraphCuda()
    recorder = CudaRecorder(torch.device("cuda", 0), cuda)
    for _ in range(2):
        recorder.begin()
        recorder.end()
    (first, *one), (second, *other) = cuda.captured
    assert one == other
    assert one[0] == "pool"
    assert recorder.graphs == [first, second]


def test_a_capture_that_failed_is_closed_without_another_error() -> None:
    cuda = GraphCuda()
    recorder = CudaRecorder(torch.device("cuda", 0), cuda)
    recorder.begin()
    cuda.fails = True
    recorder.abort()
    recorder.abort()
    assert len(cuda.captured) == 1


def test_graphs_of_a_model_that_is_not_on_a_gpu_are_refused_by_name() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"cuda_graphs=True needs a model on a GPU; this one is on cpu"):
        TrainStep(model, lambda net, batch: net(batch).sum(), optimizer, torch.ones(3, 4), cuda_graphs=True)


def run_prepared(make_recorder: Callable[[torch.device], FakeRecorder]) -> PreparedStep:
    """Return a step that has run in graphs."""
    from autotune.capture.tracer import capture
    from autotune.workloads.workload import Workload

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, lambda net, batch: net(batch).sum(), optimizer, torch.ones(3, 4))
    program = capture(workload)
    preparer = StepPreparer(None, {}, adapts=False, make_recorder=make_recorder)
    prepared = preparer.prepare(program, Plan.traced(program.graph))
    assert program.updates is not None
    for _ in range(5):
        with program.updates.step():
            prepared.executor([torch.ones(3, 4)])
    return prepared


def test_a_prepared_step_runs_in_graphs_of_the_recorder_it_is_given() -> None:
    devices = []

    def record(device: torch.device) -> FakeRecorder:
        devices.append(device)
        return FakeRecorder()

    prepared = run_prepared(record)
    assert devices == [torch.device("cpu")]
    assert prepared.executor.graphed is not None
    assert prepared.executor.graphed.graphs == 1


def test_a_prepared_step_that_is_closed_keeps_no_graphs() -> None:
    prepared = run_prepared(lambda _: FakeRecorder())
    prepared.close()
    assert prepared.executor.graphed is not None
    assert prepared.executor.graphed.graphs == 0


@pytest.mark.gpu
def test_a_step_in_real_graphs_has_the_losses_of_launches_over_changing_learning_rates_and_dropout() -> None:
    def losses(*, cuda_graphs: bool) -> list[float]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 3)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batches = [torch.randn(32, 6, device="cuda") for _ in range(8)]
        step = TrainStep(model, lambda net, x: net(x).square().mean(), optimizer, batches[0], cuda_graphs=cuda_graphs)
        torch.manual_seed(11)
        results = []
        for number, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            results.append(step(batch).item())
        executor = step._last_executor
        assert executor is not None
        assert (executor.graphed is not None) == cuda_graphs
        assert executor.graphed is None or executor.graphed.graphs == 1
        step.close()
        return results

    assert losses(cuda_graphs=True) == pytest.approx(losses(cuda_graphs=False), rel=1e-5)
