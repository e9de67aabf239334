"""Small GPT-2 (Radford et al. 2019): the embedding and the output layer share their weights."""

from typing import Literal

import torch
import torch.nn.functional as F

from autotune.errors import ConfigError
from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import (
    Drawn,
    Dtype,
    OptimizerName,
    assemble,
    count_heads,
    import_transformers,
    require_at_least,
    require_probability,
)


def gpt2(
    *,
    batch: int = 8,
    tokens: int = 256,
    depth: int = 6,
    width: int = 384,
    vocabulary: int = 8192,
    dtype: Dtype = "float32",
    dropout: float = 0.0,
    attention: Literal["eager", "sdpa"] = "eager",
    optimizer: OptimizerName = "adamw",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a GPT-2; by default 6 layers, 384 wide. `dropout` applies to embeddings, hidden values and attention weights.

    `attention` is transformers' implementation: `eager` computes the weights, `sdpa` calls PyTorch's fused kernels.
    Raises ConfigError for an argument that is out of range.
    """
    require_at_least(1, batch=batch, tokens=tokens, depth=depth, width=width)
    require_at_least(2, vocabulary=vocabulary)
    require_probability(dropout=dropout)
    if attention not in ("eager", "sdpa"):
        raise ConfigError(f"attention {attention!r} is unknown; known: eager, sdpa")

    def draw() -> Drawn:
        library = import_transformers()
        config = library.GPT2Config(
            n_layer=depth,
            n_embd=width,
            n_head=count_heads(width),
            n_positions=tokens,
            vocab_size=vocabulary,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
            tie_word_embeddings=True,
            attn_implementation=attention,
        )
        text = torch.randint(vocabulary, (batch, tokens + 1))
        return library.GPT2LMHeadModel(config), (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return assemble(draw, next_token_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)


def next_token_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), following.flatten())
