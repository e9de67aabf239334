"""Overheads measured beside eager: what is claimed of them, and that a plan is really run."""

import sys
from dataclasses import replace

import pytest

from autotune.report.claims import Claim, ClaimVerdict, Figure, read, read_origins, write
from autotune.study.verdicts.statistics import RatioInterval
from experiments.common import measured
from tests.experiments.paths import CLAIMS
from tests.measure.harness.test_run import WORKLOADS

CLAIM = Claim("a net: overhead", "a paper", "batch 2", "%", Figure(10.0), None)


def overhead(peak: int, eager_percent: float, traced_percent: float, width: float = 0.001) -> measured.MeasuredOverhead:
    ratio = (100 + eager_percent) / (100 + traced_percent)
    interval = RatioInterval(ratio, ratio - width, ratio + width)
    return measured.MeasuredOverhead(0.5, 1000, peak, eager_percent, traced_percent, interval, 8, "a processor")


RATIO = overhead(500, -12.0, -20.0)


def test_a_ratio_of_the_same_run_is_at_best_a_ratio_that_was_reproduced():
    claim = measured.build_measured_claim(CLAIM, RATIO)
    assert claim.ours is not None
    assert (claim.ours.value, claim.kind, claim.verdict) == (pytest.approx(10.0), "measured", ClaimVerdict.RATIOS)
    assert (claim.ours.low, claim.ours.high) == (pytest.approx(9.9), pytest.approx(10.1))
    wide = measured.build_measured_claim(CLAIM, overhead(500, -12.0, -20.0, width=0.02))
    assert wide.verdict is ClaimVerdict.UNDECIDED
    assert "over plain eager's, in turns, the plan takes -12.0 %, the step as traced -20.0 %" in claim.conditions
    # faster than plain eager, because the arena is, and slower than the step without the plan
    slower = overhead(500, -10.0, -20.0)
    assert measured.build_measured_claim(CLAIM, slower).verdict is ClaimVerdict.NOT_REPRODUCED


def test_a_share_that_no_plan_keeps_is_not_compared():
    claim = measured.build_measured_claim(CLAIM, overhead(600, -12.5, -20.0))
    assert claim.verdict is ClaimVerdict.NOT_COMPARABLE
    assert claim.why_not == "at this size no plan of ours goes below 60.0%"


def test_an_overhead_that_nobody_published_is_not_compared():
    unpublished = replace(CLAIM, published=None, why_not="not stated")
    assert measured.build_measured_claim(unpublished, overhead(600, 120.0, -20.0)).why_not == "not stated"


def test_a_plan_with_more_bytes_and_more_time_than_published_is_a_failure():
    slower = overhead(600, 120.0, -20.0)
    claim = measured.build_measured_claim(CLAIM, slower)
    assert claim.verdict is ClaimVerdict.NOT_REPRODUCED
    assert "no plan of ours goes below 60.0%" in claim.conditions


def test_each_part_keeps_the_origin_of_its_own_run(tmp_path, monkeypatch):
    old = [CLAIM, measured.build_measured_claim(CLAIM, RATIO)]
    write(tmp_path, old, {"measured": {"commit": "c0ffee"}})
    monkeypatch.setattr(sys, "argv", ["run.py", "--parts", "simulated"])
    measured.run_parts(tmp_path, "", lambda: old[:1], lambda: old[1:], lambda _: None)
    origins = read_origins(tmp_path)
    assert origins["measured"] == {"commit": "c0ffee"}
    assert {"machine", "commit", "graphs", "date", "command"} <= origins["simulated"].keys()


def test_the_facts_of_a_measured_part_are_collected_before_it(tmp_path, monkeypatch):
    did: list[str] = []
    monkeypatch.setattr(measured, "collect_facts", lambda: did.append("facts") or {"commit": "c0ffee"})
    monkeypatch.setattr(sys, "argv", ["run.py", "--parts", "measured"])
    measured.run_parts(tmp_path, "", list, lambda: did.append("measured") or [], lambda _: None)
    assert did == ["facts", "measured"]
    assert read_origins(tmp_path)["measured"]["commit"] == "c0ffee"


@pytest.mark.parametrize("parts", [["simulated"], ["measured"], []])
def test_a_part_that_is_not_made_again_keeps_its_claims(parts: list[str], tmp_path, monkeypatch):
    old = [CLAIM, measured.build_measured_claim(CLAIM, RATIO)]
    write(tmp_path, old)
    regenerated = {
        "simulated": [measured.replace(CLAIM, text="anew")],
        "measured": [measured.replace(old[1], text="anew")],
    }
    drawn: list[Claim] = []
    monkeypatch.setattr(sys, "argv", ["run.py", "--parts", *parts])
    measured.run_parts(tmp_path, "", lambda: regenerated["simulated"], lambda: regenerated["measured"], drawn.extend)
    expected = [
        *(regenerated["simulated"] if "simulated" in parts else old[:1]),
        *(regenerated["measured"] if "measured" in parts else old[1:]),
    ]
    assert list(read(tmp_path)) == expected
    assert drawn == expected[1:]


@pytest.mark.parametrize("name", ["dtr", "echo", "monet", "sublinear"])
def test_an_overhead_that_was_measured_says_beside_what_and_where(name: str):
    for claim in read(CLAIMS / name):
        assert ("in turns" in claim.conditions) == (claim.kind == "measured"), claim.text


@pytest.mark.long
def test_a_plan_is_run_beside_eager_and_keeps_its_share():
    overhead = measured.measure_plan(f"{WORKLOADS}:wide", {"batch": 1 << 15}, 0.9)
    assert overhead.samples == measured.SAMPLES
    assert overhead.peak_bytes <= measured.SLACK * 0.9 * overhead.eager_bytes
