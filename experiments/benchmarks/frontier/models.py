"""Models of the frontier, by name: workloads of the zoo, and three that the zoo does not have.

The factories of this file have the zoo's arguments that the frontier needs. Weights and data are random.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from autotune.workloads.zoo.assembly import Drawn, assemble, count_heads, import_transformers
from autotune.workloads.zoo.gpt2 import next_token_loss

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("resnet18", {"batch": 10}),
    "resnet50": ("resnet50", {"batch": 8}),
    "resnet152": ("resnet152", {"batch": 2}),
    "mobilenet_v2": ("mobilenet_v2", {"batch": 8}),
    "vit": ("vit", {"batch": 8}),
    "gpt2": ("gpt2", {"batch": 8}),
    "gpt2-dropout": ("gpt2", {"batch": 8, "dropout": 0.1}),
    "bert": ("bert", {"batch": 8}),
    "lstm": ("lstm", {"batch": 32}),
    "llama": ("llama", {"batch": 4}),
    "t5": ("t5", {"batch": 8}),
    "unet": ("unet", {"batch": 4}),
}
"""Factory and arguments of each model."""
TINY_TEXT: dict[str, Any] = {"batch": 2, "tokens": 16, "depth": 2, "width": 32, "vocabulary": 64}
TINY: dict[str, dict[str, Any]] = {
    "llama": TINY_TEXT,
    "t5": TINY_TEXT,
    "unet": {"batch": 2, "size": 16, "width": 8},
}
"""Arguments with which the factories of this file make a model of milliseconds."""
CONVOLUTIONS = ("resnet18", "resnet50", "resnet152", "mobilenet_v2", "unet")
"""Factories of convolution networks, which plans run in channels_last as well."""


def llama(
    *, batch: int = 4, tokens: int = 256, depth: int = 6, width: int = 384, vocabulary: int = 8192, seed: int = 0
) -> Workload:
    """Return a Llama-like decoder: RMSNorm, rotary positions, gated layers, one key head for each three query heads.

    Where the number of query heads is no multiple of three, each has a key head of its own.
    """

    def draw() -> Drawn:
        library = import_transformers()
        heads = count_heads(width)
        config = library.LlamaConfig(
            num_hidden_layers=depth, hidden_size=width, intermediate_size=8 * width // 3, num_attention_heads=heads,
            num_key_value_heads=heads if heads % 3 else heads // 3, max_position_embeddings=tokens, vocab_size=vocabulary,
            bos_token_id=0, eos_token_id=1, use_cache=False, attn_implementation="eager",
        )  # fmt: skip
        text = torch.randint(vocabulary, (batch, tokens + 1))
        return library.LlamaForCausalLM(config), (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return assemble(draw, next_token_loss, dtype="float32", optimizer="adamw", seed=seed, device="cpu")


def t5(
    *, batch: int = 8, tokens: int = 128, depth: int = 4, width: int = 384, vocabulary: int = 8192, seed: int = 0
) -> Workload:
    """Return a T5-like encoder and decoder, `depth` layers each, with relative positions and without dropout."""

    def draw() -> Drawn:
        library = import_transformers()
        heads = count_heads(width)
        config = library.T5Config(
            num_layers=depth, d_model=width, d_kv=width // heads, d_ff=4 * width, num_heads=heads, dropout_rate=0.0,
            vocab_size=vocabulary, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
            attn_implementation="eager",
        )  # fmt: skip
        source, target = (torch.randint(1, vocabulary, (batch, tokens)) for _ in range(2))
        return library.T5ForConditionalGeneration(config), (source, target)

    return assemble(draw, translation_loss, dtype="float32", optimizer="adamw", seed=seed, device="cpu")


def translation_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of the target's tokens; `batch` holds source and target of shape (batch, tokens)."""
    source, target = batch
    logits = model(input_ids=source, decoder_input_ids=target[:, :-1].contiguous()).logits
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


class UNetBlock(torch.nn.Module):
    """Two convolutions of 3x3, each with group normalization and SiLU, around a residual connection."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.GroupNorm(4, channels), torch.nn.SiLU(), torch.nn.Conv2d(channels, out_channels, 3, padding=1),
            torch.nn.GroupNorm(4, out_channels), torch.nn.SiLU(), torch.nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )  # fmt: skip
        self.skip = torch.nn.Conv2d(channels, out_channels, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor = self.skip(images) + self.layers(images)
        return residual


class UNet(torch.nn.Module):
    """U-Net of Ronneberger et al. 2015 with residual blocks: three resolutions down, three up, skip connections between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, width, 3, padding=1)
        self.down = torch.nn.ModuleList([UNetBlock(width, width), UNetBlock(width, 2 * width)])
        self.middle = UNetBlock(2 * width, 4 * width)
        self.up = torch.nn.ModuleList([UNetBlock(6 * width, 2 * width), UNetBlock(3 * width, width)])
        self.last = torch.nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hidden = self.first(images)
        for block in self.down:
            kept.append(block(hidden))
            hidden = F.avg_pool2d(kept[-1], 2)
        hidden = self.middle(hidden)
        for block in self.up:
            hidden = block(torch.cat([F.interpolate(hidden, scale_factor=2.0), kept.pop()], dim=1))
        result: torch.Tensor = self.last(hidden)
        return result


def unet(*, batch: int = 4, size: int = 128, width: int = 32, seed: int = 0) -> Workload:
    """Return a U-Net that learns to remove noise from images of `size` pixels squared."""

    def draw() -> Drawn:
        images = torch.randn(batch, 3, size, size)
        return UNet(width), (images + torch.randn(batch, 3, size, size), images)

    return assemble(draw, denoising_loss, dtype="float32", optimizer="adamw", seed=seed, device="cpu")


def denoising_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error; `batch` holds noisy and clean images of shape (batch, 3, size, size)."""
    noisy, clean = batch
    return F.mse_loss(model(noisy), clean)


FACTORIES: dict[str, Callable[..., Workload]] = {**ZOO, "llama": llama, "t5": t5, "unet": unet}
"""Factories of the zoo and of this file, by name."""


def workload_reference(model: str) -> str:
    """Return the reference by which a child process finds a factory."""
    return model if model in ZOO else f"{__name__}:{model}"
