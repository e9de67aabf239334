"""Choose a size for a batch, and pad or cut the batch to it."""

import copy
from bisect import bisect_left
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.errors import ConfigError

TOKEN_FIELDS: Mapping[str | int, float] = {
    "input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "special_tokens_mask": 1, "labels": -100,
}  # fmt: skip
"""Values to pad with, by the names that tokenizers and language models of transformers use."""


@dataclass(frozen=True)
class Buckets:
    """Sizes that batches are padded to, so that a few plans serve batches of many lengths.

    A batch is padded at its end to the next of the sizes. The plan belongs to the largest size. Each other size is
    captured and planned once, before the first step, with the settings and the budget of that plan. A batch larger than
    every size is not padded.

    Padding must not change the loss. Before the first step, a padded eager step is compared with an unpadded one for each
    size, without dropout. If the loss, a gradient, a buffer or a further result of the same shape differs by more than rounding,
    a warning names it, and no batch is padded. Nor is one where nothing can be compared.
    Dropout draws more numbers for a padded batch. Its steps are statistically equal to unpadded ones, and not bit-equal.

    Args:
        sizes: Sizes along `dim`, in any order; at least one.
        pad: Value to pad with, for each field that is padded: by its key in a mapping, its index in a tuple or list, or its name as
            an attribute. None pads the fields of `TOKEN_FIELDS`, such as `input_ids` and `labels`, wherever the batch has them.
        dim: Dimension that is padded; equally long in all padded fields.

    Raises:
        ConfigError: A size, `dim` or `pad` is invalid.

    Examples:
        >>> import torch, autotune
        >>> buckets = autotune.Buckets([16, 32], pad={"tokens": 0, "labels": -100})
        >>> batch = {"tokens": torch.ones(4, 20, dtype=torch.int64), "labels": torch.ones(4, 20, dtype=torch.int64)}
        >>> buckets.choose(buckets.measure(batch))
        32
        >>> buckets.resize(batch, 32)["labels"].shape
        torch.Size([4, 32])
    """

    sizes: Sequence[int]
    pad: Mapping[str | int, float] | None = None
    dim: int = 1

    def __post_init__(self) -> None:
        sizes = sorted(set(self.sizes))
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(f"Buckets: sizes is {list(self.sizes)}; give positive integers, such as [64, 128, 256]")
        if type(self.dim) is not int or self.dim < 0:
            raise ConfigError(f"Buckets: dim is {self.dim!r}; give the number of a dimension, from 0")
        if self.pad is not None and not self.pad:
            raise ConfigError(
                "Buckets: pad names no field; give a value for each padded field, such as {'labels': -100}"
            )
        object.__setattr__(self, "sizes", tuple(sizes))

    @property
    def largest(self) -> int:
        """Largest size, which the plan belongs to."""
        return self.sizes[-1]

    def choose(self, size: int) -> int | None:
        """Return the smallest of the sizes that is at least `size`; None if all are smaller."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def measure(self, batch: Any) -> int:
        """Return the size of a batch's padded fields.

        Raises:
            ConfigError: The batch has none of them, or their sizes differ.
        """
        sizes = {name: tensor.shape[self.dim] for name, tensor in self._fields(batch)}
        if not sizes:
            raise ConfigError(
                f"Buckets: no tensor of the batch with a dimension {self.dim} is one of {', '.join(map(repr, self._values))}; "
                "name the fields to pad, as pad={'labels': -100} for a mapping or pad={0: 0, 1: -100} for a tuple"
            )
        if len(set(sizes.values())) > 1:
            described = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise ConfigError(
                f"Buckets: the sizes of dimension {self.dim} differ ({described}); name only fields of one size in pad"
            )
        return next(iter(sizes.values()))

    def resize(self, batch: Any, size: int) -> Any:
        """Return the batch with its fields padded, or cut, at their end to `size`. Resized tensors are copies."""
        return self._map_fields(batch, lambda tensor, value: _resize(tensor, self.dim, size, value))

    def take_samples(self, batch: Any, count: int) -> Any:
        """Return the first `count` samples, along dimension 0; the batch itself where that is the padded dimension."""
        samples = self.count_samples(batch)
        if samples <= count or self.dim == 0:
            return batch

        def cut(leaf: Any) -> Any:
            has_samples = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == samples
            return leaf[:count] if has_samples else leaf

        return _rebuild(batch, lambda content: pytree.tree_map(cut, content))

    def count_samples(self, batch: Any) -> int:
        """Return the size of dimension 0 of the padded fields."""
        return max(tensor.shape[0] for _, tensor in self._fields(batch))

    @property
    def _values(self) -> Mapping[str | int, float]:
        return TOKEN_FIELDS if self.pad is None else self.pad

    def _fields(self, batch: Any) -> Iterator[tuple[str | int, torch.Tensor]]:
        content = batch.data if isinstance(batch, UserDict) else batch
        for path, leaf in pytree.tree_flatten_with_path(content)[0]:
            if self._is_padded(path, leaf):
                yield _key(path), leaf

    def _is_padded(self, path: tuple[Any, ...], leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > self.dim and _key(path) in self._values

    def _map_fields(self, batch: Any, change: Callable[[torch.Tensor, float], torch.Tensor]) -> Any:
        def change_fields(content: Any) -> Any:
            leaves, spec = pytree.tree_flatten_with_path(content)
            changed = [
                change(leaf, self._values[_key(path)]) if self._is_padded(path, leaf) else leaf for path, leaf in leaves
            ]
            return pytree.tree_unflatten(changed, spec)

        return _rebuild(batch, change_fields)


def _rebuild(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the changed batch; a UserDict, as tokenizers of transformers return, is copied with changed items."""
    if not isinstance(batch, UserDict):
        return change(batch)
    copied = copy.copy(batch)
    copied.data = change(batch.data)
    return copied


def _key(path: tuple[Any, ...]) -> str | int:
    """Return the key, index or attribute that a path of the batch ends with; 0 for a batch that is one tensor."""
    if not path:
        return 0
    match path[-1]:
        case pytree.SequenceKey(index):
            return int(index)
        case pytree.GetAttrKey(name):
            return str(name)
        case pytree.MappingKey(key):
            return key if isinstance(key, int) else str(key)
        case other:
            return str(other)


def _resize(tensor: torch.Tensor, dim: int, size: int, value: float) -> torch.Tensor:
    length = tensor.shape[dim]
    if size <= length:
        # one layout for all batches of a size: strides are a part of the captured step
        return tensor.narrow(dim, 0, size).contiguous()
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, size - length), value=value)
