"""A plan made for a loop runs that loop: eager's bits in an arena, and the predicted bytes."""

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import simulate
from autotune.records.plan_file import PlanFile
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile, read_allocations
from autotune.runtime.train_step import TrainStep
from autotune.workloads.loop import Loop
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from tests.support.eager import tensors, worst_difference
from tests.support.small import batch_of, labelled_loss, make, normalized, sgd

IMAGES = (2, 3, 8, 8)
LOOPS = [Loop(), Loop(clip=True), Loop(scaler=True), Loop(accumulate=3), Loop(clip=True, scaler=True, accumulate=2)]
SMALL: Settings = {
    "update": {"planner": "with_gradient"},
    "recompute": {"planner": "segments", "count": 3},
    "inplace": {"planner": "greedy"},
    "allocator": {"planner": "arena"},
}
OFFLOAD: Settings = {
    "recompute": {"planner": "keep"},
    "offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0, "what": "all"},
    "allocator": {"planner": "arena"},
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def workload_of(loop: Loop, model: Any = normalized, shape: tuple[int, ...] = IMAGES) -> Workload:
    made = make(model, shape, optimizer=adamw)
    made.loop = loop
    return made


@functools.cache
def graph_of(loop: Loop) -> TrainGraph:
    return capture(workload_of(loop)).graph


@functools.cache
def planned_for(loop: Loop) -> PlanFile:
    return plan_file(loop, {**SMALL, "offload": OFFLOAD["offload"]})


def plan_file(loop: Loop, settings: Settings = SMALL) -> PlanFile:
    graph = graph_of(loop)
    costs = replace(Costs.unit(graph), stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    plan = make_plan(graph, settings, 0, costs)
    estimate = simulate(graph, lower(graph, plan), costs)
    return PlanFile(
        WorkloadRef("small", {}), graph.digest, "50%", graph.static_bytes, 0, settings, plan, estimate, loop=str(loop)
    )


class Run:
    """A training loop in eager or under a plan, over micro-batches of other numbers each."""

    def __init__(self, loop: Loop) -> None:
        self.workload, self.loop = workload_of(Loop()), loop
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if loop.scaler else None
        self.norms: list[torch.Tensor] = []

    def clip(self) -> None:
        self.norms.append(nn.utils.clip_grad_norm_(self.workload.model.parameters(), 0.1))

    def update(self) -> None:
        optimizer = self.workload.optimizer
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if self.loop.clip:
            self.clip()
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    def eager(self, steps: int) -> list[torch.Tensor]:
        losses = []
        for number in range(steps):
            loss = labelled_loss(self.workload.model, batch_of(*IMAGES, seed=number))
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(loss.detach())
            if (number + 1) % self.loop.accumulate == 0 or number == steps - 1:
                self.update()
        return losses

    def planned(self, steps: int, plan: PlanFile | Plan | None, **options: Any) -> list[torch.Tensor]:
        before_update = self.clip if self.loop.clip else None
        with TrainStep(
            self.workload.model, self.workload.loss_fn, self.workload.optimizer, self.workload.batch, plan,
            accumulate=self.loop.accumulate, before_update=before_update, scaler=self.scaler, **options,
        ) as step:  # fmt: skip
            losses = [step(batch_of(*IMAGES, seed=number)) for number in range(steps)]
            step.flush()
        return losses


def assert_equal(loop: Loop, plan: PlanFile | Plan | None, **options: Any) -> None:
    ours, theirs = Run(loop), Run(loop)
    steps = 4 * loop.accumulate + 1  # the arena lays out in the second update; the last update is of a remainder
    losses = ours.planned(steps, plan, **options)
    assert all(torch.equal(*pair) for pair in zip(losses, theirs.eager(steps), strict=True))
    assert [norm.item() for norm in ours.norms] == [norm.item() for norm in theirs.norms]
    assert worst_difference(tensors(ours.workload), tensors(theirs.workload)) == 0.0
    assert all(parameter.grad is None for parameter in ours.workload.model.parameters())


@pytest.mark.parametrize("loop", [Loop(), Loop(clip=True), Loop(accumulate=3), LOOPS[-1]], ids=str)
def test_a_plan_for_the_loop_ends_at_eagers_bits_in_an_arena_without_a_warning(loop: Loop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(loop, plan_file(loop))


@pytest.mark.parametrize("loop", [Loop(clip=True), Loop(accumulate=3)], ids=str)
def test_states_and_sums_of_gradients_may_be_offloaded_during_the_step(loop: Loop, tmp_path: Path):
    file = plan_file(loop, OFFLOAD)
    values = graph_of(loop).values
    names = [values[swap.value].name for swap in file.plan.offload]
    assert any(name.endswith(".state") for name in names)
    assert any(name.endswith(".grad.sum") for name in names) is loop.accumulates
    assert_equal(loop, file, stores={"ssd": tmp_path})


ALONE, CLIP, SCALER, SUM, ALL = LOOPS
PAIRS = {
    (ALONE, ALL): True, (ALONE, CLIP): True, (CLIP, SUM): True, (ALL, ALONE): True,
    (CLIP, ALONE): False, (CLIP, SCALER): False, (SUM, SCALER): False, (SUM, ALL): False,
}  # fmt: skip
"""Pairs of the loop that was planned for and the loop that runs, and True for those of the fast tests.

They are all ways between a step that updates at once, one that keeps its gradients, and one that sums them.
"""


@pytest.mark.parametrize(
    ("planned", "loop"),
    [pytest.param(*pair, marks=() if is_fast else pytest.mark.slow) for pair, is_fast in PAIRS.items()],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_plan_for_another_loop_ends_at_the_same_bits(planned: Loop, loop: Loop, tmp_path: Path):
    assert_equal(loop, planned_for(planned), stores={"ssd": tmp_path})


def test_a_plan_for_another_loop_is_warned_of_with_the_loop_to_tune_for():
    with pytest.warns(
        UserWarning, match=r"^accumulate and scaler: all gradients .*; tune with --loop scaler,accumulate=2"
    ):
        Run(Loop(scaler=True, accumulate=2)).planned(1, plan_file(Loop()))
    with pytest.warns(
        UserWarning, match=r"^accumulate: .* stay in memory between steps.*; tune with --loop accumulate=2"
    ):
        Run(Loop(accumulate=2)).planned(1, plan_file(Loop(clip=True)))
    with pytest.warns(UserWarning, match=r"^the plan is for --loop accumulate=3, .*; tune without --loop$"):
        Run(Loop()).planned(1, plan_file(Loop(accumulate=3)))


def test_more_micro_batches_than_planned_are_the_same_graph():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(Loop(accumulate=2), plan_file(Loop(accumulate=3)))


@pytest.mark.parametrize(
    ("loop", "settings"), [(CLIP, {}), (Loop(clip=True, scaler=True, accumulate=3), SMALL)], ids=["default", "small"]
)
def test_no_step_peaks_above_the_prediction_and_one_reaches_it(loop: Loop, settings: Settings):
    """The sums of gradients are part of the static bytes, as the optimizer's state is."""
    workload = workload_of(loop, wide, (4, 64))
    program = capture(workload)
    plan = make_plan(program.graph, settings, 0, Costs.unit(program.graph))
    estimate = simulate(program.graph, lower(program.graph, plan), profile(program))
    values = program.graph.values
    own = sum(value.nbytes for value in values if value.id in program.graph.static and value.role is not Role.STATE)
    predicted = estimate.peak_bytes - own
    run = TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch, replace(plan, allocator="system"),
        accumulate=loop.accumulate, scaler=torch.amp.GradScaler("cpu") if loop.scaler else None,
        before_update=lambda: nn.utils.clip_grad_norm_(workload.model.parameters(), 1.0),
    )  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(3 * loop.accumulate):
            with torch.profiler.record_function("autotune step"):
                run(workload.batch)
    live = highest = 0
    for _, nbytes in read_allocations(recorded)[1]:
        live += nbytes
        highest = max(highest, live)
    assert 0.97 * highest <= predicted <= 1.01 * highest


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


def test_a_linear_layers_gradient_is_handed_over_without_a_copy():
    program = capture(workload_of(Loop(clip=True), wide, (4, 64)))
    assert not any(op.target == "gradient_copy" for op in program.graph.ops)
    Executor(program, lower(program.graph, Plan.traced(program.graph)))


def test_a_step_with_momentum_may_keep_its_gradients_beyond_the_next_update():
    run = Run(Loop(accumulate=2))
    run.workload.optimizer = sgd(run.workload.model.parameters())
    kept: list[dict[str, torch.Tensor]] = []
    step = TrainStep(
        run.workload.model, run.workload.loss_fn, run.workload.optimizer, run.workload.batch, accumulate=2,
        before_update=lambda: kept.append({n: p.grad for n, p in run.workload.model.named_parameters()}),
    )  # fmt: skip
    for number in range(8):
        step(batch_of(*IMAGES, seed=number))
        if number == 1:
            copies = {name: gradient.clone() for name, gradient in kept[0].items()}
    assert worst_difference(kept[0], copies) == 0.0
