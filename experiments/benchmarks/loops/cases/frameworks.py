"""Loops of transformers, TRL, Lightning and Accelerate."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, run, state
from experiments.benchmarks.loops.ways import SmallPlans, Way

Tensors = Iterator[torch.Tensor]


class _Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (row + 7 * torch.arange(16)) % 50
        return {"input_ids": tokens, "labels": tokens}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def _logs(trainer: Any) -> Tensors:
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    for entry in trainer.state.log_history:
        yield torch.tensor([entry[key] for key in keys if key in entry], dtype=torch.float64)
    yield torch.tensor(trainer.state.global_step)


def _trainer(way: Way, folder: str, model: nn.Module | None = None, **changes: Any) -> Any:
    """Return the plain Trainer, or the one under a plan."""
    import transformers

    from autotune.integrations.hf import AutotuneTrainer

    arguments = transformers.TrainingArguments(
        folder,
        **{
            "per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "report_to": [], "use_cpu": True,
            "save_strategy": "no", "disable_tqdm": True, "dataloader_drop_last": True, **changes,
        },
    )  # fmt: skip
    model, data = model or _gpt2(), {"train_dataset": _Texts(), "eval_dataset": _Texts()}
    if way.is_planned:
        return AutotuneTrainer(model, arguments, **data, plan=SmallPlans())
    return transformers.Trainer(model, arguments, **data)


def _trained(way: Way, model: nn.Module | None = None, **changes: Any) -> Tensors:
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(way, folder, model, **changes)
        trainer.train()
        yield from _logs(trainer)
        yield from state(trainer.model, trainer.optimizer.optimizer)


def drop_in_loss_trainer(way: Way) -> Tensors:
    """Train with the Trainer: clipping, a schedule, a logged norm, evaluation in each epoch."""
    yield from _trained(way, num_train_epochs=2, eval_strategy="epoch", max_grad_norm=0.1)


def drop_in_loss_trainer_accumulation(way: Way) -> Tensors:
    """Accumulate in the Trainer, with a remainder and a smaller last batch."""
    yield from _trained(way, gradient_accumulation_steps=4, dataloader_drop_last=False)


def drop_in_loss_trainer_accumulation_two_epochs(way: Way) -> Tensors:
    """Accumulate in the Trainer over two epochs."""
    yield from _trained(way, gradient_accumulation_steps=4, num_train_epochs=2)


def hf_trainer_gradient_checkpointing_argument(way: Way) -> Tensors:
    """Ask the Trainer for gradient checkpointing."""
    yield from _trained(way, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


def hf_trainer_bf16_argument(way: Way) -> Tensors:
    """Ask the Trainer for bf16."""
    yield from _trained(way, bf16=True)


def hf_trainer_label_smoothing(way: Way) -> Tensors:
    """Ask the Trainer for label smoothing."""
    yield from _trained(way, label_smoothing_factor=0.1)


def peft_trainer(way: Way) -> Tensors:
    """Train LoRA adapters in the Trainer."""
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    yield from _trained(way, peft.get_peft_model(_gpt2(), lora))


def hf_trainer_checkpoint_resume(way: Way) -> Tensors:
    """Stop the Trainer at a checkpoint, and resume with new objects."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
        trainer = _trainer(way, folder, **changes)
        trainer.train()
        yield from _logs(trainer)
        torch.manual_seed(99)
        again = _trainer(way, folder, **changes)
        again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
        yield from _logs(again)
        yield from state(again.model, again.optimizer.optimizer)


