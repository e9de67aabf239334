"""Small trainings with the Hugging Face Trainer, plain and planned, with everything that they leave."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from autotune.capture.tracer import capture
from autotune.integrations.hf import PlannedTrainerMixin
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.auto import best_plan
from autotune.predict.simulate import simulate
from autotune.workloads.workload import Workload

Kind = type[Trainer]


class Texts(torch.utils.data.Dataset):
    """Rows of random tokens with labels."""

    def __init__(self, rows: int = 10, length: int = 12, classes: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self._tokens = torch.randint(5, 60, (rows, length), generator=generator)
        self._classes = torch.randint(classes, (rows,), generator=generator) if classes else None

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self._classes is not None:
            return {"input_ids": self._tokens[row], "labels": self._classes[row]}
        labels = self._tokens[row].clone()
        labels[: row % 5] = -100  # so that batches count different numbers of labels
        return {"input_ids": self._tokens[row], "labels": labels}


def gpt2(layers: int = 2) -> torch.nn.Module:
    """Return a small GPT-2 with dropout."""
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=layers, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    """Return a small BERT classifier with dropout, which takes no loss arguments."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@dataclass
class Record:
    """Everything that a training leaves."""

    log: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Return arguments of a short training that logs every step."""
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "learning_rate": 0.01,
        "max_grad_norm": 0.3, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **changes})


def planned(kind: Kind) -> Kind:
    """Return the planned class of a trainer's class."""
    return type(f"Planned{kind.__name__}", (PlannedTrainerMixin, kind), {})


def train(make: Callable[[], Trainer], **options: Any) -> Record:
    """Train, and record logs, parameters, optimizer state and generator."""
    torch.manual_seed(5)
    trainer = make()
    trainer.train(**options)
    return record(trainer)


def record(trainer: Trainer) -> Record:
    """Return logs without times, and every tensor that the training changed."""
    log = [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in trainer.state.log_history
    ]
    tensors = {f"model.{name}": tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    for number, state in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"optimizer.{number}.{name}": part for name, part in state.items() if torch.is_tensor(part)}
    tensors["generator"] = torch.get_rng_state()
    return Record(log, tensors)


TIMES = ("runtime", "per_second")
"""Ends of the log's names that differ between equal trainings."""


def differences(plain: Record, under_plan: Record) -> list[str]:
    """Name what differs in any bit."""
    names = [
        f"entry {number}"
        for number, pair in enumerate(zip(plain.log, under_plan.log, strict=False))
        if pair[0] != pair[1]
    ]
    if len(plain.log) != len(under_plan.log):
        names.append("number of log entries")
    if plain.tensors.keys() != under_plan.tensors.keys():
        names.append("names of tensors")
    return names + [
        name for name, tensor in plain.tensors.items()
        if name in under_plan.tensors and not torch.equal(tensor, under_plan.tensors[name])
    ]  # fmt: skip


def smaller_plan(workload: Workload) -> Plan:
    """Return a plan for three quarters of the bytes that the traced step has above its static ones."""
    graph = capture(workload).graph
    costs = Costs.unit(graph)
    traced = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    budget = graph.static_bytes + (traced - graph.static_bytes) * 3 // 4
    plan = best_plan(graph, costs, budget, accept_first=True).plan
    assert plan.recomputed
    return replace(plan, allocator="arena")
