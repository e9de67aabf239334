"""What a training loop is promised: the step that it would have run itself, whatever is asked of it."""

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError, PlanError, StoreError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan, early_updates
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.device import Device
from autotune.records.plan_file import PlanFile
from autotune.records.speed_environment import read_speed_environment
from autotune.runtime import recapture
from autotune.runtime.arena import StepArena
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.prepared_step import warn_of_environment
from autotune.runtime.stores import SwapStore, open_store, probe
from autotune.runtime.train_step import TrainStep
from autotune.units import fmt_bytes
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import batch_of, labelled_loss, make, mlp, normalized, sgd

SMALLEST: Settings = {
    "update": {"planner": "with_gradient"},
    "recompute": {"planner": "segments", "count": 3},
    "offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0},
}
OFFLOAD: Settings = {**SMALLEST, "recompute": {"planner": "keep"}}
RECOMPUTE: Settings = {"update": {"planner": "with_gradient"}, "recompute": {"planner": "segments", "count": 3}}
IMAGES = (2, 3, 8, 8)


_GRAPHS: dict[tuple[Any, ...], TrainGraph] = {}
_PLAN_FILES: dict[tuple[Any, ...], PlanFile] = {}


def _describe(workload: Workload) -> tuple[Any, ...]:
    """Return what twins have in common."""
    model, optimizer = workload.model, workload.optimizer
    leaves = pytree.tree_leaves(workload.batch)
    description = (
        str(model), [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in model.parameters()],
        [module.training for module in model.modules()], str(optimizer),
        [(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
    )  # fmt: skip
    return type(model), workload.loss_fn, str(description)


def graph_of(workload: Workload) -> TrainGraph:
    """Return the captured graph; twins share one."""
    key = _describe(workload)
    if key not in _GRAPHS:
        _GRAPHS[key] = capture(workload).graph
    return _GRAPHS[key]


def plan_file(workload: Workload, settings: Settings = RECOMPUTE) -> PlanFile:
    """A plan as tune hands it back; twins share one, which a step of another graph would refuse."""
    key = (*_describe(workload), str(settings))
    if key not in _PLAN_FILES:
        _PLAN_FILES[key] = _make_plan_file(workload, settings)
    return _PLAN_FILES[key]


def _make_plan_file(workload: Workload, settings: Settings) -> PlanFile:
    graph = graph_of(workload)
    costs = Costs.unit(graph)
    costs = Costs(costs.seconds, costs.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    plan = make_plan(graph, settings, 0, costs)
    return PlanFile(
        workload=WorkloadRef("tests.support.small:make", {"batch": 2}),
        graph_digest=graph.digest,
        budget="50%",
        budget_bytes=graph.static_bytes,
        floor_bytes=0,
        settings=settings,
        plan=plan,
        estimate=simulate(graph, lower(graph, plan), costs),
    )


def step_for(workload: Workload, plan: Any = None, **options: Any) -> TrainStep:
    return TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, **options)


def pair(**options: Any) -> tuple[Workload, Workload]:
    return make(normalized, IMAGES, **options), make(normalized, IMAGES, **options)


# The docstring.


def test_the_docstring_explains_every_parameter():
    arguments = (inspect.getdoc(TrainStep) or "").partition("Args:")[2].partition("Raises:")[0]
    names = re.findall(r"^    (\w+): ", arguments, re.MULTILINE)
    assert names == [*inspect.signature(TrainStep).parameters]


# The plain contract.


@pytest.mark.parametrize("kind", ["traced", "path", "plan"])  # most other tests have a file
def test_a_plan_may_be_none_a_file_a_path_or_a_plan(kind: str, tmp_path: Path):
    workload, other = pair()
    file = plan_file(workload)
    planfile.write(tmp_path / "plan.json", file)
    plan = {"traced": None, "path": str(tmp_path / "plan.json"), "plan": file.plan}[kind]
    step = step_for(workload, plan)
    assert step.plan == (Plan.traced(step.graph) if plan is None else file.plan)
    for seed in range(4):  # the arena passes, records, then replays
        batch = other.batch = batch_of(*IMAGES, seed=seed)
        assert torch.equal(step(batch), eager_step(other)[0])
        assert all(parameter.grad is None for parameter in workload.model.parameters())
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_between_steps_the_users_own_objects_hold_the_training():
    workload, other = pair()
    step = step_for(workload, plan_file(workload))
    ids = {name: id(tensor) for name, tensor in (*workload.model.named_parameters(), *workload.model.named_buffers())}
    for _ in range(3):
        step(workload.batch)
        eager_step(other)
        saved, expected = workload.model.state_dict(), other.model.state_dict()
        assert worst_difference(dict(saved), dict(expected)) == 0.0
        ours, theirs = workload.optimizer.state_dict(), other.optimizer.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert str(sorted(ours["state"].items())) == str(sorted(theirs["state"].items()))
    now = {name: id(tensor) for name, tensor in (*workload.model.named_parameters(), *workload.model.named_buffers())}
    assert now == ids


def test_a_checkpoint_loaded_between_steps_is_trained_on():
    workload, other = pair()
    step = step_for(workload, plan_file(workload))
    saved = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
    for each, run in ((workload, lambda: step(workload.batch)), (other, lambda: eager_step(other))):
        run()
        each.model.load_state_dict(saved)
        run()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def loss_and_extras(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    inputs, labels = batch
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels)
    return loss, {"logits": logits, "parts": [loss * 2, logits.argmax(1)], "name": "extras", "count": 3}


def test_extras_come_back_detached_in_their_structure():
    workload, other = (make(mlp, loss_fn=loss_and_extras) for _ in range(2))
    loss, extras = step_for(workload)(workload.batch)
    expected, more = loss_and_extras(other.model, other.batch)
    assert torch.equal(loss, expected)
    assert extras.keys() == more.keys()
    assert torch.equal(extras["logits"], more["logits"])
    assert [torch.equal(a, b) for a, b in zip(extras["parts"], more["parts"], strict=True)] == [True, True]
    assert (extras["name"], extras["count"]) == ("extras", 3)
    assert not any(part.requires_grad for part in (loss, extras["logits"], *extras["parts"]))


def test_results_of_a_step_stay_as_they_are_in_later_steps():
    workload = make(mlp, loss_fn=loss_and_extras)
    step = step_for(workload, Plan(plan_file(workload).plan.order, allocator="arena"))
    kept = [step(batch_of(6, 8, seed=seed)) for seed in range(5)]
    copies = [(loss.clone(), extras["logits"].clone()) for loss, extras in kept]
    step(workload.batch)
    assert all(torch.equal(k[0], s[0]) and torch.equal(k[1]["logits"], s[1]) for k, s in zip(kept, copies, strict=True))
    assert len({loss.item() for loss, _ in kept}) == len(kept)


def test_evaluation_between_steps_changes_no_step():
    workload, other = pair()
    step = step_for(workload, plan_file(workload))
    for _ in range(4):
        assert torch.equal(step(workload.batch), eager_step(other)[0])
        workload.model.eval()
        with torch.no_grad():
            workload.model(torch.randn(5, 3, 8, 8))
        workload.model.train()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_a_model_put_into_eval_mode_is_captured_again_and_says_so_once():
    workload, other = pair()
    step = step_for(workload)
    workload.model.eval()
    other.model.eval()
    with pytest.warns(UserWarning, match="the model in another mode"):
        loss = step(workload.batch)
    assert torch.equal(loss, eager_step(other)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_a_layer_unfrozen_between_steps_is_trained_from_then_on():
    workload, other = make(mlp), make(mlp)
    for each in (workload, other):
        each.model[0].requires_grad_(False)
    step = step_for(workload)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(workload.batch)
        eager_step(other)
        for each in (workload, other):
            each.model[0].requires_grad_(True)
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_inference_gives_what_the_model_gives_without_gradients():
    model = mlp().eval()
    inputs = batch_of(6, 8)[0]
    for other_shapes in ("replan", "eager"):
        step = TrainStep(model, None, None, inputs, other_shapes=other_shapes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in (inputs, inputs * 2, torch.randn(3, 8)):
                output = step(batch)
                assert torch.equal(output, model(batch))
                assert not output.requires_grad


class Fails(nn.Module):
    """Raises in its forward when told to, on a real tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def test_after_an_exception_in_the_step_the_next_one_is_right(tmp_path: Path):
    workload, other = (make(Fails, (6,)) for _ in range(2))
    for each in (workload, other):
        each.batch = (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3]))
    with step_for(workload, plan_file(workload, OFFLOAD), stores={"ssd": tmp_path}) as step:
        for _ in range(4):
            with pytest.raises(IndexError):
                step((torch.tensor([0, 1, 2, 99]), workload.batch[1]))
            assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


# All gradients at once.


def test_every_so_many_steps_make_one_update_and_an_uneven_end_waits():
    accumulate = 3
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, plan_file(workload), accumulate=accumulate)
    for number in range(4):  # the fourth begins a new sum
        batch = batch_of(6, 8, seed=number)
        loss = labelled_loss(other.model, batch)
        loss.backward()
        assert torch.equal(step(batch), loss)
        if (number + 1) % accumulate == 0:
            other.optimizer.step()
            other.optimizer.zero_grad()
        waiting = {n: p.grad for n, p in workload.model.named_parameters() if p.grad is not None}
        expected = {n: p.grad for n, p in other.model.named_parameters() if p.grad is not None}
        assert worst_difference(waiting, expected) == 0.0
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_clipping_before_the_update_sees_every_gradient():
    workload, other = make(mlp), make(mlp)
    norms = []

    def clip() -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(workload.model.parameters(), 0.1))

    step = step_for(workload, plan_file(workload), before_update=clip)
    for _ in range(3):
        step(workload.batch)
        labelled_loss(other.model, other.batch).backward()
        expected = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
        other.optimizer.step()
        other.optimizer.zero_grad()
        assert torch.equal(norms[-1], expected)
        assert all(parameter.grad is None for parameter in workload.model.parameters())
    assert len(norms) == 3
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_updates_beside_their_gradients_are_vetoed_once_with_the_reason_and_the_price(recwarn: Any):
    workload = make(mlp)
    file = plan_file(workload)
    step = step_for(workload, file, before_update=lambda: None, accumulate=2)
    for batch in (workload.batch, batch_of(1, 8)):
        step(batch)
    (message,) = [str(warning.message) for warning in recwarn if "all gradients" in str(warning.message)]
    graph, parameters = graph_of(workload), dict(workload.model.named_parameters())
    early = [graph.ops[op].name.removesuffix(".update") for op in early_updates(graph, file.plan.order)]
    total = sum(parameters[name].nbytes for name in early)
    assert message.startswith(
        f"accumulate and before_update: all gradients are needed at once, so {len(early)} updates "
    )
    assert f"{fmt_bytes(total)} of gradients with them" in message
    assert message.endswith("; tune with --loop clip,accumulate=2 to plan for that")


def test_updates_at_the_end_anyway_are_no_news(recwarn: Any):
    workload = make(mlp)
    for plan in (None, plan_file(workload, {"update": {"planner": "at_end"}})):
        step_for(workload, plan, before_update=lambda: None)(workload.batch)
    assert not list(recwarn)


def test_a_batch_planned_anew_for_clipping_is_planned_for_the_loop_with_the_plans_settings(monkeypatch: Any):
    planned: list[tuple[str, Settings]] = []

    def spy(graph: Any, settings: Settings, *rest: Any) -> Plan:
        planned.append((graph.ops[-1].target, settings))
        return make_plan(graph, settings, *rest)

    monkeypatch.setattr("autotune.runtime.prepared_step.make_plan", spy)
    workload = make(mlp)
    step = step_for(workload, plan_file(workload), before_update=lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(batch_of(1, 8))
    assert planned == [("loop.clip", RECOMPUTE)]


def test_clipping_in_a_hook_of_the_optimizer_sees_every_gradient():
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, plan_file(workload))
    for each in (workload, other):
        parameters = list(each.model.parameters())

        def clip(*_: Any, parameters: list[nn.Parameter] = parameters) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

        each.optimizer.register_step_pre_hook(clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def scaled_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels, factor = batch
    return F.cross_entropy(model(inputs), labels) * factor


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scaler_skips_the_update_of_an_infinite_gradient_and_goes_on(accumulate: int):
    workload, other = (make(mlp, loss_fn=scaled_loss) for _ in range(2))
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    workload.batch = (*workload.batch, torch.tensor(1.0))
    step = step_for(workload, plan_file(workload), scaler=ours, accumulate=accumulate)
    for number, factor in enumerate((1.0, 1.0, float("inf"), 1.0, 1.0, 1.0)):
        batch = (*batch_of(6, 8, seed=number), torch.tensor(factor))
        before = workload.model[0].weight.detach().clone()
        step(batch)
        theirs.scale(scaled_loss(other.model, batch)).backward()
        if (number + 1) % accumulate == 0:
            theirs.unscale_(other.optimizer)
            theirs.step(other.optimizer)
            theirs.update()
            other.optimizer.zero_grad()
        if factor == float("inf"):
            assert torch.equal(workload.model[0].weight, before)
    assert ours.get_scale() == theirs.get_scale() != 1024.0
    assert worst_difference(dict(workload.model.named_parameters()), dict(other.model.named_parameters())) == 0.0


@pytest.mark.parametrize(
    ("fails", "how", "scales", "accumulate"),
    [
        ("gradient", "planned", False, 1),
        ("gradient", "planned", False, 2),
        ("update", "planned", False, 1),
        ("update", "planned", True, 2),
        ("update", "eager", True, 2),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_fails_leaves_no_gradient_and_a_sum_begins_anew(
    fails: str, how: str, scales: bool, accumulate: int
):
    workload, other = make(mlp), make(mlp)
    broken, names = [""], list[str]()

    def refuse(where: str) -> None:
        if broken[0] == where:
            raise KeyError(where)

    def on_gradient(name: str, gradient: Tensor) -> None:
        names.append(name)
        if len(names) % 4 == 3:  # of four; two are kept by then
            refuse("gradient")

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scales else None
    options: dict[str, Any] = {"scaler": scaler, "accumulate": accumulate, "other_shapes": "eager"}
    step = step_for(workload, plan_file(workload), before_update=lambda: refuse("update"), **options)
    step.on_gradient = on_gradient
    batches = [batch_of(6 if how == "planned" else 5, 8, seed=seed) for seed in range(3 * accumulate)]
    for number, batch in enumerate(batches):
        broken[0] = fails if number == accumulate - 1 else ""
        if broken[0]:
            with pytest.raises(KeyError, match=fails):
                step(batch)
            assert all(parameter.grad is None for parameter in workload.model.parameters())
        else:
            step(batch)
    for number, batch in enumerate(batches[accumulate:], 1):
        labelled_loss(other.model, batch).backward()
        if number % accumulate == 0:
            other.optimizer.step()
            other.optimizer.zero_grad()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_gradients_that_the_loop_clears_before_their_update_are_told_once_and_an_update_of_its_own_is_none(
    recwarn: Any,
):
    workload = make(mlp)
    step = step_for(workload, accumulate=3)
    for clears_only in (False, True, True):
        step(workload.batch)
        if not clears_only:
            workload.optimizer.step()
        workload.optimizer.zero_grad()
    step(workload.batch)
    (message,) = [str(warning.message) for warning in recwarn if "zero_grad" in str(warning.message)]
    assert message.startswith("the gradients of 1 of 3 steps were cleared before their update")


def test_a_call_that_is_refused_starts_a_sum_anew():
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, accumulate=2, other_shapes="error")
    step(workload.batch)
    with pytest.raises(PlanError):
        step(batch_of(1, 8))
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    for _ in range(2):
        step(workload.batch)
        labelled_loss(other.model, other.batch).backward()
    other.optimizer.step()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


@pytest.mark.parametrize(("size", "accumulate"), [(6, 2), (5, 1)], ids=["planned", "eager"])
@pytest.mark.filterwarnings("ignore:a batch of")
def test_gradients_from_before_a_step_are_discarded_with_one_warning(size: int, accumulate: int):
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, other_shapes="eager", accumulate=accumulate)
    batch = batch_of(size, 8)
    labelled_loss(workload.model, batch).backward()
    with pytest.warns(UserWarning, match=r"4 parameters had gradients before the step, .*zero_grad\(\) does"):
        step(batch)
    for _ in range(accumulate - 1):
        step(batch)
    for _ in range(accumulate):
        labelled_loss(other.model, batch).backward()
    other.optimizer.step()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    labelled_loss(workload.model, batch).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)


def test_gradients_of_zero_are_discarded_without_a_warning():
    workload = make(mlp)
    step = step_for(workload)
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(workload.batch)


# Batches of another shape.


@pytest.fixture
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure stores with few bytes and once."""
    monkeypatch.setattr(probe, "measure_speed", partial(probe.measure_speed, nbytes=2**22, repeats=1))
    monkeypatch.setattr(probe, "measure_contention", partial(probe.measure_contention, seconds=1e-3, repeats=2))


@pytest.mark.parametrize("other_shapes", ["replan", "eager"])
@pytest.mark.usefixtures("short_probe")
def test_an_epochs_last_batch_is_right_and_warned_of_once(other_shapes: Any, tmp_path: Path, recwarn: Any):
    workload, other = pair()
    file = plan_file(workload, SMALLEST)
    again = "is planned again with the same settings, once, which takes seconds"
    how = "runs in plain eager" if other_shapes == "eager" else again
    advice = ". So is each further shape: prepare() plans shapes before training, and buckets pads to a few"
    with step_for(workload, file, stores={"ssd": tmp_path}, other_shapes=other_shapes) as step:
        for shape in (IMAGES, (1, 3, 8, 8), IMAGES, (3, 3, 8, 8), (1, 3, 8, 8)):
            batch = other.batch = batch_of(*shape)
            assert torch.equal(step(batch), eager_step(other)[0])
    (warning,) = [warned for warned in recwarn if warned.category is UserWarning]
    assert (
        str(warning.message)
        == f"a batch of 1x3x8x8, 1 (batch[0] is 1x3x8x8, not 2x3x8x8; batch[1] is 1, not 2) {how}; the plan is for a batch of 2x3x8x8, 2"
        + (advice if how == again else "")
    )
    assert warning.filename == __file__
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:a batch of")
@pytest.mark.usefixtures("short_probe")
def test_a_plan_for_another_shape_draws_no_number_of_the_loops(tmp_path: Path):
    workload, _ = pair()
    with step_for(workload, plan_file(workload, SMALLEST), stores={"ssd": tmp_path}) as step:
        step(workload.batch)
        before = torch.get_rng_state()
        step(batch_of(1, 3, 8, 8))
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:a batch of")
def test_a_plan_for_another_shape_is_made_without_a_profile_while_the_loop_takes_one():
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, plan_file(workload, RECOMPUTE))
    other.batch = batch_of(3, 8)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        pytest.warns(UserWarning, match=r"torch\.profiler, which measures bytes, is in use around the step"),
    ):
        assert torch.equal(step(other.batch), eager_step(other)[0])
    assert any("addmm" in event.key for event in profile.key_averages())
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_the_plan_of_another_shape_aims_where_the_files_plan_aimed(monkeypatch: pytest.MonkeyPatch):
    workload = make(mlp)
    file = replace(plan_file(workload), target_bytes=123)
    aims: list[int] = []

    def record(graph: Any, settings: Settings, budget_bytes: int, costs: Costs) -> Plan:
        aims.append(budget_bytes)
        return make_plan(graph, settings, budget_bytes, costs)

    monkeypatch.setattr("autotune.runtime.prepared_step.make_plan", record)
    with pytest.warns(UserWarning, match="planned again"), step_for(workload, file, other_shapes="replan") as step:
        step(batch_of(1, 8))
    assert aims == [123]


@pytest.fixture
def free_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose own buffers take nothing, so that even small steps offload when they are planned anew."""

    def costed(costs: Costs, *_: Any) -> Costs:
        return replace(costs, stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})

    monkeypatch.setattr("autotune.runtime.prepared_step.measure_stores", costed)


@pytest.mark.parametrize("other_shapes", ["replan", "eager"])
@pytest.mark.usefixtures("free_store")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shapes_that_take_turns_hold_one_store_and_one_arena_and_while_another_is_made_none(
    other_shapes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    open_resources: set[int] = set()
    arena_step, arena_release = StepArena.step, StepArena.release

    def opened(*arguments: Any) -> SwapStore:
        store = open_store(*arguments)
        close = store.close
        monkeypatch.setattr(store, "close", lambda: (open_resources.discard(id(store)), close()))
        open_resources.add(id(store))
        return store

    @contextmanager
    def stepping(arena: StepArena, **options: Any) -> Iterator[None]:
        with arena_step(arena, **options):
            yield
        open_resources.add(id(arena))

    def releasing(arena: StepArena) -> None:
        open_resources.discard(id(arena))
        arena_release(arena)

    monkeypatch.setattr("autotune.runtime.prepared_step.open_store", opened)
    monkeypatch.setattr(StepArena, "step", stepping)
    monkeypatch.setattr(StepArena, "release", releasing)

    def alone(function: Any) -> Any:  # as the step is captured, and in eager steps
        def call(*arguments: Any, **named: Any) -> Any:
            assert not open_resources
            return function(*arguments, **named)

        return call

    monkeypatch.setattr("autotune.runtime.step_selector.capture", alone(capture))
    monkeypatch.setattr(TrainStep, "_run_eager", alone(TrainStep._run_eager))
    workload, other = pair()
    file = plan_file(workload, {**OFFLOAD, "allocator": {"planner": "arena"}})
    with step_for(workload, file, stores={"ssd": tmp_path}, other_shapes=other_shapes) as step:
        for images in (2, 2, 1, 2, 3, 1, 1, 2):
            batch = other.batch = batch_of(images, *IMAGES[1:])
            assert torch.equal(step(batch), eager_step(other)[0])
            assert len(open_resources) == (0 if other_shapes == "eager" and images != 2 else 2)
    assert not open_resources
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_after_a_shape_that_cannot_be_captured_the_one_before_it_trains_on(tmp_path: Path):
    def picky(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 3:
            raise ZeroDivisionError("three is a crowd")
        return labelled_loss(model, batch)

    workload, other = pair(loss_fn=picky)
    with step_for(workload, plan_file(workload, OFFLOAD), stores={"ssd": tmp_path}) as step:
        assert torch.equal(step(workload.batch), eager_step(other)[0])
        with pytest.raises(CaptureError, match="three is a crowd"):
            step(batch_of(3, 3, 8, 8))
        assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_in_plain_eager_shows_each_gradient_of_its_own_and_nothing_that_a_store_did(tmp_path: Path):
    workload, other = pair()
    gradients: dict[str, Tensor] = {}
    options: dict[str, Any] = {"other_shapes": "eager", "accumulate": 2}
    with step_for(workload, plan_file(workload, OFFLOAD), stores={"ssd": tmp_path}, **options) as step:
        step.on_gradient = lambda name, gradient: gradients.update({name: gradient.clone()})
        for images in (2, 1, 1, 2):
            gradients.clear()
            batch = batch_of(images, *IMAGES[1:])
            step(batch)
            parameters = dict(other.model.named_parameters())
            expected = torch.autograd.grad(labelled_loss(other.model, batch), [*parameters.values()])
            assert worst_difference(gradients, dict(zip(parameters, expected, strict=True))) == 0.0
            assert (step.transfer_bytes > 0) is (images == 2)
            assert bool(step.transfer_trace.saves) is (images == 2)
            for parameter, planned in zip(parameters.values(), workload.model.parameters(), strict=True):
                parameter.data.copy_(planned.data)
        assert not any(parameter._backward_hooks for parameter in workload.model.parameters())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_a_parameters_hook_puts_into_eager_says_so():
    workload = make(mlp)
    with step_for(workload, other_shapes="eager") as step:
        step(workload.batch)
        assert not step.is_eager
        hook = next(workload.model.parameters()).register_hook(lambda gradient: gradient)
        step(workload.batch)
        assert step.is_eager
        hook.remove()
        step(workload.batch)
        assert not step.is_eager


@pytest.mark.usefixtures("free_store")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_after_close_is_refused_in_every_shape_that_offloads(tmp_path: Path):
    workload, _ = pair()
    step = step_for(workload, plan_file(workload, OFFLOAD), stores={"ssd": tmp_path})
    batches = [workload.batch, batch_of(1, 3, 8, 8)]
    for batch in batches:
        step(batch)
    step.close()
    for batch in batches:
        with pytest.raises(StoreError, match="ssd store is closed"):
            step(batch)


def test_another_shape_can_be_an_error_that_names_both():
    workload = make(mlp)
    step = step_for(workload, other_shapes="error")
    with pytest.raises(PlanError) as caught:
        step(batch_of(1, 8))
    assert str(caught.value) == (
        "this step was made for a batch of 6x8, 6; this is a batch of 1x8, 1 "
        "(batch[0] is 1x8, not 6x8; batch[1] is 1, not 6). "
        "Pass other_shapes='replan' or make a TrainStep for it"
    )


def test_a_loss_without_an_optimizer_has_no_gradients_in_any_shape():
    workload = make(mlp)
    step = TrainStep(workload.model, labelled_loss, None, workload.batch, other_shapes="eager")
    other = batch_of(1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(step(other), labelled_loss(workload.model, other))
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_a_loss_without_an_optimizer_is_the_same_step_with_and_without_gradients_around_it(recwarn: Any):
    workload = make(mlp)
    step = TrainStep(workload.model, labelled_loss, None, workload.batch, other_shapes="error")
    expected = labelled_loss(workload.model, workload.batch)
    with torch.no_grad():
        assert torch.equal(step(workload.batch), expected)
    assert torch.equal(step(workload.batch), expected)
    assert not recwarn.list


def test_buffers_that_a_cast_there_and_back_replaced_are_the_ones_that_move():
    workload, other = pair()
    step = step_for(workload)
    for each, run in ((workload, lambda: step(workload.batch)), (other, lambda: eager_step(other))):
        run()
        each.model.double().float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_a_plan_that_offloads_gradients_and_places_updates_serves_a_loop_that_clips(tmp_path: Path):
    for update in ("at_end", "with_gradient"):
        workload, other = pair()
        file = plan_file(workload, {**SMALLEST, "update": {"planner": update}})
        values = graph_of(workload).values
        gradients = [swap for swap in file.plan.offload if values[swap.value].role is Role.GRAD]
        assert bool(gradients) is (update == "at_end")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = step_for(workload, file, stores={"ssd": tmp_path}, before_update=lambda: None)
        with step:
            for _ in range(2):
                assert torch.equal(step(workload.batch), eager_step(other)[0])
        assert worst_difference(tensors(workload), tensors(other)) == 0.0


# Bad input.


def test_autocast_around_the_step_is_refused():
    workload = make(mlp)
    step = step_for(workload)
    with torch.autocast("cpu", torch.bfloat16):
        for call in (lambda: step(workload.batch), lambda: step_for(workload)):
            with pytest.raises(ConfigError, match="enter it in the loss function"):
                call()


def test_an_exception_in_the_loss_is_told_with_its_line_and_leaves_nothing_behind(tmp_path: Path):
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("no tokens in this batch")

    workload, _ = pair()
    file = plan_file(workload, SMALLEST)
    with pytest.raises(CaptureError, match=r"ZeroDivisionError\('no tokens.*test_train_step\.py:\d+ \(raise"):
        TrainStep(workload.model, broken, workload.optimizer, workload.batch, file, stores={"ssd": tmp_path})
    assert not list(tmp_path.iterdir())
    with step_for(workload, file, stores={"ssd": tmp_path}) as step:
        assert step(workload.batch).isfinite()


def test_a_plan_of_another_graph_is_refused_with_both_named():
    workload = make(lambda: mlp(dropout=0.5))
    file = plan_file(make(mlp))
    with pytest.raises(PlanError) as caught:
        step_for(workload, file)
    message = str(caught.value)
    assert "\n" not in message
    assert "the plan is for tests.support.small:make(batch=2)" in message
    assert file.graph_digest[:8] in message
    assert graph_of(workload).digest[:8] in message


def test_threads_unlike_the_plans_are_warned_of_once_by_name_and_value(recwarn: Any, monkeypatch: Any):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    workload = make(mlp)
    present = read_speed_environment(torch.get_num_threads(), torch.get_num_interop_threads())
    recorded = {**present, "OMP_WAIT_POLICY": "PASSIVE", "torch threads": "64"}
    device = Device("cpu", "Fake 9000", 2**34, 2, "2.13.0", environment=recorded)
    with step_for(workload, replace(plan_file(workload), device=device)) as step:
        for _ in range(2):
            step(workload.batch)
    (warning,) = [str(caught.message) for caught in recwarn if "settings of threads" in str(caught.message)]
    assert "OMP_WAIT_POLICY: recorded PASSIVE, now ACTIVE" in warning
    assert f"torch threads: recorded 64, now {torch.get_num_threads()}" in warning
    assert "CPU affinity" not in warning


def test_a_plan_with_threads_sets_them_for_every_shape_and_no_other_number_is_warned_of(recwarn: Any):
    workload, other = pair()
    own, file = torch.get_num_threads(), plan_file(workload)
    present = read_speed_environment(own, torch.get_num_interop_threads())
    device = Device("cpu", "Fake 9000", 2**34, 2, "2.13.0", environment={**present, "torch threads": "64"})
    file = replace(file, device=device, plan=replace(file.plan, threads=own + 1))
    seen: set[int] = set()
    with step_for(workload, file) as step:
        step.on_gradient = lambda *_: seen.add(torch.get_num_threads())
        for images in (workload.batch[0], workload.batch[0][:1]):
            batch = (images, *(part[: len(images)] for part in workload.batch[1:]))
            torch.testing.assert_close(step(batch), eager_step(replace(other, batch=batch))[0])
            assert step.plan.threads == own + 1
    assert (seen, torch.get_num_threads()) == ({own + 1}, own)
    assert not [caught for caught in recwarn if "settings of threads" in str(caught.message)]


# What changes between steps, or cannot be captured.


class Pair(NamedTuple):
    """A loss function's result with names."""

    loss: torch.Tensor
    logits: torch.Tensor


def named_loss(model: torch.nn.Module, batch: Any) -> Pair:
    logits = model(batch[0])
    return Pair(torch.nn.functional.cross_entropy(logits, batch[1]), logits)


def test_a_named_tuple_comes_back_as_one():
    workload, other = (make(mlp, loss_fn=named_loss) for _ in range(2))
    result = step_for(workload)(workload.batch)
    assert type(result) is Pair
    assert torch.equal(result.loss, eager_step(other)[0])
    loss = PlannedLoss(workload.model, named_loss)(workload.batch)
    assert type(loss) is Pair
    loss.loss.backward()


def test_a_loss_function_that_returns_a_dictionary_is_refused():
    def in_dictionary(model: torch.nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).sum()}

    workload = make(mlp, loss_fn=in_dictionary)
    with pytest.raises(CaptureError, match=r"returns a dict.*return the loss, or a tuple"):
        step_for(workload)
    with pytest.raises(CaptureError, match="returns a dict"):
        PlannedLoss(workload.model, in_dictionary)(workload.batch)


def test_a_parameter_among_the_results_is_detached():
    def with_weight(model: torch.nn.Module, batch: Any) -> Any:
        return model(batch[0]).sum(), next(model.parameters())

    workload = make(mlp, loss_fn=with_weight)
    _, weight = step_for(workload)(workload.batch)
    assert not weight.requires_grad
    assert weight.data_ptr() == next(workload.model.parameters()).data_ptr()


def test_weights_that_come_to_share_memory_between_steps_are_refused():
    def wide() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))

    workload = make(wide)
    step = step_for(workload)
    step(workload.batch)
    workload.model[2].weight.data = workload.model[0].weight.data
    with pytest.raises(CaptureError, match=r"0\.weight and 2\.weight are two tensors in the same memory"):
        step(workload.batch)
    workload.model[2].weight.data = workload.model[0].weight.data.clone()
    step(workload.batch)


