"""Let the caching allocator's segments grow, as a plan with the arena expects on a GPU."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_KEY = "expandable_segments"


def grow_segments(environment: Mapping[str, str] = os.environ, library: Any = None) -> None:
    """Switch expandable segments on in this process, unless the user's environment decides about them.

    In segments of fixed size freed blocks are often too small for the next tensors. Warns where the option is off and
    cannot be changed. `library` replaces `torch._C` in tests.
    """
    library = library or torch._C
    chosen = next((environment[name] for name in _NAMES if _KEY in environment.get(name, "")), "")
    if f"{_KEY}:true" in chosen.replace(" ", "").lower():
        return
    change = getattr(library, "_accelerator_setAllocatorSettings", None)
    if chosen or change is None:
        warnings.warn(
            "the plan was made for a caching allocator with expandable segments, and they are off: the step may be charged "
            f"more than planned; start the process with {_NAMES[0]}={_KEY}:True",
            stacklevel=2,
        )
        return
    present = library._accelerator_getAllocatorSettings()
    if _KEY not in present:
        change(",".join(filter(None, (present, f"{_KEY}:True"))))
