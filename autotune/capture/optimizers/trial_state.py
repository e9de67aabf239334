"""Compare and restore what a trial step of an optimizer may change: objects and random generators."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autotune.capture.optimizers.optimizer_copy import ATOMS, is_array, is_plain, object_fields


def fingerprint(item: Any, names: dict[int, str]) -> Any:
    """Return something comparable that differs where a step changed `item`. `names` replace parameters by their id."""
    return _print(item, names, set())


def _print(item: Any, names: dict[int, str], above: set[int]) -> Any:
    if id(item) in names:
        return names[id(item)]
    if isinstance(item, ATOMS) or id(item) in above:
        return repr(item) if isinstance(item, (int, float, complex, str, bytes, type(None))) else type(item).__name__
    above = above | {id(item)}
    match item:
        case torch.Tensor():
            return "tensor", tuple(item.shape), str(item.dtype), _bits(item)
        case torch.Generator():
            return "generator", _bits(item.get_state())
        case dict():
            return "dict", [(_print(k, names, above), _print(part, names, above)) for k, part in item.items()]
        case list() | tuple():
            return type(item).__name__, [_print(part, names, above) for part in item]
        case set() | frozenset():
            return "set", sorted(map(repr, (_print(part, names, above) for part in item)))
        case _ if callable(getattr(item, "getstate", None)):  # random.Random
            return type(item).__name__, repr(item.getstate())
        case _ if is_plain(item):
            return type(item).__name__, [(key, _print(part, names, above)) for key, part in object_fields(item)]
    return type(item).__name__, repr(getattr(item, "__reduce__", str)()) if is_array(item) else ""


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read_random_states() -> list[Any]:
    """Return the states of the generators that a step may draw from: torch's on the CPU, Python's and numpy's."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        states.append(repr(sys.modules["numpy"].random.get_state()))
    return states


@contextlib.contextmanager
def preserve_generators(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore every generator that a trial step may draw from: Python's, numpy's, and torch's on the parameters' devices."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
