"""A loop around the step does what it does around a plain step, or is refused by name."""

import logging
import os
import subprocess
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.plan import Plan
from autotune.planners import make_plan
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import assert_equals_eager, eager_step, tensors, worst_difference
from tests.support.optimizers import AcceleratedOptimizer
from tests.support.small import batch_of, labelled_loss, make, mlp, normalized


def step_for(workload: Workload, plan: Any = None, **options: Any) -> TrainStep:
    return TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_around_it_is_refused_as_eager_refuses_it(mode: Any):
    workload, other = make(mlp), make(mlp)
    step = step_for(workload)
    before = {name: tensor.clone() for name, tensor in tensors(workload).items()}
    with mode():
        with pytest.raises(RuntimeError):
            eager_step(other)
        with pytest.raises(ConfigError, match=rf"^torch.{mode.__name__} is on around the step, .* outside of it$"):
            step(workload.batch)
        with pytest.raises(ConfigError, match=mode.__name__):
            step_for(make(mlp))
    assert worst_difference(tensors(workload), before) == 0.0
    assert torch.equal(step(workload.batch), eager_step(other)[0])


def test_inference_runs_without_gradients_around_it():
    workload = make(mlp)
    inputs = workload.batch[0]
    with torch.no_grad():
        assert torch.equal(TrainStep(workload.model, None, None, inputs)(inputs), workload.model(inputs))


def test_anomaly_mode_is_refused_since_a_planned_step_has_no_autograd():
    workload = make(mlp)
    step = step_for(workload)
    words = r"^torch.autograd's anomaly mode is on, .* turn the mode off, or find the"
    with torch.autograd.set_detect_anomaly(mode=True), pytest.raises(ConfigError, match=words):
        step(workload.batch)


def detached(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).detach().mean()


@pytest.mark.parametrize(
    "entry", [capture, step_for, partial(step_for, before_update=lambda: None), partial(step_for, accumulate=2)]
)
def test_a_loss_without_a_gradient_is_an_error_as_in_eager(entry: Any):
    with pytest.raises(RuntimeError):
        eager_step(make(mlp, loss_fn=detached))
    with pytest.raises(CaptureError, match=r"^the loss of Sequential has no gradient, .* look for detach\(\)"):
        entry(make(mlp, loss_fn=detached))


def test_a_loop_whose_optimizer_trains_nothing_any_more_goes_on_as_eager_does():
    workload, other, calls = make(mlp), make(mlp), list[bool]()
    step = step_for(workload, before_update=lambda: calls.append(True))
    for _ in range(2):
        step(workload.batch)
        eager_step(other)
        for model in (workload.model, other.model):  # the optimizers keep the parameters of before
            model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)
    with pytest.warns(UserWarning, match="before_update sees no gradient of them"):
        assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    assert len(calls) == 3


def test_a_scaler_skips_an_update_whose_infinite_gradient_came_from_another_rank(monkeypatch: pytest.MonkeyPatch):
    workload = make(mlp)
    weight = workload.model[0].weight
    scaler, received = torch.amp.GradScaler("cpu", init_scale=4.0), [1.0, float("inf"), 1.0]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    step = step_for(workload, scaler=scaler, before_update=lambda: weight.grad.mul_(received.pop(0)))
    seen = []
    for _ in range(3):
        before = weight.detach().clone()
        step(workload.batch)
        seen.append((torch.equal(weight, before), scaler.get_scale()))
    assert seen == [(False, 4.0), (True, 2.0), (False, 2.0)]
    assert bool(weight.isfinite().all())


def test_a_step_checks_its_workload():
    workload = make(mlp)
    with pytest.raises(ConfigError, match=r"^TrainStep: optimizer is int, not a torch.optim.Optimizer"):
        TrainStep(workload.model, workload.loss_fn, 3, workload.batch)
    foreign = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"^TrainStep: 4 of the optimizer's 4 parameters are not the model's"):
        TrainStep(workload.model, workload.loss_fn, foreign, workload.batch)


def test_flush_updates_with_the_remainder_and_begins_a_new_sum():
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, accumulate=4)
    for _ in range(2):  # epochs of six micro-batches
        for number in range(6):
            step(batch_of(6, 8, seed=number))
            other.loss_fn(other.model, batch_of(6, 8, seed=number)).backward()
            if number in (3, 5):
                other.optimizer.step()
                other.optimizer.zero_grad()
        step.flush()
        step.flush()
        assert all(p.grad is None for p in workload.model.parameters())
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_a_loop_that_steps_the_remainder_itself_is_counted_anew():
    workload, other = make(mlp), make(mlp)
    step = step_for(workload, accumulate=4)
    for _ in range(2):
        for number in range(6):
            step(batch_of(6, 8, seed=number))
            other.loss_fn(other.model, batch_of(6, 8, seed=number)).backward()
            if number in (3, 5):
                other.optimizer.step()
                other.optimizer.zero_grad()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


