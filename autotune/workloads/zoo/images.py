"""What image classifiers share: a batch of labelled noise and the cross entropy of logits."""

import torch
import torch.nn.functional as F

CLASSES = 1000
"""As in ImageNet."""


def labelled_images(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of `size` x `size` and a class each."""
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))


def logits_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy, in float32 whatever the model computes in."""
    images, labels = batch
    return F.cross_entropy(model(images).logits.float(), labels)
