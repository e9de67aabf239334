"""A GPU's side of a plan's allocator: what a process must be started with, since torch reads it before the first tensor."""

from collections.abc import Mapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Torch's versions differ in which of them counts where both are set."""
_KEY = "expandable_segments"


def allocator_environment(allocator: str, device_kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What to set in `environment` for plans of this allocator.

    `arena` on a GPU is the caching allocator with segments that grow: in those of fixed size what a plan frees is often too
    small for what it makes next. Whatever else the user has set for the caching allocator stays.
    """
    if device_kind != "cuda" or allocator != "arena":
        return {}
    named = {name: environment[name] for name in NAMES if name in environment} or {NAMES[0]: ""}
    return {name: ",".join([*_others(text), f"{_KEY}:True"]) for name, text in named.items()}


def _others(text: str) -> list[str]:
    """Options but ours: what lies between commas, other than those in brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found if one.strip() and one.partition(":")[0].strip() != _KEY]
