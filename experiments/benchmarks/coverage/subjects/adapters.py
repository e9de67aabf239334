"""Diffusion models of `diffusers`, and adapters of `peft` on models of `transformers`."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from experiments.benchmarks.coverage.subject import Subject, adamw
from experiments.benchmarks.coverage.subject import library_loss as from_library
from experiments.benchmarks.coverage.subjects import encoders, language

ROWS, SIDE = 2, 16


def _unet() -> torch.nn.Module:
    from diffusers import UNet2DModel

    model: torch.nn.Module = UNet2DModel(
        sample_size=SIDE, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return model


def _conditional_unet() -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    model: torch.nn.Module = UNet2DConditionModel(
        sample_size=SIDE, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24, attention_head_dim=4,
    )  # fmt: skip
    return model


def _autoencoder() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    model: torch.nn.Module = AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=SIDE,
    )  # fmt: skip
    return model


def _transformer() -> torch.nn.Module:
    from diffusers import DiTTransformer2DModel

    model: torch.nn.Module = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    return model


def _draw_noise(generator: torch.Generator, channels: int = 3, side: int = SIDE) -> tuple[torch.Tensor, ...]:
    shape = (ROWS, channels, side, side)
    steps = torch.randint(1000, (ROWS,), generator=generator)
    return torch.randn(shape, generator=generator), steps, torch.randn(shape, generator=generator)


def _draw_prompts(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return *_draw_noise(generator, 4), torch.randn(ROWS, 6, 24, generator=generator)


def _denoise(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    noisy, steps, noise, *prompt = batch
    return F.mse_loss(model(noisy, steps, *prompt).sample, noise)


def _denoise_classes(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    noisy, steps, noise = batch
    return F.mse_loss(model(noisy, timestep=steps, class_labels=steps % 10).sample, noise)


def _reconstruct(model: Any, images: torch.Tensor) -> torch.Tensor:
    latent = model.encode(images).latent_dist
    return F.mse_loss(model.decode(latent.sample()).sample, images) + 1e-3 * latent.kl().mean()


def _adapted(**settings: Any) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    base: Any = language.causal("LlamaConfig", language.GROUPED)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **settings)
    model: torch.nn.Module = get_peft_model(base, config)
    return model


def _scaled() -> torch.nn.Module:
    from peft import IA3Config, get_peft_model

    base: Any = language.causal("LlamaConfig", language.GROUPED)
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model: torch.nn.Module = get_peft_model(base, config)
    return model


def _prompted() -> torch.nn.Module:
    from peft import PromptTuningConfig, get_peft_model

    base: Any = language.causal("LlamaConfig", language.GROUPED)
    model: torch.nn.Module = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    return model


def _bert() -> torch.nn.Module:
    import transformers
    from peft import LoraConfig, get_peft_model

    base: Any = transformers.BertForSequenceClassification(transformers.BertConfig(**encoders.BERT, num_labels=3))
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=["query", "value"])
    model: torch.nn.Module = get_peft_model(base, config)
    return model


SUBJECTS: tuple[Subject, ...] = (
    Subject("unet2d", "UNet2DModel: attention in a block", _unet, _draw_noise, _denoise, adamw, library="diffusers"),
    Subject("unet2d_condition", "UNet2DConditionModel: cross-attention to a prompt", _conditional_unet, _draw_prompts, _denoise, adamw, library="diffusers"),
    Subject("autoencoder_kl", "AutoencoderKL: a sampled latent", _autoencoder, lambda generator: torch.randn(ROWS, 3, SIDE, SIDE, generator=generator), _reconstruct, adamw, library="diffusers"),
    Subject("dit", "DiT: norms that the step number scales", _transformer, partial(_draw_noise, channels=4, side=8), _denoise_classes, adamw, library="diffusers"),
    Subject("peft_lora", "LoRA on Llama", _adapted, language.draw_text, from_library, adamw, library="peft"),
    Subject("peft_lora_dropout", "LoRA on Llama with dropout", partial(_adapted, lora_dropout=0.1), language.draw_text, from_library, adamw, library="peft"),
    Subject("peft_dora", "DoRA on Llama", partial(_adapted, use_dora=True), language.draw_text, from_library, adamw, library="peft"),
    Subject("peft_lora_head", "LoRA on Llama, the head trained in full", partial(_adapted, modules_to_save=["lm_head"]), language.draw_text, from_library, adamw, library="peft"),
    Subject("peft_ia3", "IA3 on Llama", _scaled, language.draw_text, from_library, adamw, library="peft"),
    Subject("peft_prompt", "Prompt tuning on Llama", _prompted, language.draw_text, from_library, adamw, library="peft"),
    Subject("peft_lora_bert", "LoRA on BERT that classifies texts", _bert, partial(encoders.draw_words, counts=3), from_library, adamw, library="peft"),
)  # fmt: skip
