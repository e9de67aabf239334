"""Every plan computes what plain PyTorch computes, for every ready workload."""

import itertools
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Offload, Prefetch, lower
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.planners.offload.window import OffloadWindow
from autotune.predict.simulate import simulate
from autotune.records.plan_file import PlanFile
from autotune.runtime import step_selector
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.stores import STORES, open_store
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from tests.support.eager import eager_step, tensors, worst_difference
from tests.workloads.zoo.tiny import TINY

MORE: dict[str, dict[str, Any]] = {
    "resnet18": {"batch": 8, "size": 64},
    "resnet50": {"batch": 8, "size": 64},
    "resnet152": {"batch": 4, "size": 64, "depth": 2},
    "mobilenet_v2": {"batch": 8, "size": 64, "dropout": 0.1},
    "segformer": {"batch": 4, "size": 64},
    "vit": {"batch": 8, "depth": 2, "dropout": 0.1},
    "gpt2": {"batch": 8, "tokens": 32, "depth": 2, "dropout": 0.1},
    "bert": {"batch": 8, "tokens": 32, "depth": 2, "dropout": 0.1},
    "lstm": {"batch": 16, "dropout": 0.1},
    "lstm_fused": {"batch": 16},
}
"""Enough batch that activations outweigh parameters: else no planner has anything to give away."""
WORKLOADS = {name: {**TINY[name], **MORE[name]} for name in TINY}
SLOW = pytest.mark.slow

QUICK = ("resnet18", "lstm")
"""Every kind of plan of these is in the default run; of the others the one that combines all kinds is."""

LIKE_RESNET18 = ("resnet50", "resnet152")
"""Workloads that are made of what resnet18 is made of."""

LONG = (*LIKE_RESNET18, "segformer")
"""The last one takes as long as five others; all are in the slow part alone."""

SMALL_WEIGHTS = ("vit", "lstm", "lstm_fused")
"""Of these no weight is worth moving: the peak is elsewhere, or all layers stand within the window."""

ADAPTING = ("resnet18", "mobilenet_v2", "gpt2", "lstm")
"""A workload of each family: a window moves tensors, whatever ops make them."""

