"""Trace a CTC loss whose lengths are numbers as the ops that eager runs on a CPU.

torch's own function makes a tensor of the lengths where a tracer is active, and the kernel's shapes then follow data.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def with_lengths(function: Any, args: Any, kwargs: Any, value: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a CTC loss in a tuple; None for another function, or lengths that are unknown.

    `value` returns the value of a tensor, or None.
    """
    if getattr(function, "__name__", "") != "ctc_loss":
        return None
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    lengths = [_numbers(named[name], value) for name in ("input_lengths", "target_lengths")]
    scores = named["log_probs"]
    if None in lengths or scores.device.type != "cpu":
        return None
    settings = {"blank": 0, "reduction": "mean", "zero_infinity": False, **named}
    return (_ctc_loss(scores, named["targets"], *lengths, settings=settings),)  # type: ignore[arg-type]


def _numbers(lengths: Any, value: Callable[[Tensor], Tensor | None]) -> list[int] | None:
    if isinstance(lengths, Tensor):
        known = value(lengths)
        return None if known is None else known.flatten().tolist()
    return list(lengths)


def _ctc_loss(
    scores: Tensor, targets: Tensor, input_lengths: list[int], target_lengths: list[int], *, settings: dict[str, Any]
) -> Tensor:
    reduction = REDUCTIONS.get(settings["reduction"], settings["reduction"])
    zero_infinity = settings["zero_infinity"]
    is_batched = scores.dim() == 3
    scores = scores if is_batched else scores.unsqueeze(1)
    targets = targets.to(torch.long)
    losses: Tensor = aten._ctc_loss.default(
        scores, targets, input_lengths, target_lengths, settings["blank"], zero_infinity
    )[0]
    if zero_infinity:
        zero = torch.zeros((), dtype=losses.dtype, device=losses.device)
        losses = torch.where(losses == float("inf"), zero, losses)
    if reduction == REDUCTIONS["mean"]:
        return (losses / torch.tensor(target_lengths, dtype=losses.dtype).clamp_min(1)).mean()
    if reduction == REDUCTIONS["sum"]:
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


def _shape(
    mode: FakeTensorMode, op: Any, scores: Tensor, targets: Tensor, *lengths: Any, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Return losses, and the kernel's table of path scores, without values."""
    del op, targets, settings
    with mode:
        rows, longest = len(lengths[1]), max(lengths[1])
        return scores.new_empty(rows), scores.new_empty(rows, scores.shape[0], 2 * longest + 1)


def _shape_backward(mode: FakeTensorMode, op: Any, gradient: Tensor, scores: Tensor, *others: Any) -> Tensor:
    del op, gradient, others
    with mode:
        return torch.empty_like(scores, memory_format=torch.contiguous_format)


SHAPES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._ctc_loss.default: _shape,
    aten._ctc_loss_backward.default: _shape_backward,
}
"""Shape functions of the kernels; torch has none."""