def _resume_part(_: int, way: Way, folder: str, resumes: bool) -> None:
    """Train to the end and save checkpoints, or resume from one; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(5 + resumes)
    trainer = _trainer(way, folder, save_strategy="steps", save_steps=2, num_train_epochs=2)
    trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4") if resumes else None)
    results = [*_logs(trainer), *state(trainer.model, trainer.optimizer.optimizer)]
    torch.save([part.detach() for part in results], Path(folder) / f"{resumes}.pt")


def hf_trainer_resume_in_another_process(way: Way) -> Tensors:
    """Resume the Trainer in another process."""
    with tempfile.TemporaryDirectory() as folder:
        for resumes in (False, True):
            spawn(_resume_part, (way, folder, resumes))
            yield from torch.load(Path(folder) / f"{resumes}.pt")


def _own_training_step(way: Way, accumulate: int = 1, epochs: int = 1, **changes: Any) -> Tensors:
    """Train in a Trainer whose training_step runs a `TrainStep`, as a user may write it."""
    import transformers

    class StepTrainer(transformers.Trainer):
        step: Any = None

        def training_step(self, model: Any, inputs: Any, *_: Any) -> torch.Tensor:
            model.train()
            if self.step is None:
                self.step = way.step(
                    model, lambda m, b: m(**b).loss, self.optimizer, dict(inputs), accumulate=accumulate
                )
            return self.step(dict(inputs))

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=epochs, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, dataloader_drop_last=True, gradient_accumulation_steps=accumulate,
            lr_scheduler_type="constant", max_grad_norm=0.0, **changes,
        )  # fmt: skip
        trainer = StepTrainer(_gpt2(), arguments, train_dataset=_Texts())
        trainer.train()
        yield from (torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
        yield from state(trainer.model, trainer.optimizer.optimizer)


def hf_trainer_subclass(way: Way) -> Tensors:
    """Run a `TrainStep` in the training_step of a Trainer's subclass."""
    yield from _own_training_step(way)


def hf_trainer_subclass_no_clip_early_updates(way: Way) -> Tensors:
    """Run a `TrainStep` with early updates in a Trainer, with another optimizer."""
    yield from _own_training_step(way, optim="sgd")


def hf_trainer_subclass_accumulation(way: Way) -> Tensors:
    """Run a `TrainStep` that accumulates in a Trainer, with a remainder."""
    yield from _own_training_step(way, accumulate=4)


def hf_trainer_subclass_accumulation_two_epochs(way: Way) -> Tensors:
    """Run a `TrainStep` that accumulates in a Trainer, over two epochs with a remainder each."""
    yield from _own_training_step(way, accumulate=4, epochs=2)


def trl_sft_trainer(way: Way) -> Tensors:
    """Train with TRL's SFTTrainer and its own loss, which keeps metrics."""
    yield from _sft(way, own_loss=True)


def trl_sft_trainer_with_the_loss_of_transformers(way: Way) -> Tensors:
    """Train with TRL's SFTTrainer and the loss of the Trainer."""
    yield from _sft(way, own_loss=False)


def _sft(way: Way, own_loss: bool) -> Tensors:
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Trainer

    from autotune.integrations.hf import PlannedTrainerMixin

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="b", unk_token="[UNK]")
    losses = {} if own_loss else {"compute_loss": Trainer.compute_loss}
    kind = type("Sft", (PlannedTrainerMixin, trl.SFTTrainer) if way.is_planned else (trl.SFTTrainer,), losses)
    options = {"plan": SmallPlans()} if way.is_planned else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            folder, per_device_train_batch_size=2, max_steps=3, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=16,
        )  # fmt: skip
        data = Dataset.from_dict({"text": ["a b a b a b", "b b a a b a"] * 4})
        trainer = kind(_gpt2(), args=arguments, train_dataset=data, processing_class=tokenizer, **options)
        trainer.train()
        yield from _logs(trainer)
        yield from state(trainer.model, trainer.optimizer.optimizer)


def _lightning(way: Way, manual: bool, resumes: bool = False, **options: Any) -> Tensors:
    import lightning.pytorch as pl

    from autotune.integrations.lightning import PlanCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization, self.seen = net(), not manual, []

        def compute_loss(self, batch: Any) -> torch.Tensor:
            return loss_fn(self.net, batch)

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.compute_loss(batch)
            self.log("loss", loss)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("validation", self.compute_loss(batch))

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append(torch.tensor([self.global_step, self.trainer.callback_metrics["loss"]]))

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def fit(module: Any, epochs: int, checkpoint: str | None = None) -> Any:
        callbacks = [PlanCallback(SmallPlans(), loss="compute_loss")] if way.is_planned else []
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(
            module,
            torch.utils.data.DataLoader(batches(7), batch_size=None),
            torch.utils.data.DataLoader(batches(2, seed=9), batch_size=None),
            ckpt_path=checkpoint,
        )
        return trainer

    module = Module()
    trainer = fit(module, 2)
    if resumes:
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(f"{folder}/last.ckpt")
            seen, module = module.seen, Module()
            trainer = fit(module, 3, f"{folder}/last.ckpt")
            yield from seen
    yield from module.seen
    yield torch.tensor([trainer.global_step, trainer.callback_metrics["validation"]])
    yield from state(module, trainer.optimizers[0])


