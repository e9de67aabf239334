"""Updates that follow each other run in one call on a GPU: with the same bits, and only where the plan's peak has room."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.update.with_gradient import WithGradient
from autotune.runtime import codegen
from autotune.runtime.executor import Executor
from autotune.runtime.gpu.joint_updates import joins_updates
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.stores import open_store
from autotune.testing.graphs import random_plan
from autotune.workloads.workload import Workload

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "joins_updates", lambda program: True)


def make(optimizer: str = "adamw", rows: int = 2000) -> tuple[Program, Workload]:
    torch.manual_seed(7)
    layers = [nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 6)]
    network = nn.Sequential(*layers)
    batch = torch.randn(rows, 6)
    chosen = OPTIMIZERS[optimizer](network.parameters())
    workload = Workload(network, lambda net, data: net(data).square().mean(), chosen, batch)
    return capture(workload), workload


@cache
def read_only(optimizer: str, rows: int) -> Program:
    """Capture a program once for all tests that run no step of it."""
    return make(optimizer, rows)[0]


def train(plan: Plan, optimizer: str, directory: Path) -> tuple[list[torch.Tensor], str]:
    """Return what four steps leave, and the source of the step."""
    program, workload = make(optimizer)
    schedule = lower(program.graph, plan)
    assert program.updates is not None
    store = open_store("ssd", directory, slot_sizes(program, schedule)) if schedule.store else None
    executor = Executor(program, schedule, store)
    for number in range(4):
        for group in program.updates.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
        with program.updates.step():
            executor([workload.batch])
    if store is not None:
        store.close()
    state = program.updates.optimizer.state_dict()["state"]
    leaves = torch.utils._pytree.tree_leaves([workload.model.state_dict(), state])
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)], executor.source


@pytest.mark.parametrize(
    ("optimizer", "seed"), [("adamw", None), ("adamw", 0), ("adamw", 1), ("sgd", None), ("sgd", 3)]
)
def test_joint_updates_have_the_bits_of_single_ones(
    optimizer: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = read_only(optimizer, 2000).graph
    plan = Plan.traced(graph) if seed is None else random_plan(graph, random.Random(seed))
    plan = replace(plan, store="ssd") if plan.offload else plan
    single, source = train(plan, optimizer, tmp_path)
    assert "update_together" not in source
    monkeypatch.setattr(codegen, "joins_updates", lambda program: True)
    joint, source = train(plan, optimizer, tmp_path)
    assert "update_together" in source
    for one, other in zip(single, joint, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_updates_are_joined_where_they_are_neighbours_and_the_peak_has_room() -> None:
    def calls(rows: int, *, early: bool) -> int:
        program = read_only("adamw", rows)
        plan = Plan.traced(program.graph)
        plan = WithGradient().plan(program.graph, plan, 0, Costs.unit(program.graph)) if early else plan
        return Executor(program, lower(program.graph, plan)).source.count("update_together")

    assert calls(2000, early=False) == 1
    assert 1 < calls(2000, early=True) <= 6
    assert calls(1, early=False) > 1, "the peak of a batch of one row is in the updates"


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_meter_sees_every_update_alone() -> None:
    program = read_only("adamw", 2000)
    schedule = lower(program.graph, Plan.traced(program.graph))
    assert "update_together" not in Executor(program, schedule, after_instruction=lambda index: None).source


def test_on_a_cpu_updates_stay_single() -> None:
    assert not joins_updates(read_only("adamw", 2000))
