"""Models of images, videos, and images with text of `transformers`, in tiny configurations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.benchmarks.coverage.subject import Subject, adamw, library_loss

ROWS, SIDE, CLASSES, WORDS, VOCABULARY = 4, 32, 3, 12, 64
VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": SIDE, "patch_size": 8,
    "num_labels": CLASSES,
}  # fmt: skip
SWIN: dict[str, Any] = {
    "image_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": CLASSES,
}  # fmt: skip
STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": CLASSES}
FOUR_STAGES: dict[str, Any] = {
    "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "num_labels": CLASSES,
}  # fmt: skip
RESNET_BACKBONE: dict[str, Any] = {
    "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_type": "basic",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
SWIN_BACKBONE: dict[str, Any] = {
    "image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "projection_dim": 16,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": SIDE, "patch_size": 8,
    "projection_dim": 16,
}  # fmt: skip


def _of(kind: str, config: str, settings: dict[str, Any]) -> torch.nn.Module:
    import transformers

    made: torch.nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    return made


def _with_backbone(
    kind: str, config: str, settings: dict[str, Any], backbone: str, layers: dict[str, Any]
) -> torch.nn.Module:
    import transformers

    inner = getattr(transformers, backbone)(**layers)
    made: torch.nn.Module = getattr(transformers, kind)(
        getattr(transformers, config)(backbone_config=inner, **settings)
    )
    return made


def _images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)


def _draw_classes(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": _images(generator), "labels": torch.randint(CLASSES, (ROWS,), generator=generator)}


def _draw_segments(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _images(generator),
        "labels": torch.randint(CLASSES, (ROWS, SIDE, SIDE), generator=generator),
    }


def _draw_images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": _images(generator)}


def _draw_videos(generator: torch.Generator, frames: int) -> dict[str, torch.Tensor]:
    videos = torch.randn(2, frames, 3, SIDE, SIDE, generator=generator)
    return {"pixel_values": videos, "labels": torch.randint(CLASSES, (2,), generator=generator)}


def _draw_objects(generator: torch.Generator) -> dict[str, Any]:
    centers = 0.3 + 0.4 * torch.rand(ROWS, 2, 4, generator=generator)
    labels = [
        {
            "class_labels": torch.randint(CLASSES, (2,), generator=generator),
            "boxes": centers[row] * torch.tensor([1, 1, 0.5, 0.5]),
        }
        for row in range(ROWS)
    ]
    return {"pixel_values": _images(generator), "labels": labels}


def _draw_masks(generator: torch.Generator) -> dict[str, Any]:
    return {
        "pixel_values": _images(generator),
        "mask_labels": [(torch.rand(2, SIDE, SIDE, generator=generator) > 0.5).float() for _ in range(ROWS)],
        "class_labels": [torch.randint(CLASSES, (2,), generator=generator) for _ in range(ROWS)],
    }


def _draw_captions(generator: torch.Generator, *, labels: bool = False) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (ROWS, WORDS), generator=generator)
    ids[:, -1] = VOCABULARY - 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": _images(generator)}
    return batch | {"labels": ids.clone()} if labels else batch


def _contrast(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, return_loss=True).loss
    return loss


def _features(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(**batch).last_hidden_state
    return (result**2).mean()


def _questions(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    pooled: torch.Tensor = model(**batch).pooler_output
    return (pooled**2).mean()


_Case = tuple[str, str, str, dict[str, Any], Callable[[torch.Generator], Any]]
CASES: dict[str, _Case] = {
    "vit": ("ViT", "ViTForImageClassification", "ViTConfig", VIT, _draw_classes),
    "deit": ("DeiT: a token of distillation", "DeiTForImageClassification", "DeiTConfig", VIT, _draw_classes),
    "beit": ("BEiT: relative positions, dropped paths", "BeitForImageClassification", "BeitConfig", VIT | {"use_relative_position_bias": True}, _draw_classes),
    "swin": ("Swin: shifted windows, dropped paths", "SwinForImageClassification", "SwinConfig", SWIN, _draw_classes),
    "swinv2": ("Swin V2: cosine attention", "Swinv2ForImageClassification", "Swinv2Config", SWIN, _draw_classes),
    "convnext": ("ConvNeXt", "ConvNextForImageClassification", "ConvNextConfig", STAGES | {"num_stages": 2, "patch_size": 2, "drop_path_rate": 0.1}, _draw_classes),
    "convnextv2": ("ConvNeXt V2: response norms", "ConvNextV2ForImageClassification", "ConvNextV2Config", STAGES | {"num_stages": 2, "patch_size": 2}, _draw_classes),
    "resnet": ("ResNet", "ResNetForImageClassification", "ResNetConfig", STAGES | {"embedding_size": 16, "layer_type": "bottleneck"}, _draw_classes),
    "regnet": ("RegNet: grouped convolutions, squeeze and excitation", "RegNetForImageClassification", "RegNetConfig", STAGES | {"embedding_size": 16, "groups_width": 8}, _draw_classes),
    "bit": ("BiT: weight standardization, group norms", "BitForImageClassification", "BitConfig", STAGES | {"embedding_size": 16, "num_groups": 4}, _draw_classes),
    "mobilenet_v1": ("MobileNet V1", "MobileNetV1ForImageClassification", "MobileNetV1Config", {"image_size": SIDE, "depth_multiplier": 0.25, "num_labels": CLASSES}, _draw_classes),
    "mobilenet_v2": ("MobileNet V2", "MobileNetV2ForImageClassification", "MobileNetV2Config", {"image_size": SIDE, "depth_multiplier": 0.25, "num_labels": CLASSES}, _draw_classes),
    "mobilevit": (
        "MobileViT: convolutions and attention over patches", "MobileViTForImageClassification", "MobileViTConfig",
        {"image_size": SIDE, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32], "num_labels": CLASSES}, _draw_classes,
    ),
    "efficientnet": (
        "EfficientNet: squeeze and excitation, dropped connections", "EfficientNetForImageClassification", "EfficientNetConfig",
        {"image_size": SIDE, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640, "num_labels": CLASSES, "in_channels": [32, 16, 24], "out_channels": [16, 24, 24],
         "kernel_sizes": [3, 3, 5], "strides": [1, 2, 2], "num_block_repeats": [1, 1, 2], "expand_ratios": [1, 6, 6]},
        _draw_classes,
    ),
    "levit": (
        "LeViT: attention with batch norms", "LevitForImageClassification", "LevitConfig",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "num_labels": CLASSES},
        lambda generator: {"pixel_values": torch.randn(ROWS, 3, 64, 64, generator=generator), "labels": torch.randint(CLASSES, (ROWS,), generator=generator)},
    ),
    "poolformer": ("PoolFormer: pooling in place of attention", "PoolFormerForImageClassification", "PoolFormerConfig", FOUR_STAGES | {"drop_path_rate": 0.1}, _draw_classes),
    "pvt": ("PVT: reduced keys and values", "PvtForImageClassification", "PvtConfig", FOUR_STAGES | {"image_size": SIDE, "patch_sizes": [4, 2, 2, 2], "sequence_reduction_ratios": [4, 2, 1, 1]}, _draw_classes),
    "cvt": (
        "CvT: convolutional projections", "CvtForImageClassification", "CvtConfig",
        {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "num_labels": CLASSES}, _draw_classes,
    ),
    "focalnet": ("FocalNet: focal modulation", "FocalNetForImageClassification", "FocalNetConfig", {"image_size": SIDE, "patch_size": 2, "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": CLASSES}, _draw_classes),
    "dinov2": ("DINOv2: scaled layers", "Dinov2ForImageClassification", "Dinov2Config", VIT | {"mlp_ratio": 2, "drop_path_rate": 0.1}, _draw_classes),
    "segformer": ("SegFormer: a mask for each class", "SegformerForSemanticSegmentation", "SegformerConfig", FOUR_STAGES | {"decoder_hidden_size": 16, "sr_ratios": [4, 2, 1, 1], "mlp_ratios": [2, 2, 2, 2]}, _draw_segments),
    "dpt": (
        "DPT: dense prediction from a ViT", "DPTForSemanticSegmentation", "DPTConfig",
        VIT | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 16, 32], "fusion_hidden_size": 16}, _draw_segments,
    ),
    "yolos": ("YOLOS: boxes, matched to objects", "YolosForObjectDetection", "YolosConfig", VIT | {"image_size": [SIDE, SIDE], "num_detection_tokens": 8}, _draw_objects),
    "videomae": (
        "VideoMAE", "VideoMAEForVideoClassification", "VideoMAEConfig", VIT | {"num_frames": 4, "tubelet_size": 2}, partial(_draw_videos, frames=4),
    ),
    "timesformer": ("TimeSformer: attention over time, then space", "TimesformerForVideoClassification", "TimesformerConfig", VIT | {"num_frames": 3}, partial(_draw_videos, frames=3)),
    "vivit": ("ViViT: tubes of a video", "VivitForVideoClassification", "VivitConfig", VIT | {"num_frames": 4, "tubelet_size": [2, 8, 8]}, partial(_draw_videos, frames=4)),
    "vit_mae": (
        "ViT MAE: hidden patches, drawn at random", "ViTMAEForPreTraining", "ViTMAEConfig",
        {k: v for k, v in VIT.items() if k != "num_labels"} | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32},
        _draw_images,
    ),
}  # fmt: skip
"""Feature, class of the model, class of the configuration, settings, batch."""
FOLLOWING_DATA = {"yolos"}


def _library(name: str, what: str, make: Callable[[], torch.nn.Module], draw: Callable[[torch.Generator], Any], loss: Any = library_loss, *, follows_data: bool = False) -> Subject:  # fmt: skip
    return Subject(name, what, make, draw, loss, adamw, follows_data=follows_data, library="transformers")


SUBJECTS: tuple[Subject, ...] = (
    *(
        _library(name, what, partial(_of, kind, config, settings), draw, follows_data=name in FOLLOWING_DATA)
        for name, (what, kind, config, settings, draw) in CASES.items()
    ),
    _library(
        "upernet", "UperNet over a ConvNeXt",
        partial(_with_backbone, "UperNetForSemanticSegmentation", "UperNetConfig", {"hidden_size": 16, "auxiliary_channels": 8, "num_labels": CLASSES},
                "ConvNextConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
        _draw_segments,
    ),
    _library(
        "detr", "DETR: boxes, matched to objects",
        partial(_with_backbone, "DetrForObjectDetection", "DetrConfig",
                {"num_queries": 8, "encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                 "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_labels": CLASSES},
                "ResNetConfig", RESNET_BACKBONE | {"out_features": ["stage4"]}),
        _draw_objects, follows_data=True,
    ),
    _library(
        "mask2former", "Mask2Former: masks, matched to objects at sampled points",
        partial(_with_backbone, "Mask2FormerForUniversalSegmentation", "Mask2FormerConfig",
                {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "encoder_feedforward_dim": 32, "dim_feedforward": 32, "encoder_layers": 1,
                 "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 5, "num_labels": CLASSES, "train_num_points": 64},
                "SwinConfig", SWIN_BACKBONE),
        _draw_masks, follows_data=True,
    ),
    _library("clip", "CLIP: images beside texts", partial(_of, "CLIPModel", "CLIPConfig", {"text_config": TEXT | {"eos_token_id": VOCABULARY - 1}, "vision_config": VISION, "projection_dim": 16}), _draw_captions, _contrast),
    _library("siglip", "SigLIP: a sigmoid for each pair", partial(_of, "SiglipModel", "SiglipConfig", {"text_config": TEXT | {"projection_size": 32}, "vision_config": VISION}), _draw_captions, _contrast),
    _library(
        "blip", "BLIP: captions of images",
        partial(_of, "BlipForConditionalGeneration", "BlipConfig",
                {"text_config": TEXT | {"encoder_hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2}, "vision_config": VISION, "projection_dim": 16}),
        partial(_draw_captions, labels=True),
    ),
    _library(
        "vilt", "ViLT: one transformer for words and patches",
        partial(_of, "ViltModel", "ViltConfig", {k: v for k, v in VIT.items() if k != "num_labels"} | {"vocab_size": VOCABULARY, "max_position_embeddings": 32}),
        _draw_captions, _questions, follows_data=True,
    ),
    _library("convnext_backbone", "ConvNeXt without a head", partial(_of, "ConvNextModel", "ConvNextConfig", STAGES | {"num_stages": 2, "patch_size": 2}), _draw_images, _features),
)  # fmt: skip