class Accelerated(AcceleratedOptimizer):
    """With what Accelerate says of an accumulation: over how many steps, and whether this one ends with an update."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        super().__init__(optimizer)
        self.gradient_state = SimpleNamespace(num_steps=steps, sync_gradients=True)


def accumulating(**options: Any) -> tuple[Workload, Accelerated, TrainStep]:
    workload = make(mlp)
    wrapped = Accelerated(workload.optimizer, 2)
    return workload, wrapped, TrainStep(workload.model, workload.loss_fn, wrapped, workload.batch, **options)


def test_a_step_that_updates_while_the_accelerator_accumulates_is_refused():
    workload, wrapped, step = accumulating()
    wrapped.gradient_state.sync_gradients = False
    with pytest.raises(ConfigError, match=r"accumulates over 2 steps .*; pass accumulate=2, and divide the loss by 2"):
        step(workload.batch)


@pytest.mark.parametrize(
    ("updated", "cleared"),
    [("flush", True), ("flush", False), ("the loop's own step", True), ("forgotten", True), ("forgotten", False)],
)
def test_a_remainder_with_which_the_accelerator_updates_is_never_lost(updated: str, cleared: bool):
    workload, wrapped, step = accumulating(accumulate=2)
    twin = make(mlp)
    for synchronizes in (False, True, True):  # three steps an epoch
        wrapped.gradient_state.sync_gradients = synchronizes
        step(workload.batch)
        twin.loss_fn(twin.model, twin.batch).backward()
        if synchronizes:
            twin.optimizer.step()
            twin.optimizer.zero_grad()
    if updated == "flush":
        step.flush()
    elif updated == "the loop's own step":
        workload.optimizer.step()
    if cleared:
        workload.optimizer.zero_grad()
    wrapped.gradient_state.sync_gradients = False
    if updated == "forgotten":
        with pytest.raises(ConfigError, match=r"and none was run; call flush\(\)"):
            step(workload.batch)
    else:
        assert worst_difference(tensors(workload), tensors(twin)) == 0.0
        step(workload.batch)


class LightningOptimizer(AcceleratedOptimizer):
    """Counts updates, as Lightning's in manual optimization."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.begun = self.ended = 0

    def _on_before_step(self) -> None:
        self.begun += 1

    def _on_after_step(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"verify": True}, {"other_shapes": "eager"}])
def test_lightnings_global_step_counts_each_update_once(options: Any):
    workload = make(mlp)
    wrapped = LightningOptimizer(workload.optimizer)
    step = TrainStep(workload.model, workload.loss_fn, wrapped, workload.batch, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (6, 6, 3, 6, 6):
            step(batch_of(size, 8))
    step.flush()
    assert wrapped.begun == wrapped.ended == (3 if "accumulate" in options else 5)


def stops_in_a_region(region: Any) -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with region():
            chosen = batch[0][batch[0] > 0]
        return model(batch[0]).mean() * chosen.sum()

    return loss


@pytest.mark.parametrize("region", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_capture_that_fails_within_no_grad_or_autocast_leaves_neither_on(region: Any):
    with pytest.raises(CaptureError):
        capture(make(mlp, loss_fn=stops_in_a_region(region)))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


LOGGER = logging.getLogger("library")


def logged(model: nn.Module, batch: Any) -> torch.Tensor:
    """Log as `transformers` does when a model is asked for its loss."""
    LOGGER.info("default loss")
    return labelled_loss(model, batch)


def test_a_step_may_log():
    assert_equals_eager(make(mlp, loss_fn=logged), make(mlp, loss_fn=logged))


def offloading(workload: Workload) -> Plan:
    graph = capture(workload).graph
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), {"ssd": StoreCost(1e9, 1e9, 5e8, 5e8)})
    settings = {
        "recompute": {"planner": "keep"},
        "offload": {"planner": "window", "window": 1, "store": "ssd", "share": 1.0},
    }
    plan = make_plan(graph, settings, 0, costs)
    assert plan.offload
    return plan


def deep() -> nn.Module:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(8, 8), nn.Tanh())))


