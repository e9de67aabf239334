"""A step under plans beside the same step in plain eager: every bit of four steps, and the bytes of the allocator."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, make_plan
from autotune.planners.knobs import Choice, Float, Int, Knob, KnobValue, Settings
from autotune.planners.space import build_space
from autotune.predict.bounds import peak_lower_bound
from autotune.predict.simulate import peak_bytes, resident_bytes, simulate
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.op_profiler import profile, read_allocations
from autotune.runtime.stores import open_store
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload

STEPS = 4
EFFORT = 2000
"""Limit of a drawn knob: some planners may search for minutes."""

Trace = list[dict[str, Any]]
"""Per step, what it returned, its gradients, the model's and the optimizer's tensors, and the generator's state."""


@dataclass(frozen=True)
class Case:
    """A step to compare: `make` gives twins, `batch` the batch of a number."""

    name: str
    make: Callable[[], Workload]
    batch: Callable[[int], Any]


def problem(case: Case, rng: random.Random, stores: Mapping[str, Path]) -> str:
    """Compare the traced plan and a random one with eager; the first difference in one line, or an empty string."""
    wanted = eager_trace(case)
    workload = case.make()
    program = capture(workload, case.name)
    costs = with_stores(profile(program), stores)
    plans = {"traced": Plan.traced(program.graph), "random": random_plan(program.graph, costs, rng)}
    for name, plan in plans.items():
        if found := difference(wanted, planned_trace(case, plan, stores)):
            return f"{name} plan: {found}"
    for name, plan in plans.items():
        if found := peak_difference(program, case, plan, costs, stores):
            return f"{name} plan: {found}"
    return ""


def with_stores(costs: Costs, stores: Iterable[str]) -> Costs:
    """Add the stores that plans may use, fast enough that planners offload."""
    return replace(costs, stores={name: StoreCost(1e9, 1e9, 5e8, 5e8) for name in stores})


def random_plan(graph: TrainGraph, costs: Costs, rng: random.Random) -> Plan:
    """Draw planners, their knobs and a budget between the proved lower bound and the traced step's peak."""
    low = peak_lower_bound(graph, replace(costs, stores={}))[0]
    budget = rng.randint(low, max(low, peak_bytes(graph, Plan.traced(graph), costs)))
    return make_plan(graph, random_settings(rng, costs), budget, costs)


def random_settings(rng: random.Random, costs: Costs) -> Settings:
    """Draw a planner of each kind and a value of each of its knobs."""
    settings: Settings = {}
    for kind, planners in build_space(KINDS, tuple(costs.stores)).items():
        name = rng.choice(list(planners))
        settings[kind] = {"planner": name} | {knob: _drawn(rng, values) for knob, values in planners[name].items()}
    return settings


def _drawn(rng: random.Random, knob: Knob) -> KnobValue:
    match knob:
        case Choice(options):
            return rng.choice(options)
        case Float(low, high):
            return rng.uniform(low, high)
        case Int(low, high):
            return rng.randint(low, max(low, min(high, low + rng.choice((0, 1, 4, EFFORT)))))


def eager_trace(case: Case) -> Trace:
    """Train in plain PyTorch."""
    workload, trace = case.make(), []
    assert workload.loss_fn is not None
    assert workload.optimizer is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for number in range(STEPS):
            result = workload.loss_fn(workload.model, case.batch(number))
            (result[0] if isinstance(result, tuple) else result).backward()
            gradients = {name: p.grad.clone() for name, p in workload.model.named_parameters() if p.grad is not None}
            workload.optimizer.step()
            workload.optimizer.zero_grad(set_to_none=True)
            trace.append(_recorded(workload, result, gradients))
    return trace


def planned_trace(case: Case, plan: Plan, stores: Mapping[str, Path]) -> Trace:
    """Train under a plan."""
    workload, trace = case.make(), []
    with (
        torch.random.fork_rng(devices=[]),
        TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, stores=stores) as step,
    ):
        torch.manual_seed(5)
        for number in range(STEPS):
            gradients: dict[str, torch.Tensor] = {}
            step.on_gradient = lambda name, gradient, kept=gradients: kept.update({name: gradient.clone()})
            trace.append(_recorded(workload, step(case.batch(number)), gradients))
    return trace


def _recorded(workload: Workload, result: Any, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    assert workload.optimizer is not None
    leaves, spec = pytree.tree_flatten(result)
    found: dict[str, Any] = {"structure of the results": str(spec), "generator": torch.get_rng_state()}
    found |= {f"result {at}": leaf for at, leaf in enumerate(leaves)}
    found |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    found |= dict(workload.model.state_dict())
    for name, parameter in workload.model.named_parameters():
        for key, part in workload.optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = part
    return {
        key: part.detach().clone() if isinstance(part, torch.Tensor) else part for key, part in found.items()
    }  # fmt: skip


def difference(wanted: Trace, made: Trace) -> str:
    """The first thing that differs, by name; empty where every bit is equal."""
    for number, (one, other) in enumerate(zip(wanted, made, strict=True)):
        if one.keys() != other.keys():
            missing, extra = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
            return f"step {number}: missing {missing}, not in eager {extra}"
        for key, part in one.items():
            if isinstance(part, torch.Tensor) and isinstance(other[key], torch.Tensor):
                if part.dtype != other[key].dtype or part.shape != other[key].shape:
                    return f"step {number}: {key} is {other[key].dtype} {tuple(other[key].shape)}, not {part.dtype} {tuple(part.shape)}"
                if not torch.equal(part, other[key]):
                    return f"step {number}: {key} differs by {(part.double() - other[key].double()).abs().max():.3g}"
            elif part != other[key]:
                return f"step {number}: {key} is {other[key]}, not {part}"
    return ""


def peak_difference(program: Program, case: Case, plan: Plan, costs: Costs, stores: Mapping[str, Path]) -> str:
    """Compare the estimated peak with the allocator's own events of a step after the second; empty where equal."""
    schedule = lower(program.graph, plan)
    own = resident_bytes(program.graph, schedule, costs)
    predicted = simulate(program.graph, schedule, costs).peak_bytes - own
    measured = measured_peak(program, case, plan, stores)
    return "" if measured == predicted else f"the peak is {measured} bytes beyond those at rest, estimated {predicted}"


def measured_peak(program: Program, case: Case, plan: Plan, stores: Mapping[str, Path]) -> int:
    """Highest sum of the allocator's events of a step, on torch's own allocator."""
    schedule = lower(program.graph, plan)
    batches = [[leaf for leaf in pytree.tree_leaves(case.batch(n)) if isinstance(leaf, torch.Tensor)] for n in range(4)]
    assert program.updates is not None
    store = open_store(plan.store, stores[plan.store], slot_sizes(program, schedule)) if plan.store else None
    try:
        step = Executor(program, schedule, store)
        with torch.random.fork_rng(devices=[]):
            for number in range(2):  # optimizer state exists from the second step on
                with program.updates.step():
                    step(batches[number])
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
                for number in (
                    2,
                    3,
                ):  # the profiler does not see the end of memory older than itself: weights leave in both
                    with program.updates.step(), torch.profiler.record_function(f"autotune {number}"):
                        result = step(batches[number])
                    del result
    finally:
        if store is not None:
            store.close()
    windows, changes = read_allocations(recorded)
    begin = windows["autotune 3"][0]
    before = sum(nbytes for at, nbytes in changes if at < begin)
    live = highest = before
    for at, nbytes in changes:
        if at >= begin:
            live += nbytes
            highest = max(highest, live)
    return highest - before
