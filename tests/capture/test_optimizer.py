"""One parameter's update at a time is the user's own optimizer's step, whatever stands around it."""

import copy
from functools import cache, partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autotune.capture.program import View, argument_text
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.planners import make_plan
from autotune.runtime.op_profiler import profile
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.capture.twins import Twins
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import make, mlp, normalized, sgd

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, weight_decay=0.5),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adadelta": torch.optim.Adadelta,
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": (every := list(p))[::2], "weight_decay": 0.0}, {"params": every[1::2], "lr": 0.5}], lr=0.1
    ),
}
PLACES = ("at_end", "with_gradient")


@cache
def plan_of(optimizer: Any, place: str, model: Any) -> Plan:
    """A plan for every twin of a workload: they have the same graph."""
    graph = capture(make(model, optimizer=optimizer)).graph
    return make_plan(graph, {"update": {"planner": place}}, 0, Costs.unit(graph))


def pair(optimizer: Any = sgd, place: str = "with_gradient", model: Any = mlp) -> tuple[Workload, TrainStep, Workload]:
    """A workload, its step under a plan, and the same workload for plain eager."""
    workload, other = (make(model, optimizer=optimizer) for _ in range(2))
    plan = plan_of(optimizer, place, model)
    return workload, TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan), other


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of every parameter in the order of the groups."""
    return [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


def assert_same(workload: Workload, other: Workload) -> None:
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    for one, two in zip(state_of(workload.optimizer), state_of(other.optimizer), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key])) for key in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_the_optimizers_own_and_its_state_bytes_are_known_before_them(name: str):
    twins = Twins(partial(make, mlp, optimizer=OPTIMIZERS[name]))
    planned = {v.name.removesuffix(".state"): v.nbytes for v in twins.graph.values if v.name.endswith(".state")}
    for place in PLACES:
        plan = make_plan(twins.graph, {"update": {"planner": place}}, 0, Costs.unit(twins.graph))
        with twins.planned(plan) as step:
            for _ in range(3):
                assert torch.equal(step(), eager_step(twins.other)[0])
        assert_same(twins.one, twins.other)
    optimizer = twins.one.optimizer
    real = {
        name: sum(part.nbytes for part in optimizer.state[p].values() if isinstance(part, torch.Tensor))
        for name, p in twins.one.model.named_parameters()
    }
    assert planned == real


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedulers_learning_rate_counts_from_the_next_step_without_a_warning(name: str, recwarn):
    workload, step, other = pair()
    ours, theirs = SCHEDULERS[name](workload.optimizer), SCHEDULERS[name](other.optimizer)
    recwarn.clear()
    for _ in range(3):
        step(workload.batch)
        ours.step()
        eager_step(other)
        theirs.step()
    assert not [str(one.message) for one in recwarn]
    assert_same(workload, other)


def test_a_learning_rate_set_by_hand_counts_from_the_next_step():
    workload, step, other = pair()
    for lr in (0.1, 0.01, 0.0):
        workload.optimizer.param_groups[0]["lr"] = other.optimizer.param_groups[0]["lr"] = lr
        step(workload.batch)
        eager_step(other)
    assert_same(workload, other)


def last_layer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[2:], lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:the model in another mode")
def test_a_parameter_group_added_between_steps_is_trained_from_then_on():
    workload, step, other = pair(last_layer)
    for after in range(3):
        step(workload.batch)
        eager_step(other)
        other.model.zero_grad()
        if after == 0:
            for each in (workload, other):
                each.optimizer.add_param_group({"params": list(each.model[0].parameters()), "lr": 0.5})
    assert_same(workload, other)


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "tensor lr"])
def test_optimizer_state_can_be_saved_and_loaded_between_steps(name: str):
    workload, step, other = pair(OPTIMIZERS[name])
    step(workload.batch)
    eager_step(other)
    saved = copy.deepcopy(other.optimizer.state_dict())
    workload.optimizer.load_state_dict(saved)  # replaces groups and state by copies
    assert workload.optimizer.state_dict()["state"].keys() == saved["state"].keys()
    for _ in range(2):
        step(workload.batch)
        eager_step(other)
    assert_same(workload, other)


def test_step_hooks_run_once_a_step_and_not_once_a_parameter():
    workload, step, _ = pair()
    seen: list[str] = []
    workload.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    workload.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        step(workload.batch)
    assert seen == ["before", "after", "before", "after"]


class Derived(torch.optim.AdamW):
    """AdamW by another name."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_hooks_do_not_run_for_each_parameter_where_the_step_calls_that_of_its_base_class():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from the first object on, the step of a class runs hooks
    workload, step, _ = pair(Derived)
    calls: list[str] = []
    workload.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(workload.batch)
    assert calls == ["after"]


