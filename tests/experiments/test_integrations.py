"""The committed figures of planned steps inside other libraries' loops reach their targets."""

import json

import pytest

from experiments.benchmarks.integrations import __main__ as integrations

PATH = integrations.HERE / "results" / "results.json"
RESULTS = json.loads(PATH.read_text(encoding="utf-8"))["integrations"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_planned_loop_is_identical_over_50_steps_within_70_percent_of_the_bytes(name: str):
    assert integrations.STEPS == 50
    assert integrations.is_equal(RESULTS[name])
    assert integrations.bytes_ratio(RESULTS[name]) <= integrations.TARGET == 0.70


def test_the_summary_shows_the_results():
    assert (integrations.HERE / "results" / "summary.md").read_text(encoding="utf-8") == integrations.summary(RESULTS)
