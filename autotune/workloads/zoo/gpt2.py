"""A small GPT-2 (Radford et al. 2019): the embedding's weights are the output layer's too."""

import torch
import torch.nn.functional as F

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import Drawn, Dtype, OptimizerName, assemble, at_least, heads, share, transformers


def gpt2(
    *,
    batch: int = 8,
    tokens: int = 256,
    depth: int = 6,
    width: int = 384,
    vocabulary: int = 8192,
    dtype: Dtype = "float32",
    dropout: float = 0.0,
    optimizer: OptimizerName = "adamw",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Six layers, 384 wide, eager attention. `dropout`: of embeddings, hidden values and attention weights."""
    at_least(1, batch=batch, tokens=tokens, depth=depth, width=width)
    at_least(2, vocabulary=vocabulary)
    share(dropout=dropout)

    def draw() -> Drawn:
        library = transformers()
        config = library.GPT2Config(
            n_layer=depth,
            n_embd=width,
            n_head=heads(width),
            n_positions=tokens,
            vocab_size=vocabulary,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
        text = torch.randint(vocabulary, (batch, tokens + 1))
        return library.GPT2LMHeadModel(config), (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return assemble(draw, next_token_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)


def next_token_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of every next token."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), following.flatten())