def drop_in_loss_lightning(way: Way) -> Tensors:
    """Train in Lightning: clipping, accumulation with a remainder, a schedule, validation, logs."""
    yield from _lightning(way, manual=False, gradient_clip_val=0.1, accumulate_grad_batches=3)


def lightning_manual_optimization(way: Way) -> Tensors:
    """Optimize manually in Lightning."""
    yield from _lightning(way, manual=True)


def lightning_checkpoint_resume(way: Way) -> Tensors:
    """Resume Lightning's training from a checkpoint, with new objects."""
    yield from _lightning(way, manual=False, resumes=True)


def lightning_mixed_precision(way: Way) -> Tensors:
    """Train in Lightning with bf16-mixed."""
    yield from _lightning(way, manual=False, precision="bf16-mixed")


def lightning_optimizer_passed_as_it_is(way: Way) -> Tensors:
    """Pass Lightning's optimizer to a step."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model, data = net(), batches()
    optimizer = adamw(model)
    wrapped = LightningOptimizer(optimizer) if way.is_planned else optimizer
    yield from run(way.step(model, loss_fn, wrapped, data[0]), data)
    yield from state(model, optimizer)


def _accelerated(way: Way, steps: bool = False, **options: Any) -> Tensors:
    """Train with Accelerate, with a planned loss or a planned step."""
    import accelerate
    from accelerate.state import AcceleratorState

    from autotune.integrations.accelerate import plan_loss

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = net()
    optimizer = adamw(model)
    model, prepared = accelerator.prepare(model, optimizer)
    data = batches(5)
    if steps:
        yield from run(way.step(model, loss_fn, prepared, data[0]), data)
    else:
        planned = (
            plan_loss(accelerator, model, loss_fn, SmallPlans()) if way.is_planned else lambda b: loss_fn(model, b)
        )
        for batch in data:
            with accelerator.accumulate(model):
                loss = planned(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    yield accelerator.clip_grad_norm_(model.parameters(), 0.1)
                prepared.step()
                prepared.zero_grad()
                yield loss
    yield from state(model, optimizer)


def accelerate_accumulation(way: Way) -> Tensors:
    """Accumulate and clip with Accelerate, with a remainder."""
    yield from _accelerated(way, gradient_accumulation_steps=2)


def accelerate_mixed_precision_bf16(way: Way) -> Tensors:
    """Train with Accelerate's bf16, with batch norm."""
    yield from _accelerated(way, mixed_precision="bf16")


def accelerate_prepared_optimizer_passed_as_it_is(way: Way) -> Tensors:
    """Pass Accelerate's model and optimizer to a step."""
    yield from _accelerated(way, steps=True)


def accelerate_unwrapped(way: Way) -> Tensors:
    """Pass the optimizer within Accelerate's to a step."""
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model, data = accelerate.Accelerator(cpu=True), net(), batches()
    optimizer = accelerator.prepare(adamw(model)).optimizer
    yield from run(way.step(model, loss_fn, optimizer, data[0]), data)
    yield from state(model, optimizer)


def accelerate_optimizer_after_the_refusal(way: Way) -> Tensors:
    """Capture a step with Accelerate's optimizer, drop the step, and train in plain PyTorch."""
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model, data = accelerate.Accelerator(cpu=True), net(), batches()
    optimizer = accelerator.prepare(adamw(model))
    if way.is_planned:
        way.step(model, loss_fn, optimizer, data[0]).close()
    for batch in data:
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from state(model, optimizer.optimizer)


CASES = (
    drop_in_loss_trainer, drop_in_loss_trainer_accumulation, drop_in_loss_trainer_accumulation_two_epochs,
    hf_trainer_gradient_checkpointing_argument, hf_trainer_bf16_argument, hf_trainer_label_smoothing, peft_trainer,
    hf_trainer_checkpoint_resume, hf_trainer_resume_in_another_process, hf_trainer_subclass,
    hf_trainer_subclass_no_clip_early_updates, hf_trainer_subclass_accumulation,
    hf_trainer_subclass_accumulation_two_epochs, trl_sft_trainer, trl_sft_trainer_with_the_loss_of_transformers,
    drop_in_loss_lightning, lightning_manual_optimization, lightning_checkpoint_resume, lightning_mixed_precision,
    lightning_optimizer_passed_as_it_is, accelerate_accumulation, accelerate_mixed_precision_bf16,
    accelerate_prepared_optimizer_passed_as_it_is, accelerate_unwrapped, accelerate_optimizer_after_the_refusal,
)  # fmt: skip