def test_hooks_of_every_optimizer_run_once_a_step_around_those_of_one_optimizer():
    seen: dict[str, list[str]] = {}
    for way in ("eager", "planned"):
        workload, step, _ = pair()
        calls = seen[way] = []
        handles = [
            register_optimizer_step_pre_hook(lambda *_, calls=calls: calls.append("before all")),
            register_optimizer_step_post_hook(lambda *_, calls=calls: calls.append("after all")),
            workload.optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before")),
            workload.optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after")),
        ]
        try:
            for _ in range(2):
                step(workload.batch) if way == "planned" else eager_step(workload)
        finally:
            for handle in handles:
                handle.remove()
    assert seen["planned"] == seen["eager"] == ["before all", "before", "after", "after all"] * 2


def test_a_hook_before_the_step_may_change_the_learning_rate_of_that_step():
    workload, step, other = pair()
    for each in (workload, other):
        each.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.7))
    step(workload.batch)
    eager_step(other)
    assert_same(workload, other)


@pytest.mark.parametrize("place", PLACES)
def test_each_gradient_is_seen_once_before_its_update(place: str):
    workload, step, other = pair(place=place, model=mlp)
    seen: dict[str, torch.Tensor] = {}
    before = {name: p.detach().clone() for name, p in workload.model.named_parameters()}

    def look(name: str, gradient: torch.Tensor) -> None:
        assert name not in seen
        assert torch.equal(dict(workload.model.named_parameters())[name], before[name])
        seen[name] = gradient.clone()

    step.on_gradient = look
    step(workload.batch)
    assert worst_difference(seen, eager_step(other)[1]) == 0.0


class Mine(torch.optim.Optimizer):
    """A user's own: sign descent with a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / state["count"])


def test_a_users_own_optimizer_is_run_as_it_is():
    workload, step, other = pair(Mine, model=mlp)
    for _ in range(3):
        step(workload.batch)
        eager_step(other)
    assert_same(workload, other)


class ByName(Mine):
    """Moves biases twice as far, as it knows the parameters by their names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=False):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * (2 if name.endswith("bias") else 1))


def by_name(parameters: Any) -> torch.optim.Optimizer:
    return ByName([(f"{number}.{'bias' if p.ndim == 1 else 'weight'}", p) for number, p in enumerate(parameters)])


def test_each_parameter_has_its_name_where_it_is_updated_alone_or_with_others():
    workload, step, other = pair(by_name)
    updates = step._selector.first.updates
    assert not updates.joint_reason
    step(workload.batch)
    gradients = eager_step(other)[1]
    assert_same(workload, other)
    named = list(workload.model.named_parameters())
    updates.update_together([(name, p, gradients[name], False) for name, p in reversed(named)])
    for name, parameter in other.model.named_parameters():
        parameter.grad = gradients[name]
    other.optimizer.step()
    assert_same(workload, other)


