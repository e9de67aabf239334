"""Set how many threads torch's CPU ops use, for the time of a step or of a compilation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch's CPU ops use `count` threads inside the context, where this thread starts them; 0 leaves the number as it is.

    >>> before = torch.get_num_threads()
    >>> with use_threads(1):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
