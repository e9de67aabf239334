"""Small vision transformer (Dosovitskiy et al. 2020)."""

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
from autotune.workloads.zoo.images import CLASSES, labelled_images, logits_loss

PATCH = 16
"""Side of a patch in pixels."""


def vit(
    *,
    batch: int = 8,
    size: int = 224,
    depth: int = 6,
    width: int = 384,
    dtype: Dtype = "float32",
    dropout: float = 0.0,
    optimizer: OptimizerName = "adamw",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a ViT; by default 6 layers, 384 wide. `dropout` applies to hidden values and attention weights."""
    require_at_least(1, batch=batch, depth=depth, width=width)
    require_at_least(PATCH, size=size)
    require_probability(dropout=dropout)
    if size % PATCH:
        raise ConfigError(f"size must be a multiple of {PATCH}, the patch (got {size}); try {size // PATCH * PATCH}")

    def draw() -> Drawn:
        library = import_transformers()
        config = library.ViTConfig(
            image_size=size,
            patch_size=PATCH,
            num_hidden_layers=depth,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=count_heads(width),
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=CLASSES,
            attn_implementation="eager",
        )
        return library.ViTForImageClassification(config), labelled_images(batch, size)

    return assemble(draw, logits_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)
