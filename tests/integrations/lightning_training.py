"""A small training in Lightning, of which every bit can be compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET: Mapping[str, Any] = {
    "accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "log_every_n_steps": 1,
}  # fmt: skip


class Net(pl.LightningModule):
    """A net that draws random numbers, changes buffers, reads a weight twice, and logs in its step."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.automatic_optimization = not manual

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.shared(torch.relu(self.shared(self.first(inputs)))))
        return self.last(self.dropout(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        hits = logits.argmax(1) == batch[1]
        self.log_dict({"accuracy": hits.float().mean(), "rows": float(len(hits))}, on_step=True)
        return {"loss": loss, "hits": hits}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Metrics(Logger):
    """A logger that keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def loader(rows: int = 30, batch: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch)


def train(
    callbacks: Sequence[pl.Callback] = (),
    build: Callable[[], pl.LightningModule] = Net,
    ckpt_path: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train; return all that the training leaves: counters, logged values, tensors of model, optimizers and generator."""
    pl.seed_everything(3, verbose=False)
    net = build()
    logger = Metrics()
    rows = options.pop("rows", 30)
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 2, **options}, logger=logger, callbacks=list(callbacks))
    trainer.fit(net, loader(rows), loader(16), ckpt_path=ckpt_path)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "counters": (trainer.global_step, trainer.current_epoch, trainer.num_training_batches),
        "logged": logger.lines,
        "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "state": net.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "gradients": {name: parameter.grad for name, parameter in net.named_parameters()},
        "generator": torch.get_rng_state(),
        "scaler": scaler.state_dict() if scaler is not None else None,
    }
