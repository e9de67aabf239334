"""Batch and loss of the image classifiers: labelled noise, and the cross entropy of logits."""

import torch
import torch.nn.functional as F

CLASSES = 1000
"""Number of classes, as in ImageNet."""


def labelled_images(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of shape (batch, 3, size, size) and labels of shape (batch,)."""
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))


def logits_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy in float32, whatever the model's dtype."""
    images, labels = batch
    return F.cross_entropy(model(images).logits.float(), labels)
