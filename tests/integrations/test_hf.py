"""The Hugging Face Trainer under a plan: logs, parameters and optimizer are those of the plain Trainer, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BatchEncoding, Trainer

from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError, PlanError
from autotune.integrations import hf
from autotune.integrations.hf import AutotuneTrainer, PlannedTrainerMixin
from autotune.ir.plan import Plan
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import fuse
from autotune.runtime.executor import Executor
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.shapes.buckets import Buckets
from autotune.workloads.live_workload import load_live_workload, save_workload
from tests.integrations.hf_runs import (
    Kind,
    Record,
    Texts,
    arguments,
    bert,
    differences,
    gpt2,
    planned,
    smaller_plan,
    train,
)
from tests.support.checkout import run_python

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the plan is for a batch of", "ignore:.*is deprecated and will be removed:FutureWarning"
)


def make_trainer(
    kind: Kind,
    folder: Path,
    model: Callable[[], nn.Module] = gpt2,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """Return a trainer of a class; `options` are the trainer's own, `changes` those of its arguments."""
    options = {"train_dataset": Texts(16, classes=3 if model is bert else 0), **(options or {})}
    return kind(model(), arguments(folder, **changes), **options)


one_layer = partial(gpt2, 1)


def train_both(make: Callable[..., Trainer], kind: Kind = Trainer) -> tuple[Record, Record]:
    """Train plainly, and under a plan that recomputes."""
    plan = smaller_plan(make(planned(kind)).workload())

    def under_plan(*args: Any, **kwargs: Any) -> Trainer:
        return planned(kind)(*args, plan=plan, **kwargs)

    return train(lambda: make(kind)), train(lambda: make(under_plan))


EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize("model", [gpt2, pytest.param(bert, marks=pytest.mark.slow)])
def test_a_planned_training_leaves_every_bit_of_the_plain_one(model: Callable[[], nn.Module], tmp_path: Path):
    classes = 3 if model is bert else 0
    # ten rows end with a smaller batch
    options = {"train_dataset": Texts(10, classes=classes), "eval_dataset": Texts(6, classes=classes)}
    make = partial(
        make_trainer, folder=tmp_path, model=model, options=options, gradient_accumulation_steps=2, **EVALUATION
    )
    plain, under_plan = train_both(make)
    assert differences(plain, under_plan) == []
    assert len({entry["grad_norm"] for entry in under_plan.log if "grad_norm" in entry}) == 4
    assert len([entry for entry in under_plan.log if "eval_loss" in entry]) == 2


SETTINGS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "noise in the embeddings": {"neftune_noise_alpha": 5.0},
    "no clipping": {"max_grad_norm": 0.0},
    "several": {"bf16": True, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "optim": "adafactor"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_trainer_has_its_effect_under_a_plan(name: str, tmp_path: Path):
    plain, under_plan = train_both(partial(make_trainer, folder=tmp_path, **SETTINGS[name]))
    assert differences(plain, under_plan) == []
    has_effect = bool(differences(plain, train(partial(make_trainer, Trainer, tmp_path))))
    assert has_effect == (name != "gradient checkpointing")


@pytest.mark.slow
def test_a_plan_on_regions_trains_as_the_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CompiledRegion, "is_loaded", True)  # the regions' ops one by one: then every bit is eager's
    monkeypatch.setattr(CompiledRegion, "compile", lambda self: lambda tensors: self.region(*tensors))
    make = partial(make_trainer, folder=tmp_path, model=one_layer)
    graph = fuse(capture(make(planned(Trainer)).workload())).graph
    plan = replace(Plan.traced(graph), kernels="inductor", allocator="arena")

    def under_plan(*args: Any, **kwargs: Any) -> Trainer:
        return planned(Trainer)(*args, plan=plan, **kwargs)

    assert any(op.target == "autotune.kernels.fused" for op in graph.ops)
    assert differences(train(lambda: make(Trainer)), train(lambda: make(under_plan))) == []


