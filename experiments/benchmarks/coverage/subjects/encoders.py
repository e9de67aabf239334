"""Text encoders of `transformers`, in tiny configurations: masked words, classes of texts, layouts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.benchmarks.coverage.subject import Subject, adamw, library_loss

VOCABULARY, ROWS, TOKENS, CLASSES = 96, 4, 32, 3
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 80, "pad_token_id": 0,
}  # fmt: skip

MASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "segments, tied decoder", BERT),
    "roberta": ("RobertaConfig", "positions from the padding", BERT | {"pad_token_id": 1}),
    "camembert": ("CamembertConfig", "RoBERTa's layers", BERT | {"pad_token_id": 1}),
    "xlm_roberta": ("XLMRobertaConfig", "RoBERTa's layers", BERT | {"pad_token_id": 1}),
    "albert": ("AlbertConfig", "one layer, used by every layer", BERT | {"embedding_size": 16, "hidden_dropout_prob": 0.1}),
    "electra": ("ElectraConfig", "projected embeddings", BERT | {"embedding_size": 16}),
    "distilbert": (
        "DistilBertConfig", "half of the layers",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    ),
    "deberta_v2": (
        "DebertaV2Config", "disentangled attention",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    ),
    "mpnet": ("MPNetConfig", "relative positions", BERT | {"pad_token_id": 1}),
    "big_bird": ("BigBirdConfig", "full attention", BERT | {"attention_type": "original_full"}),
    "big_bird_sparse": (
        "BigBirdConfig", "random blocks of attention",
        BERT | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    ),
    "convbert": ("ConvBertConfig", "convolutions by position", BERT | {"embedding_size": 16, "conv_kernel_size": 3}),
    "squeezebert": ("SqueezeBertConfig", "grouped convolutions of width 1", BERT | {"embedding_size": 32}),
    "modernbert": (
        "ModernBertConfig", "windows, rotary positions",
        BERT | {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "nomic_bert": ("NomicBertConfig", "rotary positions, gated MLP", BERT),
    "fnet": ("FNetConfig", "Fourier transforms in place of attention", {k: v for k, v in BERT.items() if k != "num_attention_heads"}),
    "nystromformer": ("NystromformerConfig", "attention by landmarks", BERT | {"num_landmarks": 8, "segment_means_seq_len": TOKENS, "conv_kernel_size": 5}),
    "roformer": ("RoFormerConfig", "sinusoidal rotary positions", BERT | {"embedding_size": 16}),
    "ernie": ("ErnieConfig", "task embeddings", BERT),
    "mobilebert": (
        "MobileBertConfig", "bottlenecks and stacked MLPs",
        BERT | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "rembert": ("RemBertConfig", "wide output embeddings", BERT | {"input_embedding_size": 16, "output_embedding_size": 24}),
    "longformer": ("LongformerConfig", "windows and global tokens", BERT | {"attention_window": 8, "pad_token_id": 1}),
    "funnel": (
        "FunnelConfig", "pooled blocks",
        {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "num_decoder_layers": 1},
    ),
    "reformer": (
        "ReformerConfig", "hashed attention, reversible layers",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "attn_layers": ["local", "lsh"],
         "feed_forward_size": 64, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16], "lsh_attn_chunk_length": 8,
         "local_attn_chunk_length": 8, "num_buckets": 4, "is_decoder": False, "max_position_embeddings": 32, "pad_token_id": 0},
    ),
    "xlm": (
        "XLMConfig", "language embeddings",
        {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "n_langs": 2, "pad_token_id": 0},
    ),
    "flaubert": (
        "FlaubertConfig", "layers dropped at random",
        {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "layerdrop": 0.2},
    ),
}  # fmt: skip
"""Family: class of the configuration, feature, and settings."""
FOLLOWING_DATA = {"longformer", "reformer", "flaubert"}
"""Families whose shapes or branches depend on numbers: global tokens, hash buckets, dropped layers."""


def _masked(config: str, settings: dict[str, Any]) -> torch.nn.Module:
    import transformers

    made: torch.nn.Module = transformers.AutoModelForMaskedLM.from_config(getattr(transformers, config)(**settings))
    return made


def _of(kind: str, config: str, settings: dict[str, Any]) -> torch.nn.Module:
    import transformers

    made: torch.nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    return made


def draw_words(generator: torch.Generator, *, mask: str = "ones", counts: int = 0) -> dict[str, torch.Tensor]:
    """Return token ids with a mask; labels for each token, or classes for each row where `counts` is not zero."""
    ids = torch.randint(5, VOCABULARY, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(TOKENS // 4, TOKENS, (ROWS, 1), generator=generator)
    valid = (torch.arange(TOKENS) < lengths).long()
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, ids, -100)
    labels[:, 0] = ids[:, 0]
    if counts:
        labels = torch.randint(counts, (ROWS,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask == "ones" else valid, "labels": labels}


def _draw_boxes(generator: torch.Generator) -> dict[str, torch.Tensor]:
    corner = torch.randint(0, 400, (ROWS, TOKENS, 2), generator=generator)
    size = torch.randint(1, 400, (ROWS, TOKENS, 2), generator=generator)
    return {**draw_words(generator), "bbox": torch.cat([corner, corner + size], -1)}


def _subject(
    name: str, what: str, make: Callable[[], torch.nn.Module], draw: Callable[[torch.Generator], Any]
) -> Subject:
    return Subject(
        name, what, make, draw, library_loss, adamw, follows_data=name in FOLLOWING_DATA, library="transformers"
    )


SUBJECTS: tuple[Subject, ...] = (
    *(
        _subject(name, f"{name}: {what}", partial(_masked, config, settings), draw_words)
        for name, (config, what, settings) in MASKED.items()
    ),
    _subject("bert_padded", "BERT on padded text", partial(_masked, "BertConfig", BERT), partial(draw_words, mask="padded")),
    _subject(
        "bert_classes", "BERT that classifies texts", partial(_of, "BertForSequenceClassification", "BertConfig", BERT | {"num_labels": CLASSES}),
        partial(draw_words, counts=CLASSES),
    ),
    _subject(
        "xlnet", "XLNet: two streams of attention with relative positions",
        partial(_of, "XLNetForSequenceClassification", "XLNetConfig",
                {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": CLASSES}),
        partial(draw_words, counts=CLASSES),
    ),
    _subject("layoutlm", "LayoutLM: words with boxes on a page", partial(_of, "LayoutLMForMaskedLM", "LayoutLMConfig", BERT), _draw_boxes),
    _subject(
        "perceiver", "Perceiver: latents that attend to a text",
        partial(_of, "PerceiverForMaskedLM", "PerceiverConfig",
                {"vocab_size": VOCABULARY, "num_latents": 8, "d_latents": 32, "d_model": 32, "num_self_attends_per_block": 2,
                 "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": TOKENS, "qk_channels": 32, "v_channels": 32}),
        lambda generator: {("inputs" if key == "input_ids" else key): part for key, part in draw_words(generator).items()},
    ),
)  # fmt: skip
