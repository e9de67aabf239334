"""The committed figures of planned steps inside other libraries' loops reach their targets."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.integrations import __main__ as integrations
from experiments.common.result_file import NOT_RECORDED, missing_facts

PATH = integrations.HERE / "results" / "results.json"
RESULTS = json.loads(PATH.read_text(encoding="utf-8"))["integrations"]
FACTS = {"machine": {"silicon": "x"}, "commit": "old", "date": "then", "command": "c", "load_before": 0.0}


@pytest.mark.parametrize("name", RESULTS)
def test_a_planned_loop_is_identical_over_50_steps_within_70_percent_of_the_bytes(name: str):
    assert integrations.STEPS == 50
    assert integrations.is_equal(RESULTS[name])
    assert integrations.bytes_ratio(RESULTS[name]) <= integrations.TARGET == 0.70


def test_the_summary_shows_the_results():
    assert (integrations.HERE / "results" / "summary.md").read_text(encoding="utf-8") == integrations.summary(RESULTS)


@pytest.mark.parametrize("graphs", [{"hf": "08ff", "lightning": "81d4"}, None])
def test_an_integration_that_does_not_run_keeps_its_digest_and_facts(
    graphs: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    captured: list[str] = []

    def capture(workloads: dict[str, Any]) -> dict[str, str]:
        captured.extend(workloads)
        return dict.fromkeys(workloads, "1b3e")

    stored = {**FACTS, "integrations": dict.fromkeys(("hf", "lightning"), RESULTS["hf"])}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(stored if graphs is None else {**stored, "graphs": graphs}))
    monkeypatch.setattr(integrations, "collect_facts", lambda: {**FACTS, "commit": "new"})
    monkeypatch.setattr(integrations, "measure", lambda name: (None, None))
    monkeypatch.setattr(integrations, "compare", lambda plain, planned: dict(RESULTS["hf"]))
    monkeypatch.setattr(integrations, "capture_digests", capture)
    monkeypatch.setattr(sys, "argv", ["integrations", "--only", "hf", "--out", str(tmp_path)])
    integrations.main()
    document = json.loads(path.read_text())
    assert captured == ["hf"]
    assert document["graphs"] == {"hf": "1b3e"} | ({"lightning": "81d4"} if graphs else {})
    origins = document["origins"]
    assert {name: facts["commit"] for name, facts in origins.items()} == {"hf": "new", "lightning": "old"}
    assert origins["lightning"]["graphs"] == ({"lightning": "81d4"} if graphs else NOT_RECORDED)
    assert missing_facts(document) == (() if graphs else ("graphs",))
