"""Give synthetic index tensors values like those of real data.

With equal indices a scattering kernel of a GPU adds everything to one row, one atomic add after the other. That takes many
times as long as with the indices of a batch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

aten = torch.ops.aten
_ALONG_DIM = {
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
    aten.index_select.default, aten.index_add.default, aten.index_copy.default, aten.gather_backward.default,
}  # fmt: skip
_BY_POSITION = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default}
_CLASSES = {
    aten.nll_loss_forward.default: (0, 1), aten.nll_loss_backward.default: (1, 2),
    aten.nll_loss2d_forward.default: (0, 1), aten.nll_loss2d_backward.default: (1, 2),
}  # fmt: skip
"""Positions of the scores and of the classes."""


def spread_indices(target: Any, args: tuple[Any, ...]) -> None:
    """Fill the index arguments of a call with valid indices at random, in place; other calls stay as they are."""
    for index, size in _indices(target, args):
        if isinstance(index, torch.Tensor) and index.dtype in (torch.int32, torch.int64) and size > 0:
            with contextlib.suppress(RuntimeError):  # an expanded tensor has one element in several places
                index.random_(0, size)


def _indices(target: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, int]]:
    """Yield each index argument with the number of rows that it chooses from."""
    if target is aten.embedding.default:
        yield args[1], args[0].shape[0]
    elif target is aten.embedding_dense_backward.default:
        yield args[1], args[2]
    elif target in _CLASSES:
        scores, classes = _CLASSES[target]
        yield args[classes], args[scores].shape[1 if args[scores].ndim > 1 else 0]
    elif target in _ALONG_DIM:
        dim = next(position for position, part in enumerate(args) if isinstance(part, int))
        yield args[dim + 1], args[0].shape[args[dim]] if args[0].ndim else 1
    elif target in _BY_POSITION:
        for position, index in enumerate(args[1]):
            yield index, args[0].shape[position]
