"""Compare a padded eager step with the unpadded one: loss, further results, buffers, and every gradient."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.trial_state import preserve_generators
from autotune.runtime.verification import gates
from autotune.runtime.verification.snapshot import (
    list_modules,
    named_buffers,
    named_parameters,
    restore_tensor,
)
from autotune.workloads.batch import rebuild_batch
from autotune.workloads.workload import LossFn


@dataclass(frozen=True, slots=True)
class PaddingEffect:
    """Result of one comparison."""

    conclusive: bool
    """False if the loss is not finite, or has no gradient and both agree, as of a batch without labels: nothing is proved."""
    difference: str = ""
    """Name and relative size of the first tensor that differs by more than rounding; empty if none does."""


def compare_padded(model: torch.nn.Module, loss_fn: LossFn, batch: Any, padded: Any) -> PaddingEffect:
    """Run forward and backward of both batches in eager, without dropout, and compare what they compute.

    Both start from the same random numbers. Afterwards buffers and generators are as before; `.grad` is not touched. The
    bound is relative to each tensor, by `gates.name_mismatch`. Results of different shapes, such as logits, are not compared.
    """
    plain = _run(model, loss_fn, batch)
    results, gradients = plain
    if not results["loss"].isfinite().all():
        return PaddingEffect(conclusive=False)
    is_flat = bool(gradients) and all(gates.magnitude(gradient) == 0.0 for gradient in gradients.values())
    difference = _describe_difference(plain, _run(model, loss_fn, padded))
    return PaddingEffect(bool(difference) or not is_flat, difference)


Computed = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Results and gradients by name."""


def _run(model: torch.nn.Module, loss_fn: LossFn, batch: Any) -> Computed:
    trained = {name: parameter for name, parameter in named_parameters(model, loss_fn) if parameter.requires_grad}
    with (
        _restored_buffers(model, loss_fn),
        preserve_generators(trained.values()),
        WithoutDropout(),
        torch.enable_grad(),
    ):
        results = loss_fn(model, rebuild_batch(batch))
        first, *extras = results if isinstance(results, tuple) else (results,)
        # not backward(): the user's .grad and hooks on it are left alone
        gradients: Sequence[torch.Tensor | None] = [None] * len(trained)
        if trained and first.requires_grad:
            gradients = torch.autograd.grad(first, list(trained.values()), allow_unused=True)
        buffers = {f"buffer {name}": buffer.detach().clone() for name, buffer in named_buffers(model, loss_fn)}
    leaves = [leaf for leaf in pytree.tree_leaves(extras) if isinstance(leaf, torch.Tensor)]
    named = {
        "loss": first.detach(),
        **{f"result {1 + index}": leaf.detach() for index, leaf in enumerate(leaves)},
        **buffers,
    }
    pairs = zip(trained, gradients, strict=True)
    return named, {name: gradient.detach() for name, gradient in pairs if gradient is not None}


def _describe_difference(plain: Computed, padded: Computed) -> str:
    """Name the first result or gradient that is another computation; empty if there is none."""
    if changed := sorted(plain[1].keys() ^ padded[1].keys()):
        return f"the gradient of {changed[0]} exists for only one of them"
    results = {
        name: (tensor, padded[0][name])
        for name, tensor in plain[0].items()
        if name in padded[0] and tensor.shape == padded[0][name].shape
    }
    gradients = {name: (tensor, padded[1][name]) for name, tensor in plain[1].items()}
    name = gates.name_mismatch(results, gradients)
    if not name:
        return ""
    spelled, (expected, actual) = (name, results[name]) if name in results else (f"gradient of {name}", gradients[name])
    return f"the {spelled} differs by {_share(expected, actual)}"


def _share(expected: torch.Tensor, actual: torch.Tensor) -> str:
    size, distance = gates.magnitude(expected), gates.difference(actual, expected)
    return f"{distance / size:.2g} of its largest element" if size and math.isfinite(distance) else "all of its size"


@contextmanager
def _restored_buffers(model: torch.nn.Module, loss_fn: LossFn) -> Iterator[None]:
    buffers = [(module, dict(module._buffers)) for module in list_modules(model, loss_fn)]
    copies = [(buffer, buffer.detach().clone()) for _, buffer in named_buffers(model, loss_fn)]
    # with their versions: autograd's graphs of before stay valid
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(buffer for buffer, _ in copies)):
        try:
            yield
        finally:
            for module, named in buffers:
                module._buffers.clear()
                module._buffers.update(named)
            with torch.no_grad():
                for buffer, copy in copies:
                    restore_tensor(buffer, copy)


_FUNCTIONAL = torch.nn.functional
_DROPOUTS = frozenset([
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.feature_alpha_dropout, torch.feature_alpha_dropout_, _FUNCTIONAL.dropout, _FUNCTIONAL.alpha_dropout,
    _FUNCTIONAL.dropout1d, _FUNCTIONAL.dropout2d, _FUNCTIONAL.dropout3d, _FUNCTIONAL.feature_alpha_dropout,
])  # fmt: skip
"""Functions that drop elements of their first argument."""
_ATTENTION = {_FUNCTIONAL.scaled_dot_product_attention: 4, _FUNCTIONAL.multi_head_attention_forward: 10}
"""Position of `dropout_p` among the arguments. The second function calls the first, but the mode is off within it."""
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
"""Functions of recurrent layers, which drop elements between layers."""


class WithoutDropout(TorchFunctionMode):
    """Switch dropout off inside the context; all other random ops draw as ever."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, with a probability of 0 if it drops elements."""
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return named["input"] if "input" in named else args[0]
        if "dropout_p" in named:
            named["dropout_p"] = 0.0
        place = _ATTENTION.get(func, len(args))
        if func in _RECURRENT:  # after has_biases and num_layers; a packed sequence has one argument more
            place = 5 if isinstance(args[3], bool) else 6
        if place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        return func(*args, **named)
