"""Overheads measured beside eager: what is claimed of them, and that a plan is really run."""

import sys

import pytest

from autotune.report.claims import Claim, Figure, Verdict, read, write
from tests.experiments.scripts import EXPERIMENTS, script
from tests.harness.test_run import WORKLOADS

sys.path.insert(0, str(EXPERIMENTS))
measured = script("measured.py")
CLAIM = Claim("a net: overhead", "a paper", "batch 2", "%", Figure(10.0), None)
RATIO = measured.Ratio(0.5, 1000, 500, 9.0, -20.0, 6, "a processor")


def test_a_ratio_of_the_same_run_is_at_best_a_ratio_that_was_reproduced():
    claim = measured.claim_of(CLAIM, RATIO)
    assert (claim.ours, claim.kind, claim.verdict) == (Figure(9.0), "measured", Verdict.RATIOS)
    assert "the step as traced takes -20.0 %" in claim.conditions
    slower = measured.Ratio(0.5, 1000, 500, 12.0, -20.0, 6, "a processor")
    assert measured.claim_of(CLAIM, slower).verdict is Verdict.NOT


def test_a_share_that_no_plan_keeps_is_not_compared():
    claim = measured.claim_of(CLAIM, measured.Ratio(0.5, 1000, 600, 9.0, -20.0, 6, "a processor"))
    assert claim.verdict is Verdict.INCOMPARABLE
    assert claim.why_not == "at this size no plan of ours goes below 60.0%"


@pytest.mark.parametrize("parts", [["simulated"], ["measured"], []])
def test_a_part_that_is_not_made_again_keeps_its_claims(parts: list[str], tmp_path, monkeypatch):
    old = [CLAIM, measured.claim_of(CLAIM, RATIO)]
    write(tmp_path, old)
    made = {"simulated": [measured.replace(CLAIM, text="anew")], "measured": [measured.replace(old[1], text="anew")]}
    drawn: list[Claim] = []
    monkeypatch.setattr(sys, "argv", ["run.py", "--parts", *parts])
    measured.run(tmp_path, "", lambda: made["simulated"], lambda: made["measured"], drawn.extend)
    expected = [
        *(made["simulated"] if "simulated" in parts else old[:1]),
        *(made["measured"] if "measured" in parts else old[1:]),
    ]
    assert list(read(tmp_path)) == expected
    assert drawn == expected[1:]


@pytest.mark.parametrize("name", ["dtr", "echo", "monet", "sublinear"])
def test_an_overhead_that_was_measured_says_beside_what_and_where(name: str):
    for claim in read(EXPERIMENTS / name):
        assert ("in turns" in claim.conditions) == (claim.kind == "measured"), claim.text


@pytest.mark.slow
def test_a_plan_is_run_beside_eager_and_keeps_its_share():
    found = measured.measured(f"{WORKLOADS}:wide", {"batch": 1 << 15}, 0.9)
    assert found.samples == measured.SAMPLES
    assert found.peak_bytes <= measured.SLACK * 0.9 * found.eager_bytes
