"""Gradients that are handed over: no copy, no second run where their factor is regular, and the bits of eager."""

import copy
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.tracer import capture
from autotune.errors import NumericsError, StoreError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.plan import Plan
from autotune.planners import make_plan
from autotune.runtime import planned_loss
from autotune.runtime.executor import Executor
from autotune.runtime.gradient_handover import PlannedCall, list_drawing_devices
from autotune.runtime.planned_loss import PlannedLoss
from autotune.workloads.workload import Workload
from tests.runtime.test_planned_loss import Loop, Loss, Net, batches, clipping, eager, loss_fn, run


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[weakref.ref[torch.Tensor], int]]:
    """A reference to each gradient of the last hand-over, and its address."""
    gradients: list[tuple[weakref.ref[torch.Tensor], int]] = []
    take = PlannedCall.take_gradients

    def record(call: PlannedCall, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken = take(call, tangent)
        gradients[:] = [(weakref.ref(gradient), gradient.data_ptr()) for gradient in taken]
        return taken

    monkeypatch.setattr(PlannedCall, "take_gradients", record)
    return gradients


def test_the_first_gradients_become_grad_itself_and_later_ones_go_as_they_are_added(handed: list[Any]):
    model = layers()
    planned = PlannedLoss(model, mean_square)
    planned(torch.ones(2, 8)).backward()
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == [address for _, address in handed]

    alive: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(ref() is not None for ref, _ in handed))
        )
    planned(torch.ones(2, 8)).backward()
    assert alive == [3, 2, 1, 0]


def test_a_loss_that_is_kept_after_its_last_backward_keeps_no_batch():
    planned = PlannedLoss(layers(), mean_square)
    planned(torch.ones(2, 8)).backward()
    batch = torch.ones(2, 8)
    reference = weakref.ref(batch)
    loss = planned(batch)
    del batch
    loss.backward(retain_graph=True)
    assert reference() is not None
    loss.backward()
    assert reference() is None
    assert loss.requires_grad


def count_runs(runs: list[Executor], factors: list[float], **options: Any) -> int:
    model = layers()
    planned = PlannedLoss(model, mean_square, **options)
    runs.clear()
    for factor in factors:
        (planned(torch.ones(2, 8)) * factor).backward()
    return len(runs) - len(factors)


@pytest.mark.parametrize(
    ("factors", "reruns"),
    [
        ([1.0] * 6, 0),
        ([0.25] * 12, 1),
        ([2.0, 3.0] * 8, 3),
        ([0.5, 0.5, 0.5, 0.25] * 5, 5),
        ([4.0] * 6 + [2.0] * 6, 2),
    ],
)
def test_a_factor_that_stays_or_repeats_costs_runs_at_its_beginning_alone(
    factors: list[float], reruns: int, runs: list[Executor]
):
    assert count_runs(runs, factors) <= reruns


def test_two_losses_of_one_step_have_a_factor_each(runs: list[Executor]):
    planned = PlannedLoss(layers(), mean_square)
    for _ in range(6):
        (0.7 * planned(torch.ones(2, 8)) + planned(torch.ones(2, 8))).backward()
    assert len(runs) <= 12 + 3


def test_factors_without_a_pattern_cause_one_warning_with_the_next_step(runs: list[Executor]):
    factors = [float(value) for value in range(1, 25)]
    with pytest.warns(UserWarning, match=r"ran twice.*pass that factor as loss_gradient") as caught:
        assert count_runs(runs, factors) == 23
    assert len(caught) == 1

    step = iter(factors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_runs(runs, factors, loss_gradient=lambda one: one * next(step)) == 0


def with_hooks_and_kept_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> Iterator[torch.Tensor]:
    counts: list[int] = []
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    model.head.weight.register_hook(lambda gradient: counts.append(1))
    for number, batch in enumerate(batches(4)):
        before = model.head.weight.grad
        (loss_of(batch)[0] / 2).backward()
        assert number == 0 or model.head.weight.grad is before
    yield torch.tensor(len(counts))
    optimizer.step()


@pytest.mark.parametrize("loop", [clipping, with_hooks_and_kept_gradients], ids=lambda loop: loop.__name__)
def test_verified_calls_equal_eager_and_change_no_bit_of_the_loop(loop: Loop):
    verified: list[PlannedLoss] = []

    def wrap(model: nn.Module) -> Loss:
        verified.append(PlannedLoss(model, loss_fn, verify=True))
        return verified[0]

    wanted, got = run(loop, eager), run(loop, wrap)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert verified[0].verified == "bit-equal to eager"


def test_calls_beyond_the_verified_ones_run_once(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    run_eager = planned_loss.run_eager_gradients
    monkeypatch.setattr(planned_loss, "run_eager_gradients", lambda *a: (calls.append(1), run_eager(*a))[1])
    planned = PlannedLoss(Net(), loss_fn, verify=3)
    for batch in batches(5):
        planned(batch)
    assert len(calls) == 3


def test_a_wrong_gradient_is_named_and_state_and_gradients_stay(monkeypatch: pytest.MonkeyPatch):
    run_plan = Executor.run

    def wrong(executor: Executor, inputs: Any) -> Any:
        results, gradients = run_plan(executor, inputs)
        return results, (gradients[0] * 1.01, *gradients[1:])

    monkeypatch.setattr(Executor, "run", wrong)
    model = Net()
    kept = model.head.weight.grad = torch.ones_like(model.head.weight)
    planned = PlannedLoss(model, loss_fn, verify=True)
    with pytest.raises(NumericsError, match=r"gradient body\.0\.weight is off by"):
        planned(batches()[0])
    assert model.head.weight.grad is kept
    assert model.body[0].weight.grad is None


def test_a_verified_call_may_still_run_again_for_another_factor():
    model = layers()
    planned = PlannedLoss(model, mean_square, verify=True)
    (planned(torch.ones(2, 8)) / 3).backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (mean_square(model, torch.ones(2, 8)) / 3).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(got, model.parameters(), strict=True))


def test_a_second_run_draws_again_from_the_generators_of_the_cpu_and_of_each_gpu_with_a_value_of_the_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    program = capture(Workload(model, mean_square, None, torch.ones(2, 8)))
    cpu, *gpus = torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0)
    assert list_drawing_devices(program) == (cpu,)
    moved = [replace(meta, device=gpu) for meta, gpu in zip(program.metas, gpus, strict=False)]
    assert list_drawing_devices(replace(program, metas=(*moved, *program.metas[2:]))) == (cpu, *gpus)


