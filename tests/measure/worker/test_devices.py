"""The place of a workload's model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.errors import ConfigError
from autotune.measure.spec import Spec
from autotune.measure.worker import bench
from autotune.measure.worker.eager import _on_device
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload


def test_a_loss_that_is_a_module_moves_with_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Buffer(torch.ones(4))

    workload = Workload(torch.nn.Linear(4, 4), Loss(), None, torch.ones(2, 4))
    moved = _on_device(workload, "meta")
    assert {moved.model.weight.device.type, moved.loss_fn.weights.device.type, moved.batch.device.type} == {"meta"}


def test_the_gpu_is_used_once_the_workload_has_chosen_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    chosen = [0]
    monkeypatch.setattr(bench, "EagerWorkload", lambda spec: chosen.append(1))
    monkeypatch.setattr(bench, "PlannedSteps", lambda *_: None)
    monkeypatch.setattr(bench, "GpuProcess", lambda: SimpleNamespace(index=chosen[-1]))
    made: Any = bench.Bench(Spec(WorkloadRef("resnet18"), tmp_path, device_kind="cuda", scratch=tmp_path))
    assert made._gpu.index == 1


def test_a_model_that_is_not_on_the_cpu_is_refused_there_with_its_place():
    model = torch.nn.Linear(4, 4, device="meta")
    workload = Workload(model, lambda model, batch: model(batch).sum(), None, torch.ones(2, 4))
    with pytest.raises(ConfigError, match="model is on meta, and device is cpu: make the model on the CPU"):
        _on_device(workload, "cpu")
