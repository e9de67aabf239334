"""A plan with the arena gets segments that grow, whether or not the process was started with them."""

import warnings
from types import SimpleNamespace

import pytest

from autotune.runtime.gpu.segments import grow_segments


class Library:
    """The allocator's settings, as one string."""

    def __init__(self, settings: str = "") -> None:
        self.settings = settings

    def _accelerator_getAllocatorSettings(self) -> str:
        return self.settings

    def _accelerator_setAllocatorSettings(self, settings: str) -> None:
        self.settings = settings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:True", "expandable_segments:True"),
    ],
)
def test_the_option_is_added_to_those_that_are_set(before: str, after: str) -> None:
    library = Library(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grow_segments({}, library)
    assert library.settings == after


def test_what_the_user_decided_stays_and_a_plan_that_it_does_not_suit_is_told() -> None:
    library = Library()
    with pytest.warns(UserWarning, match="start the process with PYTORCH_ALLOC_CONF=expandable_segments:True"):
        grow_segments({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, library)
    with pytest.warns(UserWarning, match="they are off"):
        grow_segments({}, SimpleNamespace())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grow_segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, library)
    assert library.settings == ""
