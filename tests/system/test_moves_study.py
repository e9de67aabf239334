"""A study of a real model whose moves are measured in real processes: their bytes are as predicted, their results eager's."""

import textwrap
from pathlib import Path

import pytest

import autotune
from autotune.records.measurement import Outcome
from autotune.records.trial import TrialKind

MODEL = """
import torch
from torch import nn
from autotune import Workload

def loss_fn(model, batch):
    return model(batch).square().mean()

def factory():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh())]
    model = nn.Sequential(*layers)
    return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), torch.randn(1024, 256))
"""


@pytest.mark.slow
def test_moves_of_a_real_model_keep_their_predicted_bytes_and_eagers_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # every move is worth a trial here, however noisy the machine is: the gain is not what is tested
    monkeypatch.setattr("autotune.study.plan_moves.RESOLUTION", 0.0)
    monkeypatch.setattr("autotune.study.plan_moves.ratio_noise", lambda _: 0.002)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODEL))
    result = autotune.tune(
        "mine.py:factory", budget="70%", trials=8, time="20m", runs=str(tmp_path / "runs"), plans=str(tmp_path / "plans"),
        planners={"allocator": ["arena"], "order": ["traced"], "recompute": ["greedy"], "reorder": ["keep"]},
    )  # fmt: skip
    moves = [trial for trial in result.trials if trial.kind is TrialKind.MOVE and trial.was_run]
    assert moves
    finished = [trial for trial in moves if trial.measurement.outcome in (Outcome.OK, Outcome.STOPPED_EARLY)]
    assert finished
    assert not [trial for trial in moves if trial.measurement.outcome in (Outcome.WRONG_RESULT, Outcome.CRASHED)]
    for trial in finished:
        assert trial.measurement.max_error in (None, 0.0)
        if trial.measurement.step_peak_bytes is not None:
            assert trial.measurement.step_peak_bytes == pytest.approx(trial.estimate.peak_bytes, rel=0.01)
    assert result.best.measurement.outcome is Outcome.OK
    assert any(not trial.move for trial in result.trials if trial.kind is TrialKind.CONFIRM)
