"""The number of torch's threads is changed for a block, and only there."""

import pytest
import torch

from autotune.kernels.threads import use_threads


def test_the_number_comes_back_after_an_error_and_nothing_changes_without_one_to_set():
    before = torch.get_num_threads()
    with use_threads(before + 1):
        with pytest.raises(KeyError), use_threads(before + 2):
            raise KeyError(torch.get_num_threads())
        assert torch.get_num_threads() == before + 1
        with use_threads(0):
            assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
