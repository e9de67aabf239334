"""Let PyTorch's current GPU be that of a step, for calls that name none."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_gpu(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one for the block, or for the decorated function; nothing on a CPU.

    >>> with use_gpu(torch.device("cpu")):
    ...     pass
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
