"""State around a step that a training loop changes between steps, or that a failed step leaves behind."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune.capture.optimizers.optimizer_probe import probe
from autotune.capture.tracer import capture
from autotune.errors import CaptureError, PlanError, StoreError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role
from autotune.ir.plan import Plan
from autotune.planners import make_plan
from autotune.planners.offload.window import OffloadWindow
from autotune.runtime.offload.engine import OffloadEngine
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.step_cache import StepCache
from autotune.runtime.stores import SwapStore, open_store
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import labelled_loss, make


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 3 * 32)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.proj(inputs).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


def attention() -> Workload:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()

    workload = make(Attention, loss_fn=loss_fn)
    workload.batch = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    return workload


@pytest.mark.filterwarnings("ignore:the step with other backends")
def test_another_backend_of_attention_counts_from_the_next_step():
    workload, twin = attention(), attention()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        assert any("flash" in op.target for op in step.graph.ops)
        for number in range(4):
            with sdpa_kernel(SDPBackend.MATH if number % 2 else SDPBackend.FLASH_ATTENTION):
                assert torch.equal(step(workload.batch), eager_step(twin)[0])
            for mine, theirs in zip(workload.model.parameters(), twin.model.parameters(), strict=True):
                assert torch.equal(mine, theirs)
        last = step._selector.last.program.graph
        assert not any("flash" in op.target for op in last.ops)


@pytest.mark.filterwarnings("ignore:the step with other backends")
def test_another_backend_of_attention_is_not_left_to_a_process_that_has_its_own():
    workload, twin = attention(), attention()
    arguments = workload.model, workload.loss_fn, workload.optimizer, workload.batch
    with TrainStep(*arguments, other_shapes="background") as step, sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(step(workload.batch), eager_step(twin)[0])
        assert not step.is_eager
        assert not any("flash" in op.target for op in step._selector.last.program.graph.ops)


@pytest.mark.filterwarnings("ignore:the step with other backends")
def test_a_library_of_kernels_that_is_switched_off_counts_from_the_next_step():
    def make_lstm() -> Workload:
        workload = make(lambda: nn.LSTM(8, 8), loss_fn=lambda model, batch: model(batch)[0].square().mean())
        workload.batch = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
        return workload

    workload, twin = make_lstm(), make_lstm()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        assert any("mkldnn" in op.target for op in step.graph.ops)
        with torch.backends.mkldnn.flags(enabled=False):
            assert torch.equal(step(workload.batch), eager_step(twin)[0])
            assert not any("mkldnn" in op.target for op in step._selector.last.program.graph.ops)


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def rows(count: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=drawn), torch.randn(count, 1, generator=drawn)


def head_only() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model[2].parameters(), lr=0.0)


def test_a_step_in_eager_leaves_no_gradient_on_what_the_optimizer_does_not_train():
    model, optimizer = head_only()
    norms: list[float] = []

    def clip() -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())

    with pytest.warns(UserWarning, match=r"0\.weight, 0\.bias.*before_update sees no gradient of them"):
        step = TrainStep(model, mse, optimizer, rows(8), before_update=clip, other_shapes="eager")
    kept = torch.ones_like(model[0].weight)
    model[0].weight.grad = kept  # of another loss: it stays
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0].weight.grad = None
        step(rows(8))
        model[0].weight.grad = kept
        step(rows(5))
        assert model[0].weight.grad is kept
        assert torch.equal(kept, torch.ones_like(kept))
        assert model[0].bias.grad is None
        model[0].weight.grad = None
        step(rows(8))
    step.close()
    assert norms[0] == norms[2]


@pytest.mark.filterwarnings("ignore:.*to train")
def test_a_tensor_from_outside_that_joins_the_optimizer_later_is_refused_as_at_the_start():
    model, scale = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch) * torch.exp(-scale) + scale

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainStep(model, loss_fn, optimizer, rows(8)) as step:
        step(rows(8))
        optimizer.add_param_group({"params": [scale]})
        with pytest.raises(CaptureError, match="reads and that is no parameter of the model"):
            step(rows(8))


@pytest.mark.filterwarnings("ignore:.*another optimizer.step")
def test_a_step_method_that_is_replaced_or_restored_between_steps_counts():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner, calls = optimizer.step, []

    def replaced(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return inner(*arguments, **named)

    with TrainStep(model, mse, optimizer, rows(8)) as step:
        step(rows(8))
        optimizer.step = replaced  # type: ignore[method-assign]
        step(rows(8))
        assert len(calls) == 1
        del optimizer.step
        before = model.weight.detach().clone()
        step(rows(8))
        assert len(calls) == 1
        assert not torch.equal(before, model.weight)


def test_a_step_that_fails_between_two_updates_says_how_many_are_done():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batch = torch.randn(4, 8)
    graph = capture(Workload(model, loss_fn, optimizer, batch)).graph
    early = make_plan(graph, {"update": {"planner": "with_gradient"}}, 0, Costs.unit(graph))
    seen: list[str] = []

    def interrupt(name: str, gradient: Tensor) -> None:
        seen.append(name)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with TrainStep(model, loss_fn, optimizer, batch, early) as step:
        step(batch)
        step.on_gradient = interrupt
        with (
            pytest.warns(UserWarning, match="failed after 3 of 8 parameters were updated"),
            pytest.raises(KeyboardInterrupt),
        ):
            step(batch)
        step.on_gradient = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(batch)


def test_a_checkpoint_with_its_state_in_another_order_or_with_more_of_it_trains_on(tmp_path: Path):
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def build() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        return Workload(model, loss_fn, torch.optim.Adam(model.parameters()), torch.randn(4, 64))

    workload, twin = build(), build()
    model, optimizer, batch = workload.model, workload.optimizer, workload.batch
    assert optimizer is not None
    assert twin.optimizer is not None
    graph = capture(workload).graph
    unit = Costs.unit(graph)
    costs = Costs(unit.seconds, unit.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    knobs = {"planner": "window", "window": 1, "store": "ssd", "share": 1.0, "what": "all"}
    plan = make_plan(graph, {"offload": knobs}, 0, costs)
    assert any(graph.values[each.value].role is Role.STATE for each in plan.offload)
    with TrainStep(model, loss_fn, optimizer, batch, plan, stores={"ssd": tmp_path}) as step:
        for number in range(6):
            if number == 4:  # with one more tensor for each parameter
                for each in (optimizer, twin.optimizer):
                    each.param_groups[0]["amsgrad"] = True
                    for state in each.state.values():
                        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
            if number == 2:
                for each in (optimizer, twin.optimizer):
                    document = each.state_dict()
                    document["state"] = {key: dict(sorted(state.items())) for key, state in document["state"].items()}
                    each.load_state_dict(document)
            assert torch.equal(step(batch), eager_step(twin)[0])
    for mine, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_optimizer_state_that_lies_in_one_block_is_not_offloaded(tmp_path: Path):
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer, batch = torch.optim.Adam(model.parameters()), torch.randn(4, 64)
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    parameters = list(model.parameters())
    flat = torch.cat([optimizer.state[parameter]["exp_avg"].flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
        optimizer.state[parameter]["exp_avg"] = part.view_as(parameter)
    graph = capture(Workload(model, loss_fn, optimizer, batch)).graph
    unit = Costs.unit(graph)
    costs = Costs(unit.seconds, unit.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    knobs = {"planner": "window", "window": 1, "store": "ssd", "share": 1.0, "what": "all"}
    plan = make_plan(graph, {"offload": knobs}, 0, costs)
    with pytest.raises(PlanError, match="shares its memory with other tensors, so it cannot be offloaded; clone each"):
        TrainStep(model, loss_fn, optimizer, batch, plan, stores={"ssd": tmp_path})


def test_an_expanded_buffer_is_restored_by_verify():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)
            self.register_buffer("scale", torch.ones(1).expand(1, 4))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs * self.scale)

    model = Scaled()
    with TrainStep(model, mse, torch.optim.SGD(model.parameters(), lr=0.1), rows(8), verify=True) as step:
        step(rows(8))
        assert step.verified


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_has_the_same_graph_before_and_after_its_first_step(kind: Any):
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    assert not probe(optimizer).joint_reason
    plan = Plan.traced(capture(Workload(model, mse, optimizer, rows(8))).graph)
    for _ in range(2):
        with TrainStep(model, mse, optimizer, rows(8), plan) as step:
            step(rows(8))


def offloading(directory: Path, ranges: Any = None) -> tuple[TrainStep, Workload, Workload]:
    """Return a step that offloads weights and state, its workload, and a twin for eager."""

    def deep() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))

    workload, twin = make(deep, (64, 8)), make(deep, (64, 8))
    graph = capture(workload).graph
    unit = Costs.unit(graph)
    costs = Costs(unit.seconds, unit.scratch_bytes, {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    plan = OffloadWindow(1, what="all").plan(graph, Plan.traced(graph), 0, costs)
    assert {Role.PARAM, Role.STATE} <= {graph.values[swap.value].role for swap in plan.offload}
    arguments = workload.model, workload.loss_fn, workload.optimizer, workload.batch
    return TrainStep(*arguments, plan, stores={"ssd": directory}, ranges=ranges), workload, twin


def all_in_memory(workload: Workload) -> bool:
    return all(tensor.untyped_storage().nbytes() > 0 for tensor in tensors(workload).values())


@pytest.mark.parametrize("then", ["nothing", "suspend", "close"])
def test_weights_of_a_failed_step_return_although_interrupts_end_their_return(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fails = False

    def open_range(name: str) -> AbstractContextManager[None]:
        if fails and not all_in_memory(workload):
            raise KeyboardInterrupt(name)
        return nullcontext()

    step, workload, twin = offloading(tmp_path, open_range)
    interrupts, abort = [1 if then == "nothing" else 2], OffloadEngine.abort

    def abort_later(engine: OffloadEngine) -> None:
        interrupts[0] -= 1
        if interrupts[0] >= 0:
            raise KeyboardInterrupt  # as a signal's handler does before the first instruction
        abort(engine)

    with step:
        assert torch.equal(step(workload.batch), eager_step(twin)[0])
        saved = {name: tensor.clone() for name, tensor in tensors(workload).items()}
        fails = True
        with monkeypatch.context() as patch:
            patch.setattr(OffloadEngine, "abort", abort_later)
            with pytest.raises(KeyboardInterrupt):
                step(workload.batch)
        fails = False
        assert all_in_memory(workload) == (then == "nothing")
        if then == "suspend":
            step._selector.last.suspend()
        elif then == "close":
            step.close()
        assert all_in_memory(workload)
        assert worst_difference(tensors(workload), saved) == 0.0
        if then != "close":
            assert torch.equal(step(workload.batch), eager_step(twin)[0])


def test_a_store_whose_closing_is_interrupted_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step, workload, twin = offloading(tmp_path)
    with step:
        assert torch.equal(step(workload.batch), eager_step(twin)[0])
        store = step._selector.last.store
        assert store is not None
        close = store.close

        def interrupted() -> None:
            close()
            raise KeyboardInterrupt  # of a handler that ran while the store waited for its threads

        monkeypatch.setattr(store, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step._selector.last.suspend()
        assert torch.equal(step(workload.batch), eager_step(twin)[0])


@pytest.mark.parametrize("problem", ["weight", "size"])
def test_a_failed_construction_leaves_no_store_open(problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step, workload, _ = offloading(tmp_path)
    step.close()
    opened: list[SwapStore] = []

    def record(*arguments: Any) -> SwapStore:
        opened.append(open_store(*arguments))
        return opened[-1]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 3:
            raise ZeroDivisionError("three rows")
        return labelled_loss(model, batch)

    monkeypatch.setattr("autotune.runtime.prepared_step.open_store", record)
    model = workload.model
    buckets: Buckets | None = None
    if problem == "weight":  # all weights become parts of one block
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(flat, model.parameters())
    else:
        buckets = Buckets([3, 64], pad={0: 0, 1: -100}, dim=0)
    with pytest.raises((PlanError, ZeroDivisionError), match=r"shares its memory|three rows") as caught:
        TrainStep(
            model, loss_fn, workload.optimizer, workload.batch, step.plan, stores={"ssd": tmp_path}, buckets=buckets
        )
    assert caught.traceback  # it is alive, as in a notebook
    with pytest.raises(StoreError, match="ssd store is closed"):
        opened[0].put(0, torch.zeros(1))


def test_steps_behind_one_that_cannot_be_closed_are_closed_too():
    closed: list[str] = []

    def lose() -> None:
        raise StoreError("a weight is lost")

    steps: Any = SimpleNamespace(close=lose), SimpleNamespace(close=lambda: closed.append("second"))
    keys: Any = "first", "second"
    cache = StepCache(trains=True)
    for key, step in zip(keys, steps, strict=True):
        cache.add(key, step)
    with pytest.raises(StoreError, match="a weight is lost"):
        cache.close()
    assert closed == ["second"]


def test_a_step_that_is_closed_while_it_runs_keeps_what_waits_for_its_end() -> None:
    workload, ended = attention(), list[str]()
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        prepared = step._selector.last
        executor = prepared.executor
        executor.at_end = lambda: ended.append("handler of another signal")
        executor.is_running = True
        prepared.close()
        assert ended == []
        executor.is_running = False
        assert executor.at_end is not None
        executor.at_end()
        assert ended == ["handler of another signal"]
