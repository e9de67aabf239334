"""The settings outside of a plan that decide how fast its step runs."""

import pytest

from autotune.records.speed_environment import read_speed_environment


def test_variables_that_choose_the_instructions_of_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch):
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert variables.items() <= read_speed_environment(2, 1).items()
