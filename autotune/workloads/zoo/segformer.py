"""SegFormer (Xie et al. 2021): a transformer whose maps shrink by stages, and a decoder that upscales them all."""

import torch
import torch.nn.functional as F

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import (
    Drawn,
    Dtype,
    OptimizerName,
    assemble,
    import_transformers,
    require_at_least,
    require_probability,
)

CLASSES = 19
"""Number of classes, as in Cityscapes."""

_HEADS = (1, 2, 5, 8)


def segformer(
    *,
    batch: int = 2,
    size: int = 256,
    depth: int = 2,
    width: int = 32,
    dtype: Dtype = "float32",
    dropout: float = 0.0,
    optimizer: OptimizerName = "adamw",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a SegFormer-B0, 3.7 million parameters.

    `depth`: blocks in each of the four stages. `width`: channels of the first stage and of each head. `dropout` applies
    to hidden values, attention weights, whole paths and the decoder.
    """
    require_at_least(1, batch=batch, depth=depth, width=width)
    require_at_least(32, size=size)
    require_probability(dropout=dropout)

    def draw() -> Drawn:
        library = import_transformers()
        config = library.SegformerConfig(
            depths=[depth] * 4,
            hidden_sizes=[width * heads for heads in _HEADS],
            num_attention_heads=list(_HEADS),
            decoder_hidden_size=8 * width,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            classifier_dropout_prob=dropout,
            drop_path_rate=dropout,
            num_labels=CLASSES,
        )
        maps = torch.randint(CLASSES, (batch, size, size))
        return library.SegformerForSemanticSegmentation(config), (torch.randn(batch, 3, size, size), maps)

    return assemble(draw, map_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)


def map_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy per pixel, with the logits upscaled from a quarter of the image's side."""
    images, maps = batch
    logits = F.interpolate(model(images).logits, size=maps.shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits.float(), maps)
