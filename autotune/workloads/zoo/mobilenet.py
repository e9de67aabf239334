"""MobileNetV2 (Sandler et al. 2018): wide, cheap activations beside few parameters, so nearly all memory is activations."""

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import (
    Drawn,
    Dtype,
    MemoryFormat,
    OptimizerName,
    assemble,
    at_least,
    share,
    transformers,
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
    """Of 3.5 million parameters. `width`: channels of the first convolution; `dropout`: before the classifier."""
    at_least(1, batch=batch, width=width)
    at_least(32, size=size)
    share(dropout=dropout)

    def draw() -> Drawn:
        library = transformers()
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
