"""A convolution net in a loop with Accelerate: bf16, accumulation over two batches, clipping."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from autotune.integrations.accelerate import plan_loss
from autotune.records.plan_file import PlanFile
from autotune.workloads.workload import Workload
from experiments.benchmarks.integrations.lightning import ACCUMULATED, Net, batches
from experiments.benchmarks.integrations.record import Record, Recorder


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch of images and labels."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_accelerator() -> Accelerator:
    """Return the accelerator of the training and of its plan."""
    return Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED)


def factory() -> Workload:
    """Return the training step, to plan it."""
    return Workload(make_accelerator().prepare(Net().layers), loss_fn, None, next(iter(batches())))


def run(plan: PlanFile | None) -> Record:
    """Train under a plan, or without one."""
    recorder = Recorder()
    accelerator = make_accelerator()
    torch.manual_seed(0)
    model = Net().layers
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batches())
    planned = None if plan is None else plan_loss(accelerator, model, loss_fn, plan, other_shapes="error")
    for number, batch in enumerate(loader):
        if number % ACCUMULATED == 0:
            recorder.begin_step()
        with accelerator.accumulate(model):
            loss = loss_fn(model, batch) if planned is None else planned(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                recorder.add_gradients(model)
                recorder.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                recorder.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        del loss
    if planned is not None:
        planned.close()
    return recorder.finish(model, optimizer.optimizer)
