"""Per-block `torch.utils.checkpoint`: every residual or transformer block, and every ten steps of the LSTM's loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autotune.workload import Workload
from autotune.zoo import ZOO
from autotune.zoo.lstm import Looped

BLOCKS = ("ResNetBasicLayer", "ResNetBottleNeckLayer", "GPT2Block")
"""Classes of `transformers` whose forward is checkpointed."""
CHUNK_STEPS = 10
"""Of the LSTM's loop."""

_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)


def workload(model: str, **arguments: Any) -> Workload:
    """A ready workload with its blocks checkpointed for good."""
    made = ZOO[model](**arguments)
    _enable(made.model)
    return made


@contextmanager
def checkpointed(model: torch.nn.Module) -> Iterator[None]:
    """The model's blocks are checkpointed inside, and as they were afterwards."""
    changed = _enable(model)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _enable(model: torch.nn.Module) -> list[torch.nn.Module]:
    changed = []
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            module.__dict__["forward"] = partial(_checkpoint, module.forward)
        elif isinstance(module, Looped):
            module.__dict__["forward"] = partial(_loop, module)
        else:
            continue
        changed.append(module)
    if not changed:
        raise SystemExit(f"{type(model).__name__} has no block to checkpoint; known: {', '.join(BLOCKS)}, Looped")
    return changed


def _loop(looped: Looped, sequence: torch.Tensor) -> torch.Tensor:
    """The loop over all steps, of which only the states between chunks are kept."""
    blank = sequence.new_zeros(sequence.shape[0], sequence.shape[2])
    states = [blank] * (2 * len(looped.cells))
    outputs = []
    for inputs in sequence.split(CHUNK_STEPS, dim=1):
        output, *states = _checkpoint(_chunk, looped, inputs, *states)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _chunk(looped: Looped, sequence: torch.Tensor, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    states = list(zip(flat[::2], flat[1::2], strict=True))
    outputs = []
    for inputs in sequence.unbind(1):
        hidden = inputs
        for layer, cell in enumerate(looped.cells):
            states[layer] = cell(hidden if layer == 0 else looped.dropout(hidden), states[layer])
            hidden = states[layer][0]
        outputs.append(hidden)
    return torch.stack(outputs, dim=1), *(part for state in states for part in state)
