"""A study of the Pareto front, in real processes: its smallest point is measured again and trained with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.records import plan_file as planfile
from autotune.records.run_dir import RunDir
from autotune.study.recorded_run import RecordedRun
from tests.support.checkout import BRIEF, environment

MODEL = """
import torch
from torch import nn
from autotune import Workload

def loss_fn(model, batch):
    return model(batch).square().mean()

def factory():
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (nn.Linear(128, 128), nn.Tanh(), nn.GELU())]
    model = nn.Sequential(*layers)
    return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4096, 128))
"""
CONFIG = """
workload: mine.py:factory
objective: pareto
samples: 6
planners: {order: [traced], update: [at_end], recompute: [keep, greedy], reorder: [keep], offload: [keep]}
"""
TRAIN = """
import sys, torch
from autotune import TrainStep
from mine import factory
plain, planned = factory(), factory()
step = TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch, sys.argv[1])
for _ in range(2):
    loss = plain.loss_fn(plain.model, plain.batch)
    loss.backward()
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    assert torch.equal(step(planned.batch), loss.detach())
for mine, theirs in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
    assert torch.equal(mine, theirs)
"""


def run(*command: str, here: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=here,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_front_is_searched_and_its_smallest_point_keeps_its_bytes_and_trains(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "front.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text(TRAIN)
    files = RunDir(tmp_path / "runs" / "one")
    tune = ("tune", "front.yaml", "--name", "one", "--trials", "4", "--time", "80s", "--json")
    document = json.loads(run("-c", BRIEF, *tune, here=tmp_path))
    front = [row for row in document["front"] if row["status"] == "front"]
    assert front, "the smallest plan is a point wherever one was confirmed"
    assert [row["step_charged_bytes"] for row in front] == sorted(row["step_charged_bytes"] for row in front)
    records = RecordedRun.load(files.path)
    assert [point.number for point in records.front] == [row["plan"] for row in front]
    assert "<h2>Pareto front</h2>" in files.report.read_text()

    path = files.front / front[0]["file"]
    assert planfile.read(path).verified == "bit-equal to eager"
    measured = json.loads(run("-m", "autotune", "measure", str(path), "--json", here=tmp_path))["measurement"]
    assert measured["outcome"] == "ok"  # within the charge of the front and its spread
    assert measured["verified"] == "bit-equal to eager"
    run("train.py", str(path), here=tmp_path)
