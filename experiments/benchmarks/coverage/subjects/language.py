"""Language models of `transformers` that predict the next token, in tiny configurations."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from experiments.benchmarks.coverage.subject import Subject, adamw, library_loss

VOCABULARY, ROWS, TOKENS = 96, 4, 32
LAYERS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings that most families share."""
GROUPED = LAYERS | {"num_key_value_heads": 2}
"""Settings with two query heads for each key head."""
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHORT_SCAN: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0,
}  # fmt: skip
"""Settings of state space models."""
MLA: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "head_dim": 4,
}  # fmt: skip
"""Latent attention and routed experts of DeepSeek."""

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "learned positions, dropout", GPT2),
    "gpt_neo": (
        "GPTNeoConfig", "local and global attention",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
         "attention_types": [[["global", "local"], 1]], "window_size": 8, "resid_dropout": 0.1},
    ),
    "gpt_neox": ("GPTNeoXConfig", "parallel attention and MLP", LAYERS),
    "gptj": ("GPTJConfig", "rotary positions on a part of each head", GPT2 | {"rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCodeConfig", "one key head for all queries", GPT2),
    "llama": ("LlamaConfig", "RMSNorm, rotary positions, grouped keys", GROUPED),
    "mistral": ("MistralConfig", "sliding window shorter than the text", GROUPED | {"sliding_window": 8}),
    "mixtral": ("MixtralConfig", "routed experts", GROUPED | {"num_local_experts": 4}),
    "qwen2": ("Qwen2Config", "biases on queries and keys", GROUPED),
    "qwen3": ("Qwen3Config", "norms of queries and keys", GROUPED | {"head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig", "routed and shared experts",
        GROUPED | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig", "routed experts with their balance loss",
        GROUPED | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "output_router_logits": True},
    ),
    "gemma": ("GemmaConfig", "tied embeddings, scaled", GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "soft caps of logits, alternating windows", GROUPED | {"head_dim": 8, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", "two rotary tables", GROUPED | {"head_dim": 8, "sliding_window": 8}),
    "phi": ("PhiConfig", "rotary positions on a part of each head", LAYERS),
    "phi3": ("Phi3Config", "one projection for queries, keys and values", GROUPED),
    "olmo": ("OlmoConfig", "norms without weights", GROUPED),
    "olmo2": ("Olmo2Config", "norms behind each block", GROUPED),
    "falcon": (
        "FalconConfig", "one key head, parallel blocks",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 2, "bos_token_id": 1},
    ),
    "bloom": ("BloomConfig", "ALiBi", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("OPTConfig", "learned positions with an offset", LAYERS | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mpt": ("MptConfig", "ALiBi without biases", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "stablelm": ("StableLmConfig", "partial rotary positions, LayerNorm", GROUPED),
    "starcoder2": ("Starcoder2Config", "grouped keys with biases", GROUPED),
    "cohere": ("CohereConfig", "parallel blocks, scaled logits", GROUPED),
    "granite": ("GraniteConfig", "scaled residuals", GROUPED),
    "codegen": ("CodeGenConfig", "rotary positions, fused projections", GPT2 | {"n_ctx": 64, "rotary_dim": 4}),
    "deepseek_v2": ("DeepseekV2Config", "latent attention, routed experts", GROUPED | MLA | {"num_key_value_heads": 4, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", "latent attention, groups of experts", GROUPED | MLA | {"num_key_value_heads": 4}),
    "mamba": ("MambaConfig", "state space scan", SHORT_SCAN),
    "mamba2": ("Mamba2Config", "state space scan in chunks", SHORT_SCAN | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "jamba": (
        "JambaConfig", "state space and attention layers, experts",
        GROUPED | {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    ),
    "falcon_mamba": ("FalconMambaConfig", "state space scan with norms", SHORT_SCAN),
    "rwkv": (
        "RwkvConfig", "linear attention as a recurrence",
        {"vocab_size": VOCABULARY, "context_length": 64, "hidden_size": 32, "num_hidden_layers": 2},
    ),
}  # fmt: skip
"""Family: class of the configuration, feature, and settings."""


def causal(config: str, settings: dict[str, Any]) -> torch.nn.Module:
    """Return the language model of a configuration."""
    import transformers

    made: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
    return made


def draw_text(generator: torch.Generator, *, mask: str = "ones", labels: bool = True) -> dict[str, torch.Tensor]:
    """Return token ids of shape (4, 32), with a mask of ones, a padded one or none."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    batch = {"input_ids": ids}
    if mask == "ones":
        batch["attention_mask"] = torch.ones_like(ids)
    elif mask == "padded":
        lengths = torch.randint(TOKENS // 4, TOKENS, (ROWS, 1), generator=generator)
        batch["attention_mask"] = (torch.arange(TOKENS) < lengths).long()
    if labels:
        batch["labels"] = ids.clone()
    return batch


def _checkpointed() -> torch.nn.Module:
    model: Any = causal("LlamaConfig", GROUPED)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def _in_bfloat16(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return library_loss(model, batch)


def _variants() -> Iterator[Subject]:
    def llama(name: str, what: str, *, draw: Any = draw_text, loss: Any = library_loss, make: Callable[[], Any] | None = None, **settings: Any) -> Subject:  # fmt: skip
        make = make or partial(causal, "LlamaConfig", GROUPED | settings)
        return Subject(name, what, make, draw, loss, adamw, library="transformers")

    yield llama("llama_padded", "Llama on padded text", draw=partial(draw_text, mask="padded"))
    yield llama("llama_without_mask", "Llama without an attention mask", draw=partial(draw_text, mask=""))
    yield llama(
        "llama_eager_attention",
        "Llama with attention in plain ops, dropout",
        attn_implementation="eager",
        attention_dropout=0.1,
    )
    yield llama("llama_checkpointing", "Llama with gradient checkpointing inside", make=_checkpointed)
    yield llama("llama_bfloat16", "Llama with weights in bfloat16", dtype="bfloat16")
    yield llama("llama_autocast", "Llama under autocast to bfloat16", loss=_in_bfloat16)
    yield Subject(
        "gpt2_padded", "GPT-2 on padded text", partial(causal, "GPT2Config", GPT2), partial(draw_text, mask="padded"),
        library_loss, adamw, library="transformers",
    )  # fmt: skip
    yield Subject(
        "gpt2_autocast", "GPT-2 under autocast to bfloat16", partial(causal, "GPT2Config", GPT2), draw_text, _in_bfloat16, adamw,
        library="transformers",
    )  # fmt: skip


SUBJECTS: tuple[Subject, ...] = (
    *(
        Subject(name, f"{name}: {what}", partial(causal, config, settings), draw_text, library_loss, adamw, library="transformers")
        for name, (config, what, settings) in FAMILIES.items()
    ),
    *_variants(),
)  # fmt: skip