class Weighted(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.linspace(0.5, 2, 64)
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight, reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class WeightedBelow(AutotuneTrainer):
    """The same loss in a subclass of the planned trainer."""

    compute_loss = Weighted.compute_loss


@pytest.mark.parametrize("kind", [pytest.param(planned(Weighted), marks=pytest.mark.slow), WeightedBelow])
def test_an_overridden_compute_loss_runs_under_the_plan(kind: Kind, tmp_path: Path):
    make = partial(make_trainer, folder=tmp_path, model=one_layer, num_train_epochs=1)
    graphs: list[Any] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def _close_plan(self) -> None:
            graphs.append(self._planned_loss.graph if self._planned_loss else None)
            super()._close_plan()

    assert differences(train(partial(make, Weighted)), train(partial(make, Watched))) == []
    assert graphs[-1] is not None


def encode(rows: list[dict[str, torch.Tensor]]) -> BatchEncoding:
    """Return a batch as tokenizers do."""
    return BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


@pytest.mark.slow
def test_a_loss_function_and_an_encoded_batch_run_under_the_plan(tmp_path: Path):
    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / num_items_in_batch

    options = {"compute_loss_func": loss_of, "data_collator": encode}
    assert differences(*train_both(partial(make_trainer, folder=tmp_path, options=options))) == []


class ReadsAttributes(Trainer):
    """A trainer whose loss reads the labels as an attribute of the inputs."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs.labels.flatten(), reduction="sum")
        return loss / num_items_in_batch


def test_a_loss_reads_the_attributes_of_an_encoded_batch(tmp_path: Path):
    options = {"data_collator": encode}
    make = partial(make_trainer, folder=tmp_path, model=one_layer, options=options, num_train_epochs=1)
    assert differences(train(partial(make, ReadsAttributes)), train(partial(make, planned(ReadsAttributes)))) == []


def without_dropout() -> nn.Module:
    model = gpt2(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_a_loss_reads_the_attributes_of_an_encoded_batch_that_is_padded(tmp_path: Path, runs: list[Executor]):
    make = partial(
        make_trainer, folder=tmp_path, model=without_dropout, options={"data_collator": encode}, num_train_epochs=1
    )
    plain = train(partial(make, ReadsAttributes))
    padded = train(partial(make, partial(planned(ReadsAttributes), buckets=Buckets([16]))))
    losses = [[entry["loss"] for entry in record.log if "loss" in entry] for record in (plain, padded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    described = [run.program.metas[value] for run in runs for value in run.program.batch]
    assert {meta.shape for meta in described if meta is not None and len(meta.shape) == 2} == {(4, 16)}


@pytest.mark.slow
def test_a_planned_training_resumes_from_a_checkpoint_where_the_plain_one_does(tmp_path: Path):
    def resumed(kind: Kind, folder: Path) -> Record:
        make = partial(make_trainer, kind, folder, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
        train(make)
        return train(make, resume_from_checkpoint=str(folder / "checkpoint-2"))

    plain = resumed(Trainer, tmp_path / "plain")
    plan = smaller_plan(make_trainer(AutotuneTrainer, tmp_path).workload())
    assert differences(plain, resumed(partial(AutotuneTrainer, plan=plan), tmp_path / "planned")) == []


@pytest.mark.slow
def test_adapters_of_peft_train_under_a_plan(tmp_path: Path):
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1))

    make = partial(make_trainer, folder=tmp_path, model=adapted)
    assert differences(*train_both(make)) == []
    with pytest.raises(ConfigError, match="gradient_checkpointing=True with PEFT is not supported"):
        make(AutotuneTrainer, gradient_checkpointing=True)


@pytest.mark.slow
def test_the_workload_of_a_trainer_is_the_step_that_it_trains(tmp_path: Path):
    trainer = make_trainer(AutotuneTrainer, tmp_path, one_layer, num_train_epochs=1)
    workload = trainer.workload()
    graph = capture(workload).graph
    assert (workload.optimizer, workload.model) == (None, trainer.model)
    assert trainer.state.log_history == []
    other = make_trainer(partial(AutotuneTrainer, plan=Plan.traced(graph)), tmp_path, one_layer, num_train_epochs=1)
    digests: list[str] = []
    close = other._close_plan
    other._close_plan = lambda: (
        (digests.append(other._planned_loss.graph.digest), close()) if other._planned_loss else None
    )
    train(lambda: other)
    assert digests == [graph.digest]


def test_the_workload_for_several_processes_has_the_loss_of_each_of_them(tmp_path: Path):
    trainer = make_trainer(AutotuneTrainer, tmp_path, one_layer)
    step = trainer.workload(ranks=2)
    losses = []
    for compute in (step.loss_fn, lambda model, batch: Trainer.compute_loss(trainer, model, **batch)):
        torch.manual_seed(1)
        losses.append(compute(step.model, step.batch).item())
    assert losses[0] == 2 * losses[1]
    with pytest.raises(ConfigError, match="ranks is 0; pass the number of processes"):
        trainer.workload(ranks=0)


def test_a_plan_that_one_of_several_processes_refuses_is_refused_with_the_ranks_of_its_workload():
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=2), _planned_loss=SimpleNamespace(graph=None))
    with pytest.raises(PlanError, match=r"^another graph; .*workload\(ranks=2\)$"), hf._checking_capture(trainer):
        raise PlanError("another graph")


def test_the_workload_of_a_trainer_with_buckets_has_their_largest_size(tmp_path: Path):
    trainer = make_trainer(partial(AutotuneTrainer, buckets=Buckets([16, 24])), tmp_path, one_layer)
    inputs = trainer.workload().batch["inputs"]
    assert {name: part.shape for name, part in inputs.items()} == dict.fromkeys(("input_ids", "labels"), (4, 24))


def make_sft(kind: Kind, folder: Path) -> Trainer:
    """Return a trainer of TRL for texts that are tokens already."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(word): word for word in range(64)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")
    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in Texts()])
    plain = arguments(folder, num_train_epochs=1)
    config = trl.SFTConfig(**{name: getattr(plain, name) for name in SFT_ARGUMENTS}, max_length=16, bf16=False)
    return kind(gpt2(1), config, train_dataset=rows, processing_class=tokenizer)


