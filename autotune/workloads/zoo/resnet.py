"""ResNets (He et al. 2015) of convolutions and BatchNorm: 18 with basic blocks, 50 and 152 with bottlenecks."""

from collections.abc import Callable
from typing import Literal

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import (
    Drawn,
    Dtype,
    MemoryFormat,
    OptimizerName,
    assemble,
    import_transformers,
    require_at_least,
)
from autotune.workloads.zoo.images import CLASSES, labelled_images, logits_loss


def resnet18(
    *,
    batch: int = 10,
    size: int = 224,
    depth: int | None = None,
    width: int = 64,
    dtype: Dtype = "float32",
    memory_format: MemoryFormat = "contiguous",
    optimizer: OptimizerName = "sgd",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a ResNet-18, 11.7 million parameters. `depth`: blocks per stage (2, 2, 2, 2); `width`: channels of the stem."""
    draw = _resnet("basic", (2, 2, 2, 2), batch=batch, size=size, depth=depth, width=width)
    return assemble(
        draw, logits_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device, memory_format=memory_format
    )


def resnet50(
    *,
    batch: int = 8,
    size: int = 224,
    depth: int | None = None,
    width: int = 64,
    dtype: Dtype = "float32",
    memory_format: MemoryFormat = "contiguous",
    optimizer: OptimizerName = "sgd",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a ResNet-50, 25.6 million parameters. `depth`: blocks per stage (3, 4, 6, 3); `width`: channels of the stem."""
    draw = _resnet("bottleneck", (3, 4, 6, 3), batch=batch, size=size, depth=depth, width=width)
    return assemble(
        draw, logits_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device, memory_format=memory_format
    )


def resnet152(
    *,
    batch: int = 4,
    size: int = 224,
    depth: int | None = None,
    width: int = 64,
    dtype: Dtype = "float32",
    memory_format: MemoryFormat = "contiguous",
    optimizer: OptimizerName = "sgd",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return a ResNet-152, 60.2 million parameters. `depth`: blocks per stage (3, 8, 36, 3); `width`: channels of the stem."""
    draw = _resnet("bottleneck", (3, 8, 36, 3), batch=batch, size=size, depth=depth, width=width)
    return assemble(
        draw, logits_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device, memory_format=memory_format
    )


def _resnet(
    block: Literal["basic", "bottleneck"],
    stages: tuple[int, ...],
    *,
    batch: int,
    size: int,
    depth: int | None,
    width: int,
) -> Callable[[], Drawn]:
    """Check the arguments and return a function that draws the model and its batch."""
    require_at_least(1, batch=batch, depth=depth, width=width)
    require_at_least(32, size=size)
    expansion = 4 if block == "bottleneck" else 1

    def draw() -> Drawn:
        library = import_transformers()
        config = library.ResNetConfig(
            embedding_size=width,
            hidden_sizes=[width * expansion * 2**stage for stage in range(4)],
            depths=[depth or blocks for blocks in stages],
            layer_type=block,
            num_labels=CLASSES,
        )
        return library.ResNetForImageClassification(config), labelled_images(batch, size)

    return draw
