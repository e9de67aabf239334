"""Comparison of nested results, bit by bit."""

from typing import Any

import torch


def assert_equal(expected: Any, got: Any, path: str = "") -> None:
    """Assert that two trees have the same keys and the same bits."""
    assert type(expected) is type(got), path
    match expected:
        case torch.Tensor():
            assert expected.dtype == got.dtype, path
            assert torch.equal(expected.nan_to_num(), got.nan_to_num()), path
        case dict():
            assert expected.keys() == got.keys(), path
            for key, part in expected.items():
                assert_equal(part, got[key], f"{path}.{key}")
        case list() | tuple():
            assert len(expected) == len(got), path
            for index, part in enumerate(expected):
                assert_equal(part, got[index], f"{path}.{index}")
        case _:
            assert expected == got, path
