"""A planned loss in a loop of the user's: the loop's every bit is that of plain PyTorch."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from autotune.capture.loop_checks import one_capture
from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError, PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph_summary import summarize_graph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.planners.auto import best_plan
from autotune.predict.simulate import simulate
from autotune.records.device import Device
from autotune.records.plan_file import PlanFile
from autotune.runtime.arena.build import library
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.step_cache import StepCache
from autotune.runtime.step_selector import OtherShapes
from autotune.runtime.train_step import TrainStep
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from tests.runtime.test_loop_plans import SMALL

Loss = Callable[[Any], Any]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Loss], Iterator[torch.Tensor]]


class Net(nn.Module):
    """A net whose step draws random numbers and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), {"hits": (logits.argmax(1) == batch[1]).sum()}


def batches(count: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator))
        for _ in range(count)
    ]


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss) -> Iterator[torch.Tensor]:
    for batch in batches():
        loss, extras = loss_of(batch)
        loss.backward()
        yield clip_grad_norm_(model.parameters(), 0.05)
        yield extras["hits"]
        optimizer.step()
        optimizer.zero_grad()


def accumulation_of_three_with_a_remainder(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    for number, batch in enumerate(batches(8)):
        loss, _ = loss_of(batch)
        (loss / 3).backward()
        yield loss.detach()
        if number % 3 == 2 or number == 7:
            optimizer.step()
            optimizer.zero_grad()


def scaling_with_an_overflow(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=3e4, growth_interval=2)
    for number, batch in enumerate(batches()):
        loss, _ = loss_of(batch)
        scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        yield clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield torch.tensor(scaler.get_scale())
        optimizer.zero_grad()


def one_backward_of_two_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    for first, second in zip(batches(), reversed(batches()), strict=True):
        loss = 0.7 * loss_of(first)[0] + loss_of(second)[0]
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()


def hooks_and_a_frozen_layer(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    seen: list[torch.Tensor] = []
    weight = model.body[0].weight
    weight.register_hook(lambda gradient: gradient * 0.5)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for number, batch in enumerate(batches()):
        model.body[4].requires_grad_(number != 3)
        loss_of(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from seen


def evaluation_between_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    for batch in batches(4):
        loss_of(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            yield loss_of(batch)[0]
        model.train()


def autocast_around_the_loss(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    for batch in batches(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = loss_of(batch)
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()


def run(loop: Loop, wrap: Callable[[nn.Module], Loss]) -> list[torch.Tensor]:
    """Return all that a loop yields, and the state it ends in."""
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    yielded = [part.clone() for part in loop(model, optimizer, wrap(model))]
    state = [part for parts in optimizer.state.values() for part in parts.values()]
    return [*yielded, *model.state_dict().values(), *state, torch.get_rng_state()]


def eager(model: nn.Module) -> Loss:
    return lambda batch: loss_fn(model, batch)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan that recomputes, for the net's gradients at half the bytes above its static ones."""
    program = capture(Workload(Net(), loss_fn, None, batches()[0]))
    graph, costs = program.graph, profile(program)
    traced = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    plan = best_plan(graph, costs, graph.static_bytes + (traced - graph.static_bytes) // 2).plan
    assert plan.recomputed
    assert simulate(graph, lower(graph, plan), costs).peak_bytes < traced
    return plan


LOOPS: list[Loop] = [
    clipping, accumulation_of_three_with_a_remainder, scaling_with_an_overflow, one_backward_of_two_losses,
    evaluation_between_steps,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_with_a_planned_loss_ends_in_every_bit_where_plain_pytorch_ends(loop: Loop, plan: Plan):
    wanted, got = run(loop, eager), run(loop, lambda model: PlannedLoss(model, loss_fn, plan))
    assert [tensor.dtype for tensor in wanted] == [tensor.dtype for tensor in got]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("loop", [hooks_and_a_frozen_layer, autocast_around_the_loss], ids=lambda loop: loop.__name__)
@pytest.mark.filterwarnings("ignore:.*the plan is for a batch of")
def test_a_loop_that_needs_more_than_one_capture_ends_where_plain_pytorch_ends(loop: Loop):
    wanted, got = run(loop, eager), run(loop, lambda model: PlannedLoss(model, loss_fn))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_gradients_are_results_of_the_graph_and_no_op_updates():
    model = Net()
    program = capture(Workload(model, loss_fn, None, batches()[0]))
    named = dict(model.named_parameters())
    assert [program.graph.values[value].name for value in program.gradients] == list(named)
    assert not [op for op in program.graph.ops if op.target.startswith(("update", "step"))]
    parameters = sum(parameter.nbytes for parameter in named.values())
    assert sum(program.graph.values[value].nbytes for value in program.graph.outputs) >= parameters


def test_accumulated_gradients_leave_the_arena_its_layout(plan: Plan):
    model = Net()
    planned = PlannedLoss(model, loss_fn, replace(plan, allocator="arena"))
    for batch in batches(6):
        planned(batch)[0].backward()  # never cleared: `.grad` grows by each
    ((selector, *_),) = planned._selectors.values()
    arena = selector.last.arena
    assert arena is not None
    assert arena.works == (library() is not None)
    if arena.works:
        assert arena.bytes > 0
        assert arena.misses == 0


@cache
def plan_in_channels_last() -> Plan:
    images, labels = batches()[0]
    batch = images.contiguous(memory_format=torch.channels_last), labels
    converted = Workload(Net().to(memory_format=torch.channels_last), loss_fn, None, batch)
    return replace(Plan.traced(capture(converted).graph), memory_format="channels_last")


def test_a_plan_in_channels_last_converts_model_and_batch():
    def in_format(model: nn.Module) -> Loss:
        model.to(memory_format=torch.channels_last)
        return lambda batch: loss_fn(model, (batch[0].contiguous(memory_format=torch.channels_last), batch[1]))

    plan = plan_in_channels_last()
    wanted, got = run(clipping, in_format), run(clipping, lambda model: PlannedLoss(model, loss_fn, plan))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_a_loss_that_a_forked_process_calls_first_belongs_to_that_process(monkeypatch: pytest.MonkeyPatch):
    planned = PlannedLoss(Net(), loss_fn)
    monkeypatch.setattr(StepCache, "offloads", True)
    monkeypatch.setattr(os, "getpid", lambda: 2)
    planned.prepare(batches()[0])
    planned.prepare(batches()[1])
    monkeypatch.setattr(os, "getpid", lambda: 3)
    with pytest.raises(
        ConfigError, match=r"in process 2 and is called in 3, .*; create the PlannedLoss in the process"
    ):
        planned.prepare(batches()[0])


@pytest.mark.parametrize("how", ["itself", "copied"])
def test_a_contiguous_state_that_is_loaded_beside_a_plan_in_channels_last_updates_its_own_elements(how: str):
    net = Net()
    earlier = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for each in batches():
        loss_fn(net, each)[0].backward()
        earlier.step()
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    other = deepcopy(net)
    if how == "copied":
        other = deepcopy(PlannedLoss(other, loss_fn, plan_in_channels_last())).model
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (net, other)]
    if how == "itself":
        PlannedLoss(other, loss_fn, plan_in_channels_last())
    for model, optimizer in zip((net, other), optimizers, strict=True):
        optimizer.load_state_dict(deepcopy(earlier.state_dict()))
        for parameter, first in zip(model.parameters(), net.parameters(), strict=True):
            parameter.grad = first.grad.clone() if model is net else torch.empty_like(parameter).copy_(first.grad)
    for optimizer in optimizers:
        optimizer.step()
    for mine, eager in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, eager)


def test_gradients_that_exist_are_converted_with_the_model_for_a_plan_in_channels_last():
    images, labels = batches()[0]
    batch = images.contiguous(memory_format=torch.channels_last), labels
    net = Net()
    loss_fn(net, batches()[0])[0].backward()
    net.zero_grad(set_to_none=False)
    other = deepcopy(net)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (net, other)]
    planned = PlannedLoss(other, loss_fn, plan_in_channels_last())
    net.to(memory_format=torch.channels_last)
    for each in (lambda: loss_fn(net, batch), lambda: planned(batch)):
        torch.manual_seed(5)
        each()[0].backward()
    for optimizer in optimizers:
        optimizer.step()
    for mine, eager in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, eager)


def test_a_graph_that_is_not_retained_is_differentiated_once_and_a_retained_one_again():
    gradients = []
    for wrap in (eager, lambda model: PlannedLoss(model, loss_fn)):
        torch.manual_seed(5)
        model = Net()
        loss, _ = wrap(model)(batches()[0])
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        gradients.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def test_gradients_of_gradients_are_refused_by_name():
    model = nn.Linear(8, 4)
    loss = PlannedLoss(model, squared)((torch.ones(2, 8),))
    with pytest.raises(ConfigError, match="create_graph=True, but its gradients have no graph"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_backward_through_an_extra_is_refused_where_another_extra_is_a_number():
    def with_extras(model: nn.Module, batch: Any) -> Any:
        made = model(batch)
        return made.square().mean(), {"count": 2, "aux": made.mean(), "logits": made.detach()}

    _, extras = PlannedLoss(nn.Linear(8, 4), with_extras)(torch.ones(2, 8))
    assert extras["count"] == 2
    assert not extras["logits"].requires_grad
    with pytest.raises(ConfigError, match="reached a result beside the loss, which has no gradient under a plan"):
        extras["aux"].backward()


class OneNode(torch.autograd.Function):
    """Node of all results, as DistributedDataParallel has it where it looks for unused parameters."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def test_an_extra_that_shares_a_node_with_the_loss_and_has_no_gradient_is_no_hindrance():
    def with_extra(model: nn.Module, batch: Any) -> Any:
        results = model(batch)
        return results.square().mean(), results.mean()

    model, batch = nn.Linear(8, 4), torch.ones(2, 8)
    loss, _ = OneNode.apply(*PlannedLoss(model, with_extra)(batch))
    loss.backward()
    expected = torch.autograd.grad(with_extra(model, batch)[0], model.weight)[0]
    assert torch.equal(model.weight.grad, expected)


def test_a_batch_that_wants_its_gradient_later_is_refused():
    planned = PlannedLoss(nn.Linear(8, 4), squared)
    planned((torch.ones(2, 8),))
    with pytest.raises(CaptureError, match=r"batch\.0 requires a gradient"):
        planned((torch.ones(2, 8, requires_grad=True),))


def test_a_parameter_that_changes_before_backward_is_refused_where_the_step_must_run_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    planned = PlannedLoss(model, squared)
    loss = planned((torch.ones(2, 8),))
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between the call and backward"):
        (loss / 3).backward()


def plan_file(rows: int, loop: str = "gradients") -> PlanFile:
    """A plan of `tune --loop gradients`, or for a step with updates, for a linear layer and a batch of some rows."""
    model = nn.Linear(8, 4)
    optimizer = None if loop else torch.optim.SGD(model.parameters())
    graph = capture(Workload(model, squared, optimizer, (torch.ones(rows, 8),))).graph
    costs = Costs.unit(graph)
    plan = make_plan(graph, SMALL, 0, costs)
    estimate = simulate(graph, lower(graph, plan), costs)
    return PlanFile(
        WorkloadRef("small", {}), graph.digest, "2GiB", 2**31, 0, SMALL, plan, estimate, loop=loop,
        summary=summarize_graph(graph),
    )  # fmt: skip


def test_a_plan_in_the_wrong_kind_of_loop_is_refused_with_the_right_kind():
    model, batch = nn.Linear(8, 4), (torch.ones(4, 8),)
    with pytest.raises(PlanError, match="a PlannedLoss takes plans of --loop gradients"):
        PlannedLoss(model, squared, plan_file(4, loop=""))(batch)
    with pytest.raises(PlanError, match="a TrainStep takes plans without --loop gradients"):
        TrainStep(model, squared, torch.optim.SGD(model.parameters()), batch, plan_file(4))


def test_a_training_that_resumes_with_a_smaller_batch_plans_it_and_keeps_the_plan_for_the_others():
    file = plan_file(4)
    planned = PlannedLoss(nn.Linear(8, 4), squared, file)
    with pytest.warns(UserWarning, match="the first batch has another shape than the plan's"):
        planned((torch.ones(3, 8),))
    with pytest.warns(UserWarning, match="the plan is for a batch of"):
        planned((torch.ones(4, 8),))
    ((selector, *_),) = planned._selectors.values()
    assert selector.last.plan == file.plan


@pytest.mark.parametrize(("width", "other_shapes"), [(8, "error"), (9, "replan")], ids=["on request", "another model"])
def test_a_plan_for_another_first_step_is_refused(width: int, other_shapes: OtherShapes):
    planned = PlannedLoss(nn.Linear(width, 4), squared, plan_file(4), other_shapes=other_shapes)
    with pytest.raises(PlanError, match="this step is another graph"):
        planned((torch.ones(3, width),))


def test_a_plan_that_was_measured_with_other_threads_is_named_where_the_loss_is_created():
    device = Device("cpu", "Fake 9000", 2**34, 2, "2.13.0", environment={"torch threads": "4096"})
    file = replace(plan_file(4), device=device)
    with pytest.warns(UserWarning, match="other settings of threads: torch threads: recorded 4096") as caught:
        PlannedLoss(nn.Linear(8, 4), squared, file)
    assert caught[0].filename == __file__


def test_another_shape_is_refused_on_request():
    planned = PlannedLoss(nn.Linear(8, 4), squared, other_shapes="error")
    planned((torch.ones(2, 8),))
    with pytest.raises(PlanError, match="make a PlannedLoss for it"):
        planned((torch.ones(3, 8),))


@pytest.mark.filterwarnings("ignore:.*the plan is for a batch of")
def test_the_last_gradient_of_the_loss_is_expected_for_a_batch_of_another_shape_too(runs: list[Executor]):
    planned = PlannedLoss(nn.Linear(8, 4), squared)
    for rows in (2, 2, 3):
        (planned((torch.ones(rows, 8),)) / 3).backward()
    assert len(runs) == 4  # the first call ran twice


def test_a_predicted_gradient_of_the_loss_saves_the_second_run(runs: list[Executor]):
    factor = [3]
    planned = PlannedLoss(nn.Linear(8, 4), squared, loss_gradient=lambda one: one / factor[0])
    for factor[0] in (3, 3, 5):
        (planned((torch.ones(2, 8),)) / factor[0]).backward()
    assert len(runs) == 3


def test_a_wrong_prediction_costs_one_run_and_no_bit(runs: list[Executor]):
    def wrap(model: nn.Module) -> Loss:
        return PlannedLoss(model, loss_fn, loss_gradient=lambda one: one * 7)

    wanted, got = run(accumulation_of_three_with_a_remainder, eager), run(accumulation_of_three_with_a_remainder, wrap)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert len(runs) == 9  # eight batches


@pytest.mark.parametrize("caches", [True, False])
def test_autocast_with_and_without_its_cache_gives_other_bits_and_each_is_kept(caches: bool):
    def loss_of_weights_that_are_read_twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(model(batch)).square().mean()

    def gradient(wrap: Callable[[nn.Module], Loss], caches: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
            loss = wrap(model)(torch.randn(32, 16))
        loss.backward()
        assert model.weight.grad is not None
        return model.weight.grad

    def plain(model: nn.Module) -> Loss:
        return lambda batch: loss_of_weights_that_are_read_twice(model, batch)

    expected = gradient(plain, caches)
    assert torch.equal(expected, gradient(lambda m: PlannedLoss(m, loss_of_weights_that_are_read_twice), caches))
    assert not torch.equal(expected, gradient(plain, not caches))


def test_anomaly_mode_is_refused():
    with torch.autograd.set_detect_anomaly(True), pytest.raises(ConfigError, match="anomaly mode is on"):
        PlannedLoss(Net(), loss_fn)(batches()[0])


RANK = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from autotune.runtime.planned_loss import PlannedLoss
from tests.runtime.test_planned_loss import Net, batches, loss_fn
class Plain(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, batch):
        return loss_fn(self.model, batch)
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
def train(wrap):
    torch.manual_seed(rank)
    model = DistributedDataParallel(wrap(Net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches()[rank::2]:
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())
pairs = zip(train(Plain), train(lambda model: PlannedLoss(model, loss_fn)), strict=True)
print(all(torch.equal(a, b) for a, b in pairs))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_train_a_planned_loss_in_ddp_to_the_bits_of_ddp(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=300)[0].strip() for rank in ranks] == ["True", "True"]


@pytest.mark.parametrize("factors", [(1, 1, 1), (1, 0.5, 2)])
def test_tensors_from_outside_that_the_loss_changes_end_as_in_eager(factors: tuple[float, ...]):
    ends = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, mean = nn.Linear(8, 4), torch.zeros(4)

        def centered(model: nn.Module, batch: Any, mean: torch.Tensor = mean) -> torch.Tensor:
            made = model(batch)
            with torch.no_grad():
                mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
            return (made - mean).square().mean()

        loss_of = PlannedLoss(model, centered) if planned else partial(centered, model)
        for number, factor in enumerate(factors):
            (loss_of(torch.full((2, 8), float(number))) * factor).backward()
        ends.append([mean, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *ends))


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def test_a_backward_within_autocast_has_the_gradients_of_the_call_though_it_runs_again():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(16, 32)
    planned = PlannedLoss(model, mean_square)
    loss = planned(batch)
    with torch.autocast("cpu", torch.bfloat16):
        (loss * 3).backward()  # 1 was expected
    seen = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    (mean_square(model, batch) * 3).backward()
    for parameter, gradient in zip(model.parameters(), seen, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_loss_is_prepared_where_gradients_are_off():
    model, batch = nn.Linear(4, 2), torch.randn(3, 4)
    planned = PlannedLoss(model, mean_square)
    with torch.no_grad():
        planned.prepare(batch)
    assert planned.graph is not None
    planned(batch).backward()


def test_a_capture_on_another_thread_is_no_anomaly_mode_of_the_users():
    model, batch = nn.Linear(4, 2), torch.randn(3, 4)
    planned = PlannedLoss(model, mean_square)
    planned(batch).backward()
    with torch.autograd.set_detect_anomaly(True):  # as the tracer has it
        with one_capture():
            planned(batch).backward()
        with pytest.raises(ConfigError, match="anomaly mode"):
            planned(batch)