SFT_ARGUMENTS = (
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "logging_steps", "report_to", "disable_tqdm", "use_cpu",
    "save_strategy", "learning_rate", "max_grad_norm",
)  # fmt: skip


@pytest.mark.slow
def test_the_trainer_of_trl_is_refused_with_its_own_loss_and_equal_with_that_of_transformers(tmp_path: Path):
    trl = pytest.importorskip("trl")

    class Sft(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        compute_loss = Trainer.compute_loss

    with pytest.raises(CaptureError, match="compute_loss is that of SFTTrainer: override it"):
        train(partial(make_sft, planned(trl.SFTTrainer), tmp_path))
    assert differences(train(partial(make_sft, Sft, tmp_path)), train(partial(make_sft, planned(Sft), tmp_path))) == []


def test_the_number_of_labels_is_an_input_of_the_plan(tmp_path: Path):
    trainer = make_trainer(partial(AutotuneTrainer, other_shapes="error"), tmp_path, one_layer)
    trainer.create_optimizer()
    trainer.model.train()
    losses = []
    for count in (3, 7):
        batch = {name: part[None].repeat(2, 1) for name, part in Texts()[0].items()}
        losses.append(trainer.compute_loss(trainer.model, batch, num_items_in_batch=count).item())
    assert losses[0] / losses[1] == pytest.approx(7 / 3, rel=0.2)


@pytest.mark.slow
def test_the_loss_of_a_trainer_is_copied_to_another_process_without_its_data(tmp_path: Path):
    workload = make_trainer(AutotuneTrainer, tmp_path, bf16=True).workload()
    save_workload(workload, tmp_path / "step.live")
    copied = load_live_workload(tmp_path / "step.live")
    losses = []
    for step in (workload, copied):
        torch.manual_seed(1)
        losses.append(step.loss_fn(step.model, step.batch))
    assert torch.equal(*losses)
    assert copied.loss_fn._trainer.train_dataset is None
    assert workload.loss_fn._trainer.train_dataset is not None


def test_the_loss_is_copied_without_the_process_group_of_distributed_training(tmp_path: Path):
    trainer = make_trainer(AutotuneTrainer, tmp_path, one_layer)
    workload = trainer.workload()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer.model_wrapped = nn.parallel.DistributedDataParallel(trainer.model)
        save_workload(workload, tmp_path / "step.live")
    finally:
        torch.distributed.destroy_process_group()
    copied = load_live_workload(tmp_path / "step.live")
    assert copied.loss_fn._trainer.model_wrapped is copied.model


def test_an_evaluation_releases_the_memory_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    released_in_training: list[bool] = []
    monkeypatch.setattr(
        PlannedLoss, "release_memory", lambda planned: released_in_training.append(planned.model.training)
    )
    options = {"eval_dataset": Texts(4)}
    make_trainer(AutotuneTrainer, tmp_path, one_layer, options, num_train_epochs=1, **EVALUATION).train()
    assert released_in_training == [False, False]


class TakesKeywords(Trainer):
    """A trainer whose loss passes everything beside the outputs on by name."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def test_an_evaluation_calls_compute_loss_as_the_plain_trainer_does(tmp_path: Path):
    losses = []
    for kind in (TakesKeywords, planned(TakesKeywords)):
        torch.manual_seed(5)
        trainer = make_trainer(kind, tmp_path, one_layer, {"eval_dataset": Texts(4)})
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_a_workload_is_returned_without_an_evaluation_before_it(tmp_path: Path):
    options = {"eval_dataset": Texts(), "compute_metrics": lambda outputs: pytest.fail("an evaluation ran")}
    trainer = make_trainer(AutotuneTrainer, tmp_path, one_layer, options, eval_on_start=True, **EVALUATION)
    assert trainer.workload().batch["inputs"]
    assert trainer.args.eval_on_start


def test_a_budget_is_that_of_a_plan_that_is_made_at_the_first_step(tmp_path: Path):
    for options in ({"budget": "65%"}, {"plan": "plans/some.json", "budget": "65%"}):
        with pytest.raises(ConfigError, match="pass plan='auto', or leave budget out"):
            make_trainer(partial(AutotuneTrainer, **options), tmp_path)
    make_trainer(partial(AutotuneTrainer, plan="auto"), tmp_path)  # for 65 %


class ReadsMetrics(Trainer):
    """A trainer that reads a metric in its loss."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        self.metric = outputs.logits.mean().item()
        return (loss, outputs) if return_outputs else loss


class KeepsMetrics(Trainer):
    """A trainer that keeps a metric in its loss."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        self.metric = outputs.logits.mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [ReadsMetrics, pytest.param(KeepsMetrics, marks=pytest.mark.slow)])
def test_a_metric_in_compute_loss_is_refused_and_not_lost(kind: Kind, tmp_path: Path):
    with pytest.raises(CaptureError, match=r"test_hf\.py"):
        make_trainer(planned(kind), tmp_path, one_layer).train()


class SetsLoss(Weighted):
    """A trainer that chooses its loss when it is created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss = partial(Weighted.compute_loss, self)


def test_a_loss_that_is_set_on_the_trainer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"compute_loss of PlannedSetsLoss is set on the object.*of the class"):
        make_trainer(planned(SetsLoss), tmp_path, one_layer)
    trainer = make_trainer(AutotuneTrainer, tmp_path, one_layer)
    trainer.compute_loss = partial(Weighted.compute_loss, trainer)
    with pytest.raises(ConfigError, match="compute_loss of AutotuneTrainer is set on the object"):
        trainer.train()