class Counting(torch.optim.SGD):
    """Counts its steps where the parameters' state is not."""

    def __init__(self, parameters: Any, *, in_group: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.in_group, self.taken = in_group, 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if self.in_group:
                group["taken"] = group.get("taken", 0) + 1
        self.taken += not self.in_group
        super().step()


@pytest.mark.parametrize("in_group", [True, False])
def test_an_optimizer_that_counts_for_all_parameters_at_once_counts_each_step_once(in_group: bool):
    workload, step, other = pair(partial(Counting, in_group=in_group))
    for _ in range(3):
        step(workload.batch)
        eager_step(other)
    assert_same(workload, other)
    held = workload.optimizer.param_groups[0] if in_group else vars(workload.optimizer)
    assert held["taken"] == 3


def test_gradients_kept_for_the_user_are_whole_tensors_of_their_own():
    workload = make(normalized, (2, 3, 8, 8))
    seen: list[bool] = []

    def look() -> None:
        grads = [p.grad for p in workload.model.parameters()]
        seen.extend(0 not in grad.stride() and grad._base is None for grad in grads)
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)

    plan = Plan.traced(capture(workload).graph)
    TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, before_update=look)(
        workload.batch
    )
    assert seen
    assert all(seen)


class TwoOfOneGradient(nn.Module):
    """Both have one and the same gradient, which the layer before them reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.one, self.two = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.ones(6, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs) + self.one + self.two


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parameters_of_one_gradient_keep_one_each_to_add_to_and_to_clip(accumulate: int):
    workload, other = make(TwoOfOneGradient), make(TwoOfOneGradient)

    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    step = TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch,
        accumulate=accumulate, before_update=lambda: clip(workload.model),
    )  # fmt: skip
    for _ in range(2):
        for _ in range(accumulate):
            step(workload.batch)
            other.loss_fn(other.model, other.batch).backward()
        clip(other.model)
        other.optimizer.step()
        other.optimizer.zero_grad()
    assert_same(workload, other)


class WritesItsGradients(torch.optim.SGD):
    """Decays as optimizers of old do: in the gradient itself."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter, alpha=0.1)
                        parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_that_writes_into_gradients_changes_no_other_parameters(place: str):
    workload, step, other = pair(lambda p: WritesItsGradients(p, lr=0.1), place, TwoOfOneGradient)
    for _ in range(3):
        step(workload.batch)
        eager_step(other)
    assert_same(workload, other)


class Einsum(nn.Module):
    """Its weight's gradient is a transposed view, which `backward` copies into the weight's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oi->bo", inputs, self.weight)


@pytest.mark.parametrize("place", PLACES)
def test_a_fused_update_gets_its_gradient_in_the_layout_of_the_parameter(place: str):
    workload, step, other = pair(OPTIMIZERS["fused"], place, Einsum)
    for _ in range(3):
        step(workload.batch)
        eager_step(other)
    assert_same(workload, other)


def test_several_updates_at_once_get_their_gradients_in_the_layout_of_the_parameters():
    program, other = capture(make(Einsum, optimizer=OPTIMIZERS["fused"])), make(Einsum, optimizer=OPTIMIZERS["fused"])
    (weight,) = (parameter for parameter in program.tensors.values() if isinstance(parameter, nn.Parameter))
    gradient = torch.randn(8, 4).t()
    program.updates.update_together([("weight", weight, gradient, False)])
    other.model.weight.grad = gradient.contiguous()
    other.optimizer.step()
    assert torch.equal(weight, other.model.weight)


def test_the_copy_of_a_gradient_into_its_parameters_layout_is_scratch_of_the_update():
    program = capture(make(Einsum, optimizer=OPTIMIZERS["sgd"]))
    (update,) = [op for op in program.graph.ops if op.name == "weight.update"]
    assert profile(program).scratch_bytes[update.id] >= 4 * 8 * 4


class Ruled(Mine):
    def __init__(self, params: Any, rule: Any) -> None:
        super().__init__(params)
        self.defaults["rule"] = rule


def test_a_function_among_an_optimizers_settings_leaves_the_digest_as_it_is_in_another_process():
    rules = [FunctionType(last_layer.__code__, globals(), "rule") for _ in range(2)]  # as two processes load it
    digests = {capture(make(mlp, optimizer=partial(Ruled, rule=rule))).graph.digest for rule in rules}
    assert len(digests) == 1
    assert len({argument_text(View(rule, ()), []) for rule in rules}) == 1
