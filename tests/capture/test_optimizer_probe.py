"""Optimizers that look across parameters are recognized, stepped whole, and predicted; the user's own stays as it is."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotune.capture.optimizers.optimizer_copy import collect_state_tensors, iter_tensors_and_optimizers
from autotune.capture.optimizers.optimizer_probe import probe
from autotune.capture.optimizers.trial_state import fingerprint
from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import Role
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.predict.simulate import simulate
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile, read_allocations
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.capture.twins import Twins, planned_step
from tests.support.eager import eager_step
from tests.support.optimizers import (
    ACROSS,
    AcceleratedOptimizer,
    Centralized,
    GlobalNorm,
    Langevin,
    Lars,
    Lookahead,
    MuonAndAdamW,
    Sam,
    _Each,
)  # fmt: skip
from tests.support.small import labelled_loss, make, mlp

SETTINGS: dict[str, Any] = {
    "with gradient": {"update": {"planner": "with_gradient"}, "recompute": {"planner": "greedy"},
                      "allocator": {"planner": "arena"}},
    "at end": {"update": {"planner": "at_end"}, "recompute": {"planner": "greedy"}, "allocator": {"planner": "arena"}},
}  # fmt: skip


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Dropout(0.2),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    )


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes or ((16, 8), (16,), (4, 16), (4,))]


def everything(workload: Workload) -> Any:
    """Bits of the parameters, and of all that the optimizer holds."""
    names = {id(p): name for name, p in workload.model.named_parameters()}
    groups = [
        one.param_groups
        for one in iter_tensors_and_optimizers(workload.optimizer)
        if isinstance(one, torch.optim.Optimizer)
    ]
    bits = [(name, fingerprint(p, {})) for name, p in workload.model.named_parameters()]
    held = sorted(
        repr(fingerprint(one, {})) for one in collect_state_tensors(workload.optimizer)
    )  # updates come in any order
    state = {names.get(id(key), key): fingerprint(part, names) for key, part in workload.optimizer.state.items()}
    return bits, held, fingerprint(groups, names), state


def untouched(workload: Workload) -> Any:
    """The same, and which objects they are."""
    every = [one for one in iter_tensors_and_optimizers(workload.optimizer) if isinstance(one, torch.optim.Optimizer)]
    objects = [(id(one), sorted(vars(one)), id(one.state), id(one.param_groups)) for one in every]
    scalars = [[(k, v) for k, v in vars(one).items() if isinstance(v, (int, float, str))] for one in every]
    members = [[id(p) for group in one.param_groups for p in group["params"]] for one in every]
    grads = [p.grad is None for p in workload.model.parameters()]
    return everything(workload), objects, scalars, members, grads


def stepped(name: str) -> Workload:
    """A workload whose optimizer has state; two are twins."""
    workload = make(deep, optimizer=ACROSS[name])
    run(lambda: eager_step(workload)[0], 2)
    return workload


@pytest.mark.parametrize("name", ACROSS)
def test_an_optimizer_that_looks_across_parameters_stays_as_it_was_and_equals_eager_bit_for_bit(name: str):
    workload, other = stepped(name), stepped(name)
    before, drawn = untouched(workload), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    program = capture(workload)
    profile(program)
    assert untouched(workload) == before
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
    assert program.updates.joint_reason
    plan = make_plan(program.graph, SETTINGS["with gradient"], 0, Costs.unit(program.graph))
    assert plan.recomputed
    with planned_step(program, workload, plan) as step:
        ours = run(step, 6)
    theirs = run(lambda: eager_step(other)[0], 6)
    assert ours == theirs
    assert everything(workload) == everything(other)


def run(step: Callable[[], torch.Tensor], steps: int) -> list[Any]:
    """Losses and the generators afterwards."""
    torch.manual_seed(3)
    random.seed(3)
    losses = [step().item() for _ in range(steps)]
    return [losses, torch.get_rng_state().tolist(), random.getstate()]


TORCH_OWN = [
    name for name, made in vars(torch.optim).items()
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]  # fmt: skip


@pytest.mark.parametrize("name", TORCH_OWN)
def test_torchs_own_optimizers_update_each_parameter_alone(name: str):
    shapes = ((16, 8), (4, 16)) if name == "Muon" else ()
    assert probe(getattr(torch.optim, name)(parameters(*shapes))).joint_reason == ""


def test_no_generator_of_a_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch):
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    probe(torch.optim.AdamW(mlp().parameters()))
    assert not seeded


def test_a_warm_up_that_begins_at_rate_zero_does_not_hide_that_parameters_move():
    optimizer = torch.optim.AdamW(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert probe(optimizer).joint_reason == ""


def test_weights_of_16_bits_that_hardly_move_are_still_seen_to_move():
    held = [nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)), nn.Parameter(torch.ones(8, dtype=torch.bfloat16))]
    assert probe(torch.optim.AdamW(held, lr=1e-5)).joint_reason == ""


def test_a_trust_ratio_per_parameter_looks_across_nothing():
    assert probe(Lars(parameters())).joint_reason == ""


def test_an_optimizer_that_keeps_gradients_gets_copies_of_those_that_other_ops_write_over():
    class KeepsGradient(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        before = state.get("before", torch.zeros_like(parameter))
                        parameter.add_(parameter.grad - 0.5 * before, alpha=-group["lr"])
                        state["before"] = parameter.grad

    parameters = torch.nn.Linear(2, 2).parameters
    assert probe(KeepsGradient(parameters(), 0.1)).writes_gradients
    assert not probe(torch.optim.SGD(parameters(), 0.1, momentum=0.9)).writes_gradients


def test_gradients_centralized_in_place_are_each_parameters_own():
    twins = Twins(partial(make, deep, optimizer=Centralized))
    assert twins.program.updates.joint_reason == ""
    for settings in SETTINGS.values():
        plan = make_plan(twins.graph, settings, 0, Costs.unit(twins.graph))
        with twins.planned(plan) as step:
            ours = run(step, 4)
        assert ours == run(lambda: eager_step(twins.other)[0], 4)
        assert everything(twins.one) == everything(twins.other)


def test_each_reason_names_what_was_seen():
    reasons = {name: probe(made(parameters())).joint_reason for name, made in ACROSS.items()}
    assert reasons == {
        "global norm": "its update of one parameter depends on others",
        "clips large norms": "its update of one parameter depends on others",
        "global count": "its step changes state['global'], for all parameters at once",
        "langevin": "its step draws random numbers",
        "python noise": "its step draws random numbers",
        "muon and adamw": "it holds another optimizer (Muon)",
        "lookahead": "it holds another optimizer (AdamW)",
        "skips infinite": "its update of one parameter depends on others",
        "later norm": "its update of one parameter depends on others",
        "by position": "its update of one parameter depends on others",
        "writes gradients": "its update of one parameter depends on others",
        "shared step": "its step changes 'step', for all parameters at once",
        "layer trust": "its update of one parameter depends on others",
        "sam of last": "its update of one parameter depends on others",
        "unknown wrapper": "it holds another optimizer (AdamW)",
    }


class Fails(_Each):
    """Knows only parameters of its own sizes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group, parameter in self.each():
            if max(parameter.shape) not in (16, 4) or parameter.shape[-1] not in (4, 8, 16):
                raise ValueError(f"no parameter of {tuple(parameter.shape)}")
            parameter.sub_(parameter.grad, alpha=group["lr"] * (parameter.numel() > 16) + 1e-3)
            if parameter.numel() == 16 and parameter.ndim == 2:
                raise ValueError("a stand-in")


