"""MobileNetV2 (Sandler et al. 2018): wide, cheap activations and few parameters, so activations use nearly all memory."""

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import (
    Drawn,
    Dtype,
    MemoryFormat,
    OptimizerName,
    assemble,
    import_transformers,
    require_at_least,
    require_probability,
)
from autotune.workloads.zoo.images import CLASSES, labelled_images, logits_loss


def mobilenet_v2(
    *,
    batch: int = 16,
    size: int = 224,
    width: int = 32,
    dtype: Dtype = "float32",
    memory_format: MemoryFormat = "contiguous",
    dropout: float = 0.0,
    optimizer: OptimizerName = "sgd",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a MobileNetV2, 3.5 million parameters. `width`: channels of the first convolution; `dropout`: before the head."""
    require_at_least(1, batch=batch, width=width)
    require_at_least(32, size=size)
    require_probability(dropout=dropout)

    def draw() -> Drawn:
        library = import_transformers()
        config = library.MobileNetV2Config(
            image_size=size,
            depth_multiplier=width / 32,
            tf_padding=False,
            classifier_dropout_prob=dropout,
            num_labels=CLASSES,
        )
        return library.MobileNetV2ForImageClassification(config), labelled_images(batch, size)

    return assemble(
        draw, logits_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device, memory_format=memory_format
    )
