"""Calls that name no GPU use that of their step."""

from contextlib import contextmanager

import pytest
import torch

from autotune.runtime.gpu.current_gpu import use_gpu


def test_a_function_runs_each_time_on_the_gpu_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = [0], list[int]()

    @contextmanager
    def device(chosen: torch.device):
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    open_store = use_gpu(torch.device("cuda:1"))(lambda: seen.append(current[-1]))
    open_store()
    open_store()
    use_gpu(torch.device("cpu"))(lambda: seen.append(current[-1]))()
    assert (seen, current) == ([1, 1, 0], [0])
