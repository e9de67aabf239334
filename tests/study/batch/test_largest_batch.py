"""The largest batch of a real step: it trains under the enforced limit, where plain eager is killed at that size."""

from pathlib import Path

import pytest

import autotune
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.records.budget import STEP_TOLERANCE, tolerated_bytes
from autotune.records.measurement import Outcome
from autotune.study.batch.records import read_batch_search
from autotune.workloads.reference import WorkloadRef

TEXT = """
import torch
from autotune import Workload


def loss_fn(model, batch):
    return model(batch).square().mean()


def make(batch: int = 8192):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())])
    return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(batch, 64))
"""


@pytest.mark.long
@pytest.mark.usefixtures("one_round")
def test_the_chosen_batch_trains_within_the_limit_and_eager_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text(TEXT, encoding="utf-8")
    result = autotune.tune("step.py:make", objective="batch", budget="150%", time="90s", trials=1, name="largest")
    search = read_batch_search(Path("runs/largest"))
    assert search is not None
    assert search.chosen is not None
    assert result.plan is not None
    size = result.plan.workload.arguments["batch"]
    assert size == search.chosen.batch
    assert result.best is not None
    measured = result.best.measurement
    assert measured is not None
    assert measured.outcome is Outcome.OK
    assert measured.limit, "the limit was enforced"
    assert measured.charged_bytes is not None
    assert measured.step_charged_bytes is not None
    assert measured.step_charged_bytes <= tolerated_bytes(search.budget_bytes, STEP_TOLERANCE)
    assert size > 1.5 * 8192
    spec = Spec(WorkloadRef("step.py:make", {"batch": size}), tmp_path / "logs", limit_bytes=search.limit_bytes)
    with Harness(spec) as harness:
        assert harness.baseline().outcome is Outcome.OUT_OF_MEMORY