class Scaled(Trainer):
    """A trainer whose loss has a further argument."""

    def compute_loss(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        return scale * super().compute_loss(*args, **kwargs)


def test_a_further_argument_of_compute_loss_is_refused_in_training_and_passed_on_in_evaluation(tmp_path: Path):
    trainer = make_trainer(planned(Scaled), tmp_path, one_layer)
    batch = {name: part[None] for name, part in Texts()[0].items()}
    with pytest.raises(ConfigError, match="training_step of PlannedScaled passes scale to compute_loss"):
        trainer.compute_loss(trainer.model.train(), batch, scale=2.0)
    with torch.no_grad():
        losses = [trainer.compute_loss(trainer.model.eval(), batch, scale=scale) for scale in (1.0, 2.0)]
    assert losses[1] == 2 * losses[0]


def test_a_classifier_that_chooses_its_loss_keeps_the_mode_of_each_module(tmp_path: Path):
    trainer = make_trainer(AutotuneTrainer, tmp_path, bert)
    model = trainer.model.train()
    model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    trainer._choose_problem_type(model, encode([Texts(4, classes=3)[row] for row in range(4)]))
    assert model.config.problem_type == "single_label_classification"
    assert [module.training for module in model.modules()] == modes


class OwnStep(AutotuneTrainer):
    """A trainer whose steps call the model directly."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


class EvalModeStep(AutotuneTrainer):
    """A trainer whose steps run the model in eval mode, as some do to keep dropout away."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model.eval(), self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class OutputsStep(AutotuneTrainer):
    """A trainer whose steps ask for the model's outputs."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss, _ = self.compute_loss(model.train(), self._prepare_inputs(inputs), return_outputs=True)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (EvalModeStep, r"EvalModeStep runs \w+ in eval mode.*call model\.train\(\)"),
        (OutputsStep, r"OutputsStep calls self\.compute_loss with return_outputs=True"),
    ],
)
def test_a_training_step_whose_loss_runs_without_the_plan_is_refused_with_the_reason(
    kind: Kind, reason: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=reason):
        make_trainer(kind, tmp_path, one_layer).train()


def test_a_training_step_without_compute_loss_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"OwnStep does not call self\.compute_loss"):
        make_trainer(OwnStep, tmp_path).train()


@pytest.mark.slow
def test_a_plan_of_another_batch_is_refused(tmp_path: Path):
    plan = smaller_plan(make_trainer(AutotuneTrainer, tmp_path).workload())
    with pytest.raises(PlanError):
        make_trainer(partial(AutotuneTrainer, plan=plan), tmp_path, bert).train()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch_compile": True}, "torch_compile=True is not supported under a plan"),
        ({"optim": "lomo"}, "optim='lomo' is not supported under a plan"),
    ],
)
def test_an_argument_that_a_plan_cannot_follow_is_refused(changes: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        make_trainer(AutotuneTrainer, tmp_path, **changes)


def test_a_compilation_that_accelerate_launch_chose_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with pytest.raises(ConfigError, match=r"dynamo_backend='INDUCTOR' of Accelerate, .* is not supported under a plan"):
        make_trainer(AutotuneTrainer, tmp_path)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_sharded_training_is_refused_by_name(name: str, tmp_path: Path):
    class Sharded(PlannedTrainerMixin, Trainer):
        def add_callback(self, callback: Any) -> None:
            setattr(self.args, name, "full_shard")  # the trainer itself needs ranks or a library for it
            self.args.fsdp_config = {}
            super().add_callback(callback)

    with pytest.raises(ConfigError, match=f"{name}='full_shard' is not supported"):
        make_trainer(Sharded, tmp_path)


RANK = """
import os
import sys
from functools import partial
from pathlib import Path
import torch
from transformers import Trainer
from autotune.integrations.hf import AutotuneTrainer
from tests.integrations.hf_runs import differences, train
from tests.integrations.test_hf import make_trainer
torch.set_num_threads(1)
make = partial(make_trainer, folder=Path(sys.argv[1]), per_device_train_batch_size=2, gradient_accumulation_steps=2,
    ddp_find_unused_parameters=False)
found = differences(train(partial(make, Trainer)), train(partial(make, AutotuneTrainer)))
Path(sys.argv[1], f"rank {torch.distributed.get_rank()}").write_text(str(found))
torch.distributed.destroy_process_group()
os._exit(0)  # threads of gloo sometimes abort an interpreter that ends by itself
"""


@pytest.mark.slow
def test_two_ranks_train_under_a_plan_to_the_bits_of_the_plain_trainer(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    launch = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = run_python(*launch, script, tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert [(tmp_path / f"rank {rank}").read_text() for rank in range(2)] == ["[]", "[]"]