class Contrast(nn.Module):
    """An encoder that learns from a frozen teacher and from a queue of earlier keys."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", torch.ones(4, 3))


def contrast_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    keys = model.teacher(batch).detach()
    return ((model.encoder(batch) - keys) @ model.queue.clone()).square().mean()


@pytest.mark.parametrize(
    ("changed", "words"),
    [("queue", "the buffer queue of the planned loss"), ("teacher.weight", "a parameter or an input")],
)
def test_a_tensor_that_the_step_only_reads_and_that_changes_before_backward_is_refused_where_the_step_must_run_again(
    changed: str, words: str
):
    model = Contrast()
    planned = PlannedLoss(model, contrast_loss)
    loss = planned(torch.ones(2, 4))
    with torch.no_grad():
        model.get_parameter(changed).mul_(2) if "." in changed else model.get_buffer(changed).mul_(2)
    with pytest.raises(RuntimeError, match=f"^{words} .*changed in place between the call and backward"):
        (loss / 3).backward()


def test_a_teacher_of_inference_mode_may_be_read():
    model = Contrast()
    with torch.inference_mode():
        model.queue = torch.ones(4, 3)
    planned = PlannedLoss(model, lambda model, batch: model.encoder(batch).mean() + model.queue.detach().mean())
    (planned(torch.ones(2, 4)) / 3).backward()
    assert model.encoder.weight.grad is not None


def test_a_second_run_that_updates_statistics_leaves_a_later_call_that_reads_them_its_own():
    def gradients(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        loss_of = PlannedLoss(model, mean_square) if planned else lambda batch: mean_square(model, batch)
        first = loss_of(torch.randn(4, 8))
        model.eval()
        second = loss_of(torch.randn(4, 8))
        (first / 3).backward()
        (second / 5).backward()
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second capture
        got = gradients(planned=True)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(planned=False), strict=True))


@pytest.mark.parametrize("factor", [1.0, 1 + 2**-23], ids=["bit-equal", "rounding"])
def test_a_verified_call_leaves_graphs_valid_that_autograd_has_already(factor: float, monkeypatch: pytest.MonkeyPatch):
    run_plan = Executor.run

    def rounded(executor: Executor, inputs: Any) -> Any:
        results, gradients = run_plan(executor, inputs)
        return results, (gradients[0] * factor, *gradients[1:])

    monkeypatch.setattr(Executor, "run", rounded)
    model = layers()
    planned = PlannedLoss(model, mean_square, verify=True)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    losses = [planned(torch.ones(2, 8)) for _ in range(2)]
    assert ("bit-equal" in planned.verified) is (factor == 1.0)
    (sum(losses) + penalty).backward()
    last = [*model.parameters()][-1]
    loss = 2 * mean_square(model, torch.ones(2, 8)) + last.square().sum()
    assert torch.allclose(last.grad, torch.autograd.grad(loss, last)[0])


def test_a_copy_made_after_the_verified_calls_is_verified_itself():
    planned = PlannedLoss(layers(), mean_square, verify=1)
    planned(torch.ones(2, 8))
    copied = copy.deepcopy(planned)
    assert copied.verified == ""
    copied(torch.ones(2, 8))
    assert copied.verified == "bit-equal to eager"


def offloading(model: nn.Module, batch: torch.Tensor) -> Plan:
    """Plan of the gradients of `mean_square` that offloads all it can."""
    graph = capture(Workload(model, mean_square, None, batch)).graph
    costs = replace(Costs.unit(graph), stores={"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    window = {"planner": "window", "window": 1, "store": "ssd", "share": 1.0}
    plan = make_plan(graph, {"recompute": {"planner": "keep"}, "offload": window}, 0, costs)
    assert plan.offload
    return plan


@pytest.mark.filterwarnings("ignore:.*the plan is for a batch of")
def test_a_call_runs_again_after_a_call_of_another_shape_that_closed_its_store(tmp_path: Path):
    model, batches = layers(), (torch.randn(64, 8), torch.randn(32, 8))
    planned = PlannedLoss(model, mean_square, offloading(model, batches[0]), stores={"ssd": tmp_path})
    first, second = map(planned, batches)
    (first / 3).backward()
    (second / 3).backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for batch in batches:
        (mean_square(model, batch) / 3).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(got, model.parameters(), strict=True))

    loss = planned(batches[0])
    planned.close()
    with pytest.raises(StoreError, match="must run again, but its ssd store was closed, by close"):
        (loss / 7).backward()
