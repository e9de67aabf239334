"""A convolution net in Lightning: accumulation over two batches, clipping, logged values, a schedule per step."""

import itertools
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from autotune.integrations.lightning import PlanCallback, workload
from autotune.records.plan_file import PlanFile
from autotune.workloads.workload import Workload
from experiments.benchmarks.integrations.record import STEPS, Record, Recorder

BATCH, PIXELS, CHANNELS, CLASSES, ACCUMULATED = 16, 32, 32, 10, 2


class Net(pl.LightningModule):
    """Six convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, *[CHANNELS] * 6)
        blocks = [
            nn.Sequential(nn.Conv2d(size, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.1))
            for size, channels in itertools.pairwise(sizes)
        ]
        self.layers = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss, and log it with the accuracy."""
        logits = self.layers(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=False)
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watch(pl.Callback):
    """Pass the trainer's steps on to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Begin a step with its first batch."""
        batch_idx = arguments[-1]
        if batch_idx % ACCUMULATED == 0:
            self._recorder.begin_step()

    def on_before_optimizer_step(self, _: pl.Trainer, module: pl.LightningModule, *__: Any) -> None:
        """Record the gradients before they are clipped, and their norm."""
        self._recorder.add_gradients(module)
        norms = [parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]
        self._recorder.norms.append(torch.stack(norms).norm().item())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the loss that the trainer logged for the step's last batch."""
        if len(self._recorder.norms) > len(self._recorder.losses):
            self._recorder.losses.append(trainer.callback_metrics["loss"].item())


def batches() -> "torch.utils.data.DataLoader[Any]":
    """Return random images whose mean colour depends on their class, so that the loss falls."""
    generator = torch.Generator().manual_seed(0)
    count = STEPS * BATCH * ACCUMULATED
    labels = torch.randint(CLASSES, (count,), generator=generator)
    colours = torch.randn(CLASSES, 3, 1, 1, generator=generator)
    images = colours[labels] + torch.randn(count, 3, PIXELS, PIXELS, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=BATCH)


def factory() -> Workload:
    """Return the training step, to plan it."""
    return workload(Net(), next(iter(batches())))


def run(plan: PlanFile | None) -> Record:
    """Train under a plan, or without one."""
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    recorder = Recorder()
    torch.manual_seed(0)
    net = Net()
    planned = [] if plan is None else [PlanCallback(plan, other_shapes="error")]
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=ACCUMULATED, gradient_clip_val=1.0, log_every_n_steps=1,
        callbacks=[*planned, Watch(recorder)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, batches())
    return recorder.finish(net, trainer.optimizers[0])
