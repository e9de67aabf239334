"""A plan as text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.report.plan_text import describe_plan
from autotune.workloads.workload import Workload
from tests.records.test_plan_file import FILE


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("trains", [False, True])
def test_a_plan_of_gradients_alone_states_what_it_hands_over(trains: bool):
    model = nn.Linear(256, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    graph = capture(Workload(model, loss_fn, optimizer, torch.ones(2, 256))).graph
    text = "\n".join(describe_plan(replace(FILE, plan=Plan.traced(graph)), graph))
    assert ("0.5 MiB of gradients are handed to the loop at the end of the step" in text) is not trains