def test_a_batch_that_shares_memory_with_a_weight_is_refused_later_than_the_first_too():
    workload = make(lambda: torch.nn.Linear(8, 6))
    step = step_for(workload)
    step(workload.batch)
    step((workload.model.weight.detach().clone(), workload.batch[1]))
    with pytest.raises(CaptureError, match="in the same memory"):
        step((workload.model.weight.detach(), workload.batch[1]))
    step(workload.batch)


def test_a_buffer_that_every_step_replaces_is_refused_by_name_after_a_few_captures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recapture, "BATCH_CAPTURES", 2)  # each takes half a second

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs) * self.scale

    workload = make(Scaled)
    kept = []  # no tensor takes the place of another
    step = step_for(workload)
    step(workload.batch)

    def train(steps: int) -> None:
        for _ in range(steps):
            kept.append(workload.model.scale)
            workload.model.scale = workload.model.scale * 0.9
            step(workload.batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(2)
        with pytest.raises(PlanError, match=r"^scale changed to another tensor .*copy_\(\)"):
            train(1)


@pytest.mark.parametrize(
    ("kind", "convert"),
    [
        ("sparse coo", lambda images: images.to_sparse()),
        ("sparse csr", lambda images: images.to_sparse_csr()),
        ("nested", lambda images: torch.nested.nested_tensor(list(images))),
        ("nested", lambda images: torch.nested.nested_tensor(list(images), layout=torch.jagged)),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_name(kind: str, convert: Any):
    workload = make(mlp)
    batch = convert(workload.batch[0]), workload.batch[1]
    with pytest.raises(CaptureError, match=rf"batch\[0\] is a {kind} tensor"):
        step_for(replace(workload, batch=batch))


@pytest.mark.parametrize("environment", ["equal", "of an earlier version", "of a GPU"])
def test_threads_like_the_plans_or_unknown_are_no_news(environment: str, recwarn: Any):
    present = read_speed_environment(torch.get_num_threads(), torch.get_num_interop_threads())
    recorded = {"equal": present, "of an earlier version": {}, "of a GPU": {"torch threads": "64"}}[environment]
    kind = "cuda" if environment == "of a GPU" else "cpu"
    device = Device(kind, "Fake 9000", 2**34, 2, "2.13.0", environment=recorded)
    warn_of_environment(replace(plan_file(make(mlp)), device=device))
    assert not [caught for caught in recwarn if "settings of threads" in str(caught.message)]


def test_a_store_that_was_not_given_is_asked_for_by_its_argument():
    workload, _ = pair()
    with pytest.raises(ConfigError, match=r"offloads to 'ssd'; pass stores=\{'ssd': DIR\}"):
        step_for(workload, plan_file(workload, OFFLOAD))


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("nvme", r"stores names 'nvme'; known: host, ramdisk, ssd\. Write stores=\{'ssd': DIR\}"),
        ("host", r"the store 'host' takes no tensors of device cpu; pass stores=\{'ssd': DIR\}"),
    ],
)
def test_a_store_that_cannot_serve_the_step_is_refused_at_once_also_where_the_plan_does_not_offload(
    store: str, words: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=words):
        step_for(make(mlp), stores={store: tmp_path})


@pytest.mark.parametrize(
    ("options", "words"),
    [({"accumulate": 0}, "accumulate is 0"), ({"other_shapes": "replane"}, "other_shapes is 'replane'; known: replan")],
)
def test_an_option_that_is_no_option_is_refused(options: dict[str, Any], words: str):
    workload, _ = pair()
    with pytest.raises(ConfigError, match=words):
        step_for(workload, **options)


def test_an_unreadable_plan_is_refused_by_its_path(tmp_path: Path):
    workload, _ = pair()
    (tmp_path / "plan.json").write_text('{"schema": 1, "workl')
    with pytest.raises(ConfigError, match=r"plan\.json: not a plan file: truncated"):
        step_for(workload, tmp_path / "plan.json")


def test_closing_leaves_the_model_trainable_and_no_file_behind(tmp_path: Path):
    workload, other = pair(optimizer=sgd)
    step = step_for(workload, plan_file(workload, OFFLOAD), stores={"ssd": tmp_path})
    step(workload.batch)
    assert step.transfer_bytes > 0
    step.close()
    step.close()
    assert not list(tmp_path.iterdir())
    eager_step(workload)
    for _ in range(2):
        eager_step(other)
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_ranges_name_each_op_for_a_profiler_and_change_no_result():
    names: list[str] = []

    @contextmanager
    def record(name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            yield
        names.append(name)

    losses = []
    for ranges in (None, record):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with TrainStep(model, lambda m, b: m(b).square().mean(), optimizer, torch.ones(2, 4), ranges=ranges) as step:
            losses.append([step(torch.ones(2, 4)).item() for _ in range(2)])
    assert losses[0] == losses[1]
    ops = [step.graph.ops[op] for op in step.plan.order]
    assert names == [f"{op.phase} {op.name}{f' [{op.layer}]' if op.layer else ''}" for op in ops] * 2
    assert {name.partition(" ")[0] for name in names} == {"forward", "backward", "update"}


@pytest.mark.filterwarnings("ignore:.*the plan is for a batch of")
def test_of_many_shapes_the_one_not_used_for_longest_is_dropped(monkeypatch):
    monkeypatch.setattr("autotune.runtime.step_cache.MAX_SIGNATURES", 2)
    workload = make(mlp)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    for rows in (2, 3, 2, 4):
        step(batch_of(rows, 8))
    kept = [signature.shapes.partition("x")[0] for signature in step._selector.cache.by_signature]
    assert kept == ["2", "4"]
