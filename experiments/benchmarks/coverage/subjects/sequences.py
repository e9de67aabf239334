"""Encoders with decoders, speech and time series of `transformers`, in tiny configurations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.benchmarks.coverage.subject import Subject, adamw, library_loss

VOCABULARY, ROWS, SOURCE, TARGET = 96, 4, 32, 24
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16, 16],
    "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2, "classifier_proj_size": 16, "num_labels": 3,
}  # fmt: skip
WITHOUT_CHANCE = {"layerdrop": 0.0, "apply_spec_augment": False}
"""Settings without dropped layers and without masks that numpy draws."""
SERIES: dict[str, Any] = {
    "prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 2, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def _of(kind: str, config: str, settings: dict[str, Any]) -> torch.nn.Module:
    import transformers

    made: torch.nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    return made


def _draw_pairs(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCABULARY, (ROWS, SOURCE), generator=generator)
    labels = torch.randint(4, VOCABULARY, (ROWS, TARGET), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _draw_features(
    generator: torch.Generator, *, frames: int, bins: int, frames_first: bool
) -> dict[str, torch.Tensor]:
    shape = (ROWS, frames, bins) if frames_first else (ROWS, bins, frames)
    labels = torch.randint(4, VOCABULARY, (ROWS, TARGET), generator=generator)
    return {"input_features": torch.randn(shape, generator=generator), "labels": labels}


def _draw_waves(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(ROWS, 400, generator=generator),
        "labels": torch.randint(3, (ROWS,), generator=generator),
    }


def _draw_transcripts(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(ROWS, 400, generator=generator),
        "labels": torch.randint(1, 24, (ROWS, 6), generator=generator),
    }


def _draw_series(generator: torch.Generator) -> dict[str, torch.Tensor]:
    past, future = SERIES["context_length"] + max(SERIES["lags_sequence"]), SERIES["prediction_length"]
    return {
        "past_values": torch.randn(ROWS, past, generator=generator) + 3,
        "past_time_features": torch.randn(ROWS, past, 2, generator=generator),
        "past_observed_mask": torch.ones(ROWS, past),
        "future_values": torch.randn(ROWS, future, generator=generator) + 3,
        "future_time_features": torch.randn(ROWS, future, 2, generator=generator),
    }


def _draw_patches(generator: torch.Generator, channels: int = 2) -> dict[str, torch.Tensor]:
    return {
        "past_values": torch.randn(ROWS, 32, channels, generator=generator),
        "future_values": torch.randn(ROWS, 8, channels, generator=generator),
    }


def _draw_episode(generator: torch.Generator) -> dict[str, torch.Tensor]:
    actions = torch.randn(ROWS, 10, 2, generator=generator)
    return {
        "states": torch.randn(ROWS, 10, 5, generator=generator),
        "actions": actions,
        "rewards": torch.randn(ROWS, 10, 1, generator=generator),
        "returns_to_go": torch.randn(ROWS, 10, 1, generator=generator),
        "timesteps": torch.arange(10).repeat(ROWS, 1),
        "attention_mask": torch.ones(ROWS, 10),
    }


def _imitate(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(**batch).action_preds, batch["actions"])


_Case = tuple[str, str, str, dict[str, Any], Callable[[torch.Generator], Any]]
CASES: dict[str, _Case] = {
    "t5": ("T5: relative positions", "T5ForConditionalGeneration", "T5Config", T5, _draw_pairs),
    "mt5": ("mT5: gated MLP, untied output", "MT5ForConditionalGeneration", "MT5Config", T5, _draw_pairs),
    "umt5": ("UMT5: relative positions in each layer", "UMT5ForConditionalGeneration", "UMT5Config", T5, _draw_pairs),
    "switch_transformers": (
        "Switch: one expert for each token", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}, _draw_pairs,
    ),
    "bart": ("BART: encoder and decoder", "BartForConditionalGeneration", "BartConfig", BART, _draw_pairs),
    "bart_layerdrop": ("BART with layers dropped at random", "BartForConditionalGeneration", "BartConfig", BART | {"encoder_layerdrop": 0.2}, _draw_pairs),
    "pegasus": ("Pegasus: sinusoidal positions", "PegasusForConditionalGeneration", "PegasusConfig", BART, _draw_pairs),
    "marian": ("Marian: sinusoidal positions, bias of the output", "MarianMTModel", "MarianConfig", BART, _draw_pairs),
    "mbart": ("mBART: norms before each block", "MBartForConditionalGeneration", "MBartConfig", BART, _draw_pairs),
    "blenderbot": ("Blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, _draw_pairs),
    "m2m_100": ("M2M100: scaled embeddings", "M2M100ForConditionalGeneration", "M2M100Config", BART | NO_LAYERDROP, _draw_pairs),
    "led": (
        "LED: windows in the encoder", "LEDForConditionalGeneration", "LEDConfig",
        {k: v for k, v in BART.items() if k != "max_position_embeddings"}
        | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 8},
        _draw_pairs,
    ),
    "prophetnet": (
        "ProphetNet: two tokens ahead", "ProphetNetForConditionalGeneration", "ProphetNetConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 4,
         "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
        _draw_pairs,
    ),
    "whisper": (
        "Whisper: speech to text", "WhisperForConditionalGeneration", "WhisperConfig",
        BART | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
        partial(_draw_features, frames=64, bins=16, frames_first=False),
    ),
    "speech_to_text": (
        "Speech2Text: convolutions before the encoder", "Speech2TextForConditionalGeneration", "Speech2TextConfig",
        BART | {"input_feat_per_channel": 16, "max_source_positions": 64, "max_target_positions": 64, "conv_channels": 32, "num_conv_layers": 2, "conv_kernel_sizes": [5, 5]},
        partial(_draw_features, frames=64, bins=16, frames_first=True),
    ),
    "wav2vec2": ("wav2vec 2.0 without dropped layers", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SPEECH | WITHOUT_CHANCE, _draw_waves),
    "wav2vec2_layerdrop": (
        "wav2vec 2.0 with layers dropped at random", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
        SPEECH | {"layerdrop": 0.2, "apply_spec_augment": False}, _draw_waves,
    ),
    "wav2vec2_ctc": ("wav2vec 2.0 with CTC loss", "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH | WITHOUT_CHANCE | {"pad_token_id": 0}, _draw_transcripts),
    "hubert": ("HuBERT", "HubertForSequenceClassification", "HubertConfig", SPEECH | WITHOUT_CHANCE, _draw_waves),
    "wavlm": ("WavLM: gated relative positions", "WavLMForSequenceClassification", "WavLMConfig", SPEECH | WITHOUT_CHANCE, _draw_waves),
    "sew": ("SEW: squeezed frames", "SEWForSequenceClassification", "SEWConfig", SPEECH | WITHOUT_CHANCE, _draw_waves),
    "audio_spectrogram": (
        "Audio Spectrogram Transformer", "ASTForAudioClassification", "ASTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_length": 48, "num_mel_bins": 32, "num_labels": 3},
        lambda generator: {"input_values": torch.randn(ROWS, 48, 32, generator=generator), "labels": torch.randint(3, (ROWS,), generator=generator)},
    ),
    "time_series_transformer": (
        "Time Series Transformer: a distribution as output", "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig",
        SERIES | NO_LAYERDROP, _draw_series,
    ),
    "time_series_layerdrop": (
        "Time Series Transformer with layers dropped at random", "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig",
        SERIES | {"encoder_layerdrop": 0.2}, _draw_series,
    ),
    "informer": ("Informer: sampled queries", "InformerForPrediction", "InformerConfig", SERIES | NO_LAYERDROP, _draw_series),
    "autoformer": (
        "Autoformer: autocorrelation by FFT", "AutoformerForPrediction", "AutoformerConfig",
        SERIES | NO_LAYERDROP | {"label_length": 4, "moving_average": 5, "autocorrelation_factor": 1}, _draw_series,
    ),
    "patchtst": (
        "PatchTST: patches of a series", "PatchTSTForPrediction", "PatchTSTConfig",
        {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "ffn_dim": 64, "prediction_length": 8, "attention_dropout": 0.1, "loss": "mse"},
        _draw_patches,
    ),
    "patchtsmixer": (
        "PatchTSMixer: mixed patches", "PatchTSMixerForPrediction", "PatchTSMixerConfig",
        {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_layers": 2, "prediction_length": 8},
        _draw_patches,
    ),
}  # fmt: skip
"""Feature, class of the model, class of the configuration, settings, batch."""
FOLLOWING_DATA = {"bart_layerdrop", "switch_transformers", "wav2vec2_layerdrop", "time_series_layerdrop", "led"}

SUBJECTS: tuple[Subject, ...] = (
    *(
        Subject(name, what, partial(_of, kind, config, settings), draw, library_loss, adamw, follows_data=name in FOLLOWING_DATA, library="transformers")
        for name, (what, kind, config, settings, draw) in CASES.items()
    ),
    Subject(
        "decision_transformer", "Decision Transformer: actions from returns",
        partial(_of, "DecisionTransformerModel", "DecisionTransformerConfig",
                {"state_dim": 5, "act_dim": 2, "hidden_size": 32, "max_ep_len": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        _draw_episode, _imitate, adamw, library="transformers",
    ),
)  # fmt: skip