def test_a_step_that_fails_on_stand_ins_is_stepped_whole_and_not_an_error():
    workload, other = make(mlp, optimizer=Fails), make(mlp, optimizer=Fails)
    reason = capture(workload).updates.joint_reason
    assert reason == "its step on small stand-ins ends in ValueError: a stand-in"
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    assert run(lambda: step(workload.batch), 3) == run(lambda: eager_step(other)[0], 3)
    assert everything(workload) == everything(other)


def test_the_update_of_one_that_draws_is_random_and_runs_once_at_the_end():
    graph = capture(make(deep, optimizer=Langevin)).graph
    (update,) = [op for op in graph.ops if op.name == "optimizer.step"]
    assert update.random
    assert not update.repeatable
    assert {graph.values[v].role for v in update.writes} == {Role.PARAM, Role.STATE}
    assert sum(graph.values[v].role is Role.GRAD for v in update.inputs) == 8


@pytest.mark.parametrize("made", [Sam, torch.optim.LBFGS])
def test_an_optimizer_that_computes_the_loss_again_is_refused_by_name(made: Any):
    with pytest.raises(CaptureError, match=rf"^{made.__name__}.* use .*SGD or AdamW"):
        capture(make(mlp, optimizer=made))


@pytest.mark.parametrize("prepared", ["stand-in", "accelerate"])
def test_accelerates_optimizer_is_trained_behind_its_wrapper_and_never_emptied(prepared: str):
    wrap: Any = AcceleratedOptimizer
    if prepared == "accelerate":
        wrap = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare
    workload, other = make(mlp, optimizer=torch.optim.AdamW), make(mlp, optimizer=torch.optim.AdamW)
    own = workload.optimizer
    wrapped = wrap(own)
    wrap(other.optimizer)  # Accelerate's loads the state anew, which sorts the settings of the groups
    held = [id(p) for p in own.param_groups[0]["params"]]
    step = TrainStep(workload.model, workload.loss_fn, wrapped, workload.batch)
    assert step.optimizer is own
    profile(capture(Workload(workload.model, labelled_loss, wrapped, workload.batch)))
    assert [id(p) for p in own.param_groups[0]["params"]] == held
    assert not own.state
    assert run(lambda: step(workload.batch), 4) == run(lambda: eager_step(other)[0], 4)
    assert everything(workload) == everything(other)


