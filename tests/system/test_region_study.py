"""A study on compiled regions, in real processes: interrupted, resumed, and trained with."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.records import plan_file as planfile
from autotune.records.run_dir import RunDir
from autotune.records.trial import load_trials
from tests.support.checkout import BRIEF, environment

MODEL = """
import torch
from torch import nn
from autotune import Workload

def loss_fn(model, batch):
    return model(batch).square().mean()

def factory():
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))]
    model = nn.Sequential(*layers)
    return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4096, 128))
"""
"""A step of 36 MiB: charges of one plan differ by 80 KiB between processes, and the tolerance is half a percent."""
TRAIN = """
import sys, torch
from autotune import TrainStep
from mine import factory
plain, planned = factory(), factory()
step = TrainStep(
    planned.model, planned.loss_fn, planned.optimizer, planned.batch, sys.argv[1], stores={"ssd": "disk"}
)
for _ in range(3):
    loss = plain.loss_fn(plain.model, plain.batch)
    loss.backward()
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    torch.testing.assert_close(step(planned.batch), loss.detach())
for mine, theirs in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
    torch.testing.assert_close(mine, theirs)
"""


CONFIG = "workload: mine.py:factory\nkernels: inductor\nbudget: 70%\nsamples: 3\ntime: 10m\nstores: {ssd: disk}\n"
"""With an empty cache, two minutes may pass before the first trial."""


def run(*command: str, here: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=here, env=environment() | variables, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_a_study_on_regions_is_interrupted_and_resumed_and_its_plan_trains(tmp_path: Path):
    (tmp_path / "study.yaml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "disk").mkdir()
    trials = RunDir(tmp_path / "runs" / "one").trials
    command = [sys.executable, "-c", BRIEF, "tune", "study.yaml", "--name", "one"]
    with (tmp_path / "output.txt").open("w+") as output:
        with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=output) as study:
            while study.poll() is None and (not trials.exists() or len(load_trials(trials)) < 2):
                time.sleep(0.1)
            study.send_signal(signal.SIGTERM)
            study.wait(timeout=60)
        output.seek(0)
        assert study.returncode == 128 + signal.SIGTERM, output.read()
    before = trials.read_text().splitlines()

    run("-c", BRIEF, "resume", "runs/one", "--trials", str(len(before) + 1), "--time", "2m", here=tmp_path)
    assert trials.read_text().splitlines()[: len(before)] == before
    (path,) = (tmp_path / "plans").glob("*.json")
    plan = planfile.read(path)
    assert plan.plan.kernels == "inductor"
    assert {trial.graph_digest for trial in load_trials(trials)} == {plan.graph_digest}
    assert plan.measurement is not None
    assert plan.measurement.verified

    run("train.py", str(path), here=tmp_path, CXX="/bin/false")  # no later process compiles anything