def test_a_relative_store_stays_where_it_was_when_the_process_changes_its_directory(tmp_path: Path, monkeypatch: Any):
    workload, other = make(deep), make(deep)
    (tmp_path / "store").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with step_for(workload, offloading(workload), stores={"ssd": "store"}) as step:
        first = step(workload.batch)
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.warns(UserWarning, match="runs as it is traced"):
            step(batch_of(3, 8))
        step(workload.batch)  # opens the store again
    assert torch.equal(first, eager_step(other)[0])


def script(text: str, *arguments: str) -> "subprocess.Popen[str]":
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments], env=environment, cwd=root, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def said_by_another_process(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of a process that captures two steps and forks: it takes four seconds to begin, so tests share it."""
    child = script(
        """
        import os, sys
        from autotune.capture.tracer import capture
        from autotune.errors import ConfigError
        from tests.capture.test_loops import deep, offloading, step_for
        from tests.support.small import make, normalized
        print(capture(make(normalized, (2, 3, 8, 8))).graph.digest, flush=True)
        workload = make(deep)
        step = step_for(workload, offloading(workload), stores={"ssd": sys.argv[1]})
        step(workload.batch)
        pid = os.fork()
        if not pid:
            try:
                step(workload.batch)
            except ConfigError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        step(workload.batch)
        print("the parent went on", flush=True)
        """,
        str(tmp_path_factory.mktemp("store")),
    )
    try:
        out, problem = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 0, problem
    return out


def test_a_step_that_offloads_is_an_error_in_a_forked_child_and_goes_on_in_the_parent(said_by_another_process: str):
    words = "where the threads of its store do not exist; create the TrainStep in the process that calls it"
    assert words in said_by_another_process
    assert said_by_another_process.endswith("the parent went on\n")


def test_another_process_captures_the_same_digest(said_by_another_process: str):
    digest = capture(make(normalized, (2, 3, 8, 8))).graph.digest
    assert digest in said_by_another_process.splitlines()


RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from autotune.runtime.train_step import TrainStep
from autotune.errors import ConfigError
from tests.support.small import batch_of, make, mlp
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
workload = make(mlp)
batch = batch_of(6, 8, seed=rank)
def refused(model, **options):
    try:
        TrainStep(model, workload.loss_fn, workload.optimizer, batch, **options)
    except ConfigError as error:
        return str(error)
bare, wrapped = refused(workload.model), refused(DistributedDataParallel(workload.model), before_update=print)
def reduce():
    for parameter in workload.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(2)
step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, batch, before_update=reduce)
for _ in range(3):
    step(batch)
first = workload.model[0].weight.detach().clone()
other = first.clone()
dist.broadcast(other, 0)
assert torch.equal(first, other)
if rank == 0:
    print(bare); print(wrapped); print("ranks agree")
dist.barrier()  # a rank that ends while the other still receives aborts in a thread of gloo
sys.stdout.flush()
os._exit(0)  # the interpreter's end destroys threads of gloo that still run: an abort in one of some fifteen runs under load
"""


class Wrapped(DistributedDataParallel):
    """The wrapper without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_on_several_ranks_a_wrapper_and_gradients_that_nothing_reduces_are_refused(monkeypatch: pytest.MonkeyPatch):
    workload = make(mlp)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        ConfigError,
        match=r"^torch\.distributed has 2 ranks, and gradients are not reduced; pass before_update=\.\.\. that all-reduces",
    ):
        step_for(workload)
    workload.model = Wrapped(workload.model)
    with pytest.raises(
        ConfigError, match=r"^the model is wrapped in DistributedDataParallel, .*pass the module within it"
    ):
        step_for(workload, before_update=print)


def test_on_several_ranks_a_verified_step_is_refused_since_it_reduces_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"has 2 ranks, and verify may run before_update .* in a single process$"):
        step_for(make(mlp), before_update=print, verify=True)


@pytest.mark.slow
def test_ranks_whose_gradients_nothing_reduces_are_refused_and_reduced_ones_agree(tmp_path: Path):
    ranks = [script(RANK, str(rank), str(tmp_path / "meeting")) for rank in range(2)]
    try:
        made = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], made
    bare, wrapped, agree = made[0][0].splitlines()
    assert bare == (
        "torch.distributed has 2 ranks, and gradients are not reduced; pass before_update=... that all-reduces every .grad; "
        "pass one that does nothing if ranks train apart"
    )
    assert wrapped.startswith("the model is wrapped in DistributedDataParallel, ")
    assert "pass the module within it" in wrapped
    assert agree == "ranks agree"
