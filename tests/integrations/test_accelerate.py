"""A planned loss in a loop with Accelerate: every bit is that of the loop without a plan."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune.capture.tracer import capture
from autotune.errors import ConfigError, PlanError
from autotune.integrations.accelerate import AcceleratedLoss, plan_loss
from autotune.ir.plan import Plan
from autotune.planners.auto import best_plan
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile
from autotune.workloads.live_workload import load_live_workload, save_workload
from autotune.workloads.workload import Workload
from tests.integrations.trees import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*the plan is for a batch of")

Wrap = Callable[[accelerate.Accelerator, nn.Module], Callable[[Any], Any]]


class Net(nn.Module):
    """A net that draws random numbers, changes buffers, and reads a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.shared(torch.relu(self.shared(self.first(inputs)))))
        return self.last(self.dropout(hidden))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), {"logits": logits}


def eager(accelerator: accelerate.Accelerator, model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: loss_fn(model, batch)


def planned(accelerator: accelerate.Accelerator, model: nn.Module) -> Callable[[Any], Any]:
    return plan_loss(accelerator, model, loss_fn)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerators share their state within a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def loader(rows: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=8)


def train(
    wrap: Wrap, *, rows: int = 64, epochs: int = 2, directory: Path | None = None, scaler: Any = None, **options: Any
) -> dict[str, Any]:
    """Train; return all that the training leaves. With a directory, go on from the state that is saved there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **options)
    accelerator.scaler = scaler
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(rows), scheduler)
    loss_of = wrap(accelerator, model)
    if directory is not None and directory.exists():
        accelerator.load_state(directory)
    results = []
    for _ in range(epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                loss, extras = loss_of(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    results.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                results.append((loss.detach(), *accelerator.gather_for_metrics((extras["logits"].detach(), batch[1]))))
        model.eval()
        with torch.no_grad():
            results.append(loss_of(batch)[0])
        model.train()
    if directory is not None:
        accelerator.save_state(directory)
    return {
        "results": results,
        "state": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "generator": torch.get_rng_state(),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated with a remainder": {"gradient_accumulation_steps": 3, "rows": 60},
    "accumulated across epochs": {
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    },
    "bf16": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_training_ends_in_every_bit_where_accelerate_ends_and_no_batch_runs_twice(
    options: dict[str, Any], runs: list[Executor]
):
    expected = train(eager, **options)
    assert not runs
    assert_equal(expected, train(planned, **options))
    assert len(runs) == 16


def test_a_saved_state_is_loaded_under_a_plan(tmp_path: Path):
    for epochs in (1, 2):
        states = [train(wrap, epochs=epochs, directory=tmp_path / wrap.__name__) for wrap in (eager, planned)]
        assert_equal(*states)
    files = [load_file(tmp_path / wrap.__name__ / "model.safetensors") for wrap in (eager, planned)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    anew = train(planned, epochs=2)["state"]
    assert not all(torch.equal(anew[name], states[1]["state"][name]) for name in anew)


def test_a_scaler_is_followed_and_no_batch_runs_twice(runs: list[Executor]):
    def scaler() -> torch.amp.GradScaler:  # Accelerate has none on a CPU
        return torch.amp.GradScaler("cpu", init_scale=2.0**80, growth_interval=2)

    assert_equal(train(eager, scaler=scaler()), train(planned, scaler=scaler()))
    assert len(runs) == 16


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_plan_for_the_prepared_model_is_for_the_loop(precision: str, runs: list[Executor]):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(Net())
    program = capture(Workload(model, loss_fn, None, next(iter(loader(8)))))
    plan = Plan.traced(program.graph)
    if precision == "no":
        plan = best_plan(program.graph, profile(program), program.graph.static_bytes).plan
        assert plan.recomputed
    options = {"mixed_precision": precision}

    def with_plan(accelerator: accelerate.Accelerator, model: nn.Module) -> AcceleratedLoss:
        return plan_loss(accelerator, model, loss_fn, plan, other_shapes="error")

    assert_equal(train(eager, **options), train(with_plan, **options))
    assert {run.program.graph.digest for run in runs} == {program.graph.digest}
    with pytest.raises(PlanError, match="made for a batch of 8x4, 8; this is"):
        train(with_plan, rows=12, mixed_precision=precision)


def test_a_model_in_mixed_precision_is_copied_to_the_processes_that_tune(tmp_path: Path):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    workload = Workload(accelerator.prepare(Net()), loss_fn, None, next(iter(loader(8))))
    save_workload(workload, tmp_path / "step.live")
    copied = load_live_workload(tmp_path / "step.live")
    assert capture(copied).graph.digest == capture(workload).graph.digest


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def test_batches_of_many_lengths_run_in_the_sizes_of_the_buckets(runs: list[Executor]):
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(3)
    model = accelerator.prepare(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)))
    loss_of = plan_loss(accelerator, model, token_loss, buckets=autotune.Buckets([8, 16]))
    for length in (5, 7, 16, 11, 3):
        tokens = torch.randint(9, (2, length))
        batch = {"input_ids": tokens, "labels": tokens}
        loss = loss_of(batch)
        accelerator.backward(loss)
        assert torch.allclose(loss, token_loss(model, batch))
    assert len(set(runs)) == 2


def test_train_step_accepts_the_prepared_model_and_optimizer():
    def train_step(planned: bool) -> list[Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        torch.manual_seed(3)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        batches = list(loader(32))
        step = autotune.TrainStep(model, loss_fn, optimizer, batches[0]) if planned else None
        losses = []
        for batch in batches:
            if step is not None:
                loss, _ = step(batch)
            else:
                loss, _ = loss_fn(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return [losses, model.state_dict(), optimizer.state_dict()]

    assert_equal(train_step(False), train_step(True))


def prepared(**options: Any) -> tuple[accelerate.Accelerator, nn.Module]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    return accelerator, accelerator.prepare(Net())


def test_models_that_a_plan_cannot_run_are_refused_by_name():
    accelerator, model = prepared()
    with pytest.raises(ConfigError, match="did not prepare this Net"):
        plan_loss(accelerator, Net(), loss_fn)
    model.first.compile()
    with pytest.raises(ConfigError, match=r"first is compiled by torch\.compile"):
        plan_loss(accelerator, model, loss_fn)
    dispatched = accelerator.prepare(Net())
    add_hook_to_module(dispatched.last, AlignDevicesHook())
    with pytest.raises(ConfigError, match="last has Accelerate's hook AlignDevicesHook"):
        plan_loss(accelerator, dispatched, loss_fn)


def test_a_compiling_accelerator_is_refused_by_name():
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
    with pytest.raises(ConfigError, match="compiles models with EAGER"):
        plan_loss(accelerator, accelerator.prepare(Net()), loss_fn)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_distributed_trainings_that_a_plan_cannot_run_are_refused_by_name(kind: DistributedType):
    accelerator, model = prepared()
    accelerator.state._shared_state["distributed_type"] = kind
    with pytest.raises(ConfigError, match=f"trains with {kind.value}"):
        plan_loss(accelerator, model, loss_fn)


def test_an_unknown_precision_is_refused_by_name():
    accelerator, model = prepared()
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(ConfigError, match="mixed_precision is 'fp8'"):
        plan_loss(accelerator, model, loss_fn)


RANK = """
import os, sys
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
os.environ["ACCELERATE_USE_CPU"] = "true"
import torch
torch.set_num_threads(1)
import accelerate
from autotune.errors import ConfigError
from autotune.integrations.accelerate import plan_loss
from tests.integrations.test_accelerate import Net, eager, loss_fn, planned, train
from tests.integrations.trees import assert_equal
for options in ({"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}):
    assert_equal(train(eager, rows=52, **options), train(planned, rows=52, **options))
    print("equal on rank", torch.distributed.get_rank(), flush=True)
accelerator = accelerate.Accelerator(cpu=True)
try:
    plan_loss(accelerator, accelerator.prepare(Net()).module, loss_fn)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_ranks_train_to_the_bits_of_accelerate(free_port: int):
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(free_port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        printed, errors = process.communicate(timeout=300)
        lines = printed.splitlines()
        assert lines[:2] == [f"equal on rank {rank}"] * 2, errors[-3000:]
        assert lines[2].startswith("the accelerator did not prepare this Net")  # within DDP, it reduces nothing


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