def test_a_wrapper_with_a_scaler_is_refused_with_both_to_pass():
    workload = make(mlp)
    wrapped = AcceleratedOptimizer(workload.optimizer)
    wrapped.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match=r"^AcceleratedOptimizer has a scaler, .* scaler=accelerator.scaler$"):
        TrainStep(workload.model, workload.loss_fn, wrapped, workload.batch)


def test_a_scheduler_on_an_inner_optimizer_steps_the_users_own_and_counts():
    workload, other = make(mlp, optimizer=MuonAndAdamW), make(mlp, optimizer=MuonAndAdamW)
    schedules = [torch.optim.lr_scheduler.StepLR(one.optimizer.muon, 1, 0.5) for one in (workload, other)]
    before = untouched(workload)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    profile(capture(workload))
    assert untouched(workload) == before
    for _ in range(3):
        step(workload.batch)
        schedules[0].step()
        eager_step(other)
        schedules[1].step()
    assert everything(workload) == everything(other)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_and_accumulation_leave_the_whole_step_to_the_users_optimizer(accumulate: int):
    workload, other = make(mlp, optimizer=GlobalNorm), make(mlp, optimizer=GlobalNorm)

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    step = TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch,
        accumulate=accumulate, before_update=lambda: clip(workload.model),
    )  # fmt: skip
    for _ in range(3):
        for _ in range(accumulate):
            step(workload.batch)
            other.loss_fn(other.model, other.batch).backward()
        clip(other.model)
        other.optimizer.step()
        other.optimizer.zero_grad()
    assert everything(workload) == everything(other)


def test_a_stored_plan_of_one_parameter_at_a_time_is_no_plan_of_a_whole_step():
    one, other = capture(make(mlp, optimizer=Lars)).graph, capture(make(mlp, optimizer=GlobalNorm)).graph
    assert len(one.ops) > len(other.ops)
    assert one.digest != other.digest


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


def step_peaks(program: Program, workload: Workload, plan: Plan, steps: int) -> tuple[list[int], int]:
    """Highest bytes of each step by the allocator's events, beyond what stood before the first; and the predicted peak."""
    predicted = simulate(program.graph, lower(program.graph, plan), profile(program)).peak_bytes
    state = sum(v.nbytes for v in program.graph.values if v.role is Role.STATE)
    there = (
        0
        if program.updates.joint_reason == ""
        else sum(t.untyped_storage().nbytes() for t in collect_state_tensors(workload.optimizer))
    )
    step = Executor(program, lower(program.graph, plan))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        for number in range(steps):
            with torch.profiler.record_function(f"autotune {number}"), program.updates.step():
                step(list(workload.batch))
    windows, changes = read_allocations(recorded)
    peaks = []
    for number in range(steps):
        begin, end = windows[f"autotune {number}"]
        live = [sum(n for at, n in changes if at < begin)]
        for at, nbytes in changes:
            if begin <= at <= end:
                live.append(live[-1] + nbytes)
        peaks.append(max(live))
    return peaks, predicted - program.graph.static_bytes + state - there


PREDICTED: dict[str, Any] = {
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "muon and adamw": MuonAndAdamW,
    "global norm": GlobalNorm,
    "lookahead": Lookahead,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "with_gradient") for name in PREDICTED),
        # an optimizer across parameters has one update, which is at the end in any plan
        pytest.param("radam", "at_end", marks=pytest.mark.slow),
        pytest.param("adamw", "at_end", marks=pytest.mark.slow),
    ],
)
def test_no_step_of_eight_peaks_above_the_prediction_and_one_reaches_it(name: str, place: str):
    workload = make(wide, (4, 64), optimizer=PREDICTED[name])
    program = capture(workload)
    plan = make_plan(program.graph, {"update": {"planner": place}}, 0, Costs.unit(program.graph))
    peaks, predicted = step_peaks(program, workload, plan, 8)
    assert max(peaks) <= predicted
    assert predicted <= 1.01 * max(peaks)


def test_an_optimizer_of_which_no_copy_can_be_made_is_stepped_and_warned_of():
    workload, other = make(mlp, optimizer=Lookahead), make(mlp, optimizer=Lookahead)
    workload.optimizer.log = open("/dev/null", "w")  # noqa: SIM115, PTH123
    with workload.optimizer.log:
        program = capture(workload)
        with pytest.warns(UserWarning, match=r"^Lookahead\(AdamW\) cannot be tried on a copy .* budget"):
            profile(program)
        step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
        assert run(lambda: step(workload.batch), 3) == run(lambda: eager_step(other)[0], 3)
    assert everything(workload)[:2] == everything(other)[:2]
