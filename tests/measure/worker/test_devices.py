"""The place of a workload's model."""

import pytest
import torch

from autotune.errors import ConfigError
from autotune.measure.worker.eager import _on_device
from autotune.workloads.workload import Workload


def test_a_model_that_is_not_on_the_cpu_is_refused_there_with_its_place():
    model = torch.nn.Linear(4, 4, device="meta")
    workload = Workload(model, lambda model, batch: model(batch).sum(), None, torch.ones(2, 4))
    with pytest.raises(ConfigError, match="model is on meta, and device is cpu: make the model on the CPU"):
        _on_device(workload, "cpu")
