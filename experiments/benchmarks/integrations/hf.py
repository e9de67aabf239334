"""GPT-2 with dropout in the Hugging Face Trainer: accumulation over two batches, clipping, a warm-up and a cosine schedule."""

import tempfile
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

from autotune.integrations.hf import AutotuneTrainer
from autotune.records.plan_file import PlanFile
from autotune.workloads.workload import Workload
from experiments.benchmarks.integrations.record import STEPS, Record, Recorder

BATCH, TOKENS, WORDS, ACCUMULATED = 16, 96, 500, 2


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows whose next word depends on the last, so that the loss falls."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(WORDS, (STEPS * BATCH * ACCUMULATED, 1), generator=generator)
        self._rows = (starts + 7 * torch.arange(TOKENS)) % WORDS

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[row], "labels": self._rows[row]}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Pass the trainer's steps on to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._recorder.begin_step()

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self._recorder.add_gradients(model)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "grad_norm" in logs:
            self._recorder.losses.append(logs["loss"])
            self._recorder.norms.append(logs["grad_norm"])


def make_trainer(trainer: type[transformers.Trainer], folder: str, **options: Any) -> transformers.Trainer:
    """Return a trainer of a class, with its model."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=96, n_layer=3, n_head=3, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED, max_steps=STEPS,
        learning_rate=1e-3, warmup_steps=5, lr_scheduler_type="cosine", max_grad_norm=1.0, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Texts(), **options)


def factory() -> Workload:
    """Return the training step, to plan it."""
    with tempfile.TemporaryDirectory() as folder:
        return make_trainer(AutotuneTrainer, folder).workload()


def run(plan: PlanFile | None) -> Record:
    """Train under a plan, or without one in the plain trainer."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        options = {"callbacks": [Watch(recorder)]}
        trainer = (
            make_trainer(transformers.Trainer, folder, **options)
            if plan is None
            else make_trainer(AutotuneTrainer, folder, plan=plan, other_shapes="error", **options)
        )
        trainer.train()
        return recorder.finish(trainer.model, trainer.optimizer.optimizer)