KEEP: Settings = {"recompute": {"planner": "keep"}, "offload": {"planner": "keep"}}
RECOMPUTE: Settings = {**KEEP, "order": {"planner": "list_by_bytes"}, "recompute": {"planner": "greedy"}}
OFFLOAD: Settings = {**KEEP, "offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0}}
COMBINED: Settings = {
    "update": {"planner": "with_gradient"},
    "recompute": {"planner": "segments", "count": 3},
    "offload": {"planner": "window", "window": 2, "store": "ssd", "share": 1.0},
}
IN_PLACE: Settings = {**KEEP, "update": {"planner": "with_gradient"}, "inplace": {"planner": "greedy"}}
PLANS: dict[str, Settings | None] = {
    "traced": None, "in place": IN_PLACE, "recompute": RECOMPUTE, "offload": OFFLOAD, "combined": COMBINED,
}  # fmt: skip
SPREAD = ("recompute", "combined")
"""Two kinds of plans that together make every decision that the others make."""


def test_every_ready_workload_is_held_to_the_rules():
    assert set(WORKLOADS) == set(ZOO)


@cache
def eager_results(name: str) -> tuple[list[Any], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Losses and gradients of two eager steps, and everything afterwards."""
    workload = load_workload(name, WORKLOADS[name])
    losses, gradients = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        loss, found = eager_step(workload)
        losses.append(loss)
        gradients.append(found)
    return losses, gradients, tensors(workload)


def captured(name: str) -> tuple[Workload, Program, dict[str, torch.Tensor]]:
    """A workload captured once for all its plans, and its state at the beginning."""
    # transformers registers a class at its first object, and guards notice the new length of the registry
    module = sys.modules.get("transformers.utils.output_capturing")
    return _captured(name, len(module._CAN_RECORD_REGISTRY) if module else 0)


@cache
def _captured(name: str, registered: int) -> tuple[Workload, Program, dict[str, torch.Tensor]]:
    workload = load_workload(name, WORKLOADS[name])
    begun = {key: tensor.clone() for key, tensor in workload.model.state_dict().items()}
    return workload, capture(workload), begun


def untrained(name: str) -> tuple[Workload, Program]:
    """The captured workload as it began."""
    workload, program, begun = captured(name)
    workload.model.load_state_dict(begun)
    assert workload.optimizer is not None
    workload.optimizer.state.clear()
    return workload, program


def graph_of(name: str) -> TrainGraph:
    return captured(name)[1].graph


def plan_for(name: str, settings: Settings | None) -> Plan:
    """A plan for half of the bytes above the static ones, a quarter for one that combines everything."""
    graph = graph_of(name)
    if settings is None:
        return Plan.traced(graph)
    costs = Costs.unit(graph)
    costs = Costs(costs.seconds, costs.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    over = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes - graph.static_bytes
    return make_plan(graph, settings, graph.static_bytes + over // (4 if settings is COMBINED else 2), costs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name in QUICK or (kind == "combined" and name not in LONG) else SLOW)
        for name in WORKLOADS
        for kind in PLANS
        if name in QUICK or kind in SPREAD
    ],
)
def test_plan_equals_eager_bit_for_bit(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    losses, gradients, after = eager_results(name)  # first: it completes the registry of transformers
    workload, program = untrained(name)
    monkeypatch.setattr(step_selector, "capture", lambda workload, **_: program)
    plan = plan_for(name, PLANS[kind])
    if kind in ("recompute", "combined"):
        assert plan.recomputed > 0
    assert bool(plan.inplace) == (kind != "traced")
    if kind in ("offload", "combined") and name != "lstm_fused":  # too few layers to leave memory between any two
        assert plan.offload
    with TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, stores={"ssd": tmp_path}
    ) as step:
        for seed in range(2):
            seen: dict[str, torch.Tensor] = {}
            step.on_gradient = lambda parameter, gradient, seen=seen: seen.__setitem__(parameter, gradient.clone())
            torch.manual_seed(seed)
            made = step(workload.batch)
            loss = made[0] if isinstance(made, tuple) else made
            assert torch.equal(loss, losses[seed])
            assert worst_difference(seen, gradients[seed]) == 0.0
            assert all(parameter.grad is None for parameter in workload.model.parameters())
        assert (step.transfer_bytes > 0) == bool(plan.offload)
    assert worst_difference(tensors(workload), after) == 0.0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else SLOW) for name in WORKLOADS if name not in LIKE_RESNET18],
)
def test_every_window_and_store_equals_eager_bit_for_bit_with_weights_away_too(name: str, tmp_path: Path):
    expected = eager_results(name)[0], eager_results(name)[2]
    graph = graph_of(name)
    stores = {store: StoreCost(1e9, 1e9, 5e8, 5e8) for store in STORES}
    costs = replace(Costs.unit(graph), stores=stores)
    batch = [leaf for leaf in pytree.tree_leaves(captured(name)[0].batch) if isinstance(leaf, torch.Tensor)]
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    directories = {"ssd": tmp_path, "ramdisk": memory}
    away: set[Role] = set()
    for store, window in (("ssd", 0), ("ssd", 1), ("ssd", 2), ("ssd", 4), ("ssd", 8), ("ramdisk", 1)):
        plan = Plan.traced(graph)
        if window:
            plan = OffloadWindow(window, store, what="all").plan(graph, plan, 0, costs)
        away.update(graph.values[swap.value].role for swap in plan.offload)
        workload, program = untrained(name)
        schedule = lower(graph, plan)
        losses = []
        with open_store(store, directories[store], slot_sizes(program, schedule), checksums="all") as opened:
            step = Executor(program, schedule, opened)
            for seed in range(2):
                torch.manual_seed(seed)
                assert program.updates is not None
                with program.updates.step():
                    made = step(batch)
                losses.append(made[0] if isinstance(made, tuple) else made)
        assert all(torch.equal(*pair) for pair in zip(losses, expected[0], strict=True)), (store, window)
        assert worst_difference(tensors(workload), expected[1]) == 0.0, (store, window)
    memory.rmdir()
    assert Role.STATE in away
    assert name in SMALL_WEIGHTS or Role.PARAM in away


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "resnet18" else SLOW) for name in ADAPTING])
def test_a_window_that_adapts_equals_eager_bit_for_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = load_workload(name, WORKLOADS[name])
    workload, program = untrained(name)
    monkeypatch.setattr(step_selector, "capture", lambda workload, **_: program)
    graph = program.graph
    plan = replace(plan_for(name, OFFLOAD), allocator="arena")
    costs = replace(Costs.unit(graph), stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    roomy = PlanFile(
        WorkloadRef(name), graph.digest, "9GiB", 9 * 2**30, 0, OFFLOAD, plan, simulate(graph, lower(graph, plan), costs)
    )
    with TrainStep(
        workload.model,
        workload.loss_fn,
        workload.optimizer,
        workload.batch,
        roomy,
        stores={"ssd": tmp_path},
        adapt=True,
    ) as step:
        ready = step._selector.last
        assert ready.adapter is not None
        assert len(ready.adapter.variants) > 3
        turn = itertools.cycle(ready.adapter.variants)
        ready.adapter.record = lambda trace: setattr(ready.adapter, "current", next(turn))  # type: ignore[method-assign]
        seen = set()
        for seed in range(len(ready.adapter.variants) + 2):  # begins and ends with the first one
            torch.manual_seed(seed)
            made = step(workload.batch)
            seen.add(step.plan)
            torch.manual_seed(seed)
            assert torch.equal(made, eager_step(other)[0])
    assert len(seen) == len(ready.adapter.variants)
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_offload_lowers_the_peak_of_a_deep_model_and_brings_back_all_that_left():
    graph = graph_of("resnet18")
    plan = plan_for("resnet18", OFFLOAD)
    schedule = lower(graph, plan)
    left = [made.value for made in schedule.instructions if isinstance(made, Offload)]
    back = [made.value for made in schedule.instructions if isinstance(made, Prefetch)]
    assert sorted(left) == sorted(back)
    costs = Costs.unit(graph)
    costs = Costs(costs.seconds, costs.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    assert (
        simulate(graph, schedule, costs).peak_bytes
        < simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    )
