"""Workloads whose captured step is wrong by a little or by rounding alone, for the numerical gate."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune import Workload
from autotune.capture.program import Program, reads
from autotune.capture.tracer import capture
from autotune.measure.worker import planned_steps as procedure
from autotune.workloads.factory import load_workload
from tests.support.small import make, mlp

torch.set_num_threads(1)


def small_mlp(loss_scale: float = 1.0) -> Workload:
    """Two linear layers whose loss is multiplied by a number."""
    return with_loss_scale(make(mlp), loss_scale)


def tiny_gpt2(loss_scale: float = 1.0) -> Workload:
    """One layer of GPT-2 with AdamW."""
    made = load_workload("gpt2", {"batch": 2, "tokens": 16, "depth": 1, "width": 32, "vocabulary": 64})
    return with_loss_scale(made, loss_scale)


def scaled(factory: str, parameter: str, loss_scale: float, factor: float = 1.001) -> Workload:
    """A workload of this file whose captured step scales the gradient of one parameter."""
    procedure.capture = scaling_capture(parameter, factor)
    return {"mlp": small_mlp, "gpt2": tiny_gpt2}[factory](loss_scale)


def with_loss_scale(workload: Workload, loss_scale: float) -> Workload:
    """Multiply the loss by a number."""
    own = workload.loss_fn
    assert own is not None
    return replace(workload, loss_fn=lambda model, batch: own(model, batch) * loss_scale)


def scaling_capture(parameter: str, factor: float) -> Callable[..., Program]:
    """Capture as usual, then multiply one parameter's gradient, right where it is made."""

    def captured(workload: Workload, name: str = "", **options: Any) -> Program:
        program = capture(workload, name, **options)
        assert program.updates is not None
        calls = list(program.calls)
        (update,) = (c for c in calls if c.target == program.updates.update and c.args[0] == parameter)
        (value,) = reads(update.args[2])
        op = program.graph.producer[value]
        assert op is not None
        own = calls[op]

        def multiplied(*args: Any, **kwargs: Any) -> Any:
            made = own.target(*args, **kwargs)
            (made if own.outputs == value else made[own.outputs.index(value)]).mul_(factor)
            return made

        calls[op] = replace(own, target=multiplied)
        return replace(program, calls=tuple(calls))

    return captured


def language_model(name: str) -> Workload:
    """A tiny causal language model of transformers, with an attention mask of ones."""
    import transformers

    torch.manual_seed(0)
    # below 64 tokens the kernels that eager and the captured step choose make the same bits
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, max_position_embeddings=64, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    tokens = torch.randint(64, (2, 65))
    batch = {"input_ids": tokens[:, :-1], "attention_mask": torch.ones(2, 64, dtype=torch.long)}
    return Workload(model, next_token_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), (batch, tokens[:, 1:]))


def next_token_loss(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    """Cross entropy of each next token."""
    inputs, following = batch
    return F.cross_entropy(model(**inputs).logits.flatten(0, 1), following.flatten())


def transposed_volumes() -> Workload:
    """A volume through convolutions and back, norms between them: AdamW moves biases whose gradient is rounding alone."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
        nn.ConvTranspose3d(4, 2, 2, stride=2), nn.GroupNorm(1, 2), nn.Conv3d(2, 1, 1),
    )  # fmt: skip
    batch = torch.randn(2, 2, 8, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, lambda model, images: model(images).square().mean(), optimizer, batch)


def scaled_up() -> Workload:
    """Maps scaled up bilinearly, with a norm behind a biased convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Upsample(scale_factor=3.0, mode="bilinear"),
        nn.Conv2d(8, 4, 3),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, lambda model, images: model(images).square().mean(), optimizer, torch.randn(2, 3, 10, 10))
