"""Two nights of `autotune nightly` on a class of Ray's devices, with real measurements."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.measure.harness.test_run import WORKLOADS
from tests.support.checkout import BRIEF, environment

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]

FLEET = """
classes:
  fake: {engine: ray, device: cpu, devices: 1}
"""
NIGHT = f"""
time: 10m
entries:
  - {{name: wide, workload: '{WORKLOADS}:wide', arguments: {{depth: 3}}, on: [fake], budget: 90%, time: 60s, trials: 2, samples: 2}}
"""


def run_night(place: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", BRIEF, "nightly", "night.yaml", "--fleet", "fleet.yaml", "--json"]
    process = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, check=False)
    assert process.stdout, process.stderr[-2000:]
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def test_the_second_night_verifies_the_champions_of_the_first_and_frees_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "night.yaml").write_text(NIGHT)
    first, second = run_night(tmp_path), run_night(tmp_path)
    assert [entry["entry"] for entry in first["entries"]] == ["wide@fake"]
    for before, after in zip(first["entries"], second["entries"], strict=True):
        assert before["verdict"] in ("new", "inconclusive"), before["detail"]
        assert before["champion"], before["detail"]
        # on a busy machine the times may differ between the nights
        assert after["verdict"] != "failed", after["detail"]
        assert after["turns"], after["detail"]
        history = tmp_path / "runs" / "nightly" / before["entry"] / "history.jsonl"
        assert len(history.read_text().splitlines()) == 2
    assert ray.available_resources().get("fake") == 2
