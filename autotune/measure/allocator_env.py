"""Environment variables for a plan's allocator on a GPU; torch reads them before the first tensor."""

from collections.abc import Mapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names of the variable; versions of torch differ in which one wins."""
_KEY = "expandable_segments"


def allocator_environment(allocator: str, device_kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set on top of `environment` for plans of this allocator; empty on a CPU.

    On a GPU `arena` is the caching allocator with expandable segments. In segments of fixed size the freed blocks are
    often too small for the next tensors. The user's other allocator options stay.

    >>> allocator_environment("arena", "cuda", {})
    {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}
    """
    if device_kind != "cuda" or allocator != "arena":
        return {}
    current = {name: environment[name] for name in NAMES if name in environment} or {NAMES[0]: ""}
    return {name: ",".join([*_other_options(text), f"{_KEY}:True"]) for name, text in current.items()}


def _other_options(text: str) -> list[str]:
    """Split the options at commas outside of brackets, without the option that is set here."""
    options, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            options.append("")
        else:
            options[-1] += letter
    return [option.strip() for option in options if option.strip() and option.partition(":")[0].strip() != _KEY]
