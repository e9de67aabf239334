"""Small BERT (Devlin et al. 2018): predicts masked words in sequences padded to one length."""

import torch
import torch.nn.functional as F

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

_PAD, _BEGIN, _END, _MASK = range(4)
_IGNORED = -100


def bert(
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
    """Return a BERT; by default 6 layers, 384 wide. `dropout` applies to hidden values and attention weights."""
    require_at_least(1, batch=batch, depth=depth, width=width)
    require_at_least(2, tokens=tokens)
    require_at_least(_MASK + 2, vocabulary=vocabulary)
    require_probability(dropout=dropout)

    def draw() -> Drawn:
        library = import_transformers()
        config = library.BertConfig(
            num_hidden_layers=depth,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=count_heads(width),
            max_position_embeddings=tokens,
            vocab_size=vocabulary,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            pad_token_id=_PAD,
            bos_token_id=_BEGIN,
            eos_token_id=_END,
            use_cache=False,
            attn_implementation="eager",
        )
        return library.BertForMaskedLM(config), padded_text(batch, tokens, vocabulary)

    return assemble(draw, masked_word_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)


def padded_text(batch: int, tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, attention mask and labels, each (batch, tokens).

    Labels are the first word and about 15 % of the others of each sequence; these are masked.

    Every sequence is at least half as long as `tokens` and at least one shorter, so each has padding.
    """
    words = torch.randint(_MASK + 1, vocabulary, (batch, tokens))
    lengths = torch.randint((tokens + 1) // 2, tokens, (batch, 1))
    real = torch.arange(tokens) < lengths
    guessed = torch.rand(batch, tokens) < 0.15
    guessed[:, 0] = True
    guessed &= real
    ids = words.masked_fill(guessed, _MASK).masked_fill(~real, _PAD)
    return ids, real.long(), words.masked_fill(~guessed, _IGNORED)


def masked_word_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of the masked words."""
    ids, mask, labels = batch
    logits = model(ids, attention_mask=mask).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED)
