"""Verdicts follow from figures, and files with other verdicts are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.report.claims import (
    RESULT,
    Claim,
    ClaimVerdict,
    Figure,
    claim_rows,
    find_experiments,
    read,
    write,
)

CLAIM = Claim("a net: peak", "a paper", "simulated", "GB", Figure(10.0), Figure(10.4), tolerance=0.05)


@pytest.mark.parametrize(
    ("sense", "ours", "verdict"),
    [
        ("equal", 10.5, ClaimVerdict.REPRODUCED),
        ("equal", 9.4, ClaimVerdict.NOT_REPRODUCED),
        ("at most", 2.0, ClaimVerdict.BOUND),
        ("at most", 10.6, ClaimVerdict.NOT_REPRODUCED),
        ("at least", 99.0, ClaimVerdict.BOUND),
        ("at least", 9.5, ClaimVerdict.REPRODUCED),
        ("at least", 9.4, ClaimVerdict.NOT_REPRODUCED),
    ],
)
def test_a_number_may_differ_by_its_tolerance_and_freely_on_the_side_that_is_better(sense, ours, verdict):
    assert replace(CLAIM, sense=sense, ours=Figure(ours)).verdict is verdict


def test_no_overhead_at_all_is_at_most_a_negative_one_only_where_it_is_lower():
    faster = replace(CLAIM, published=Figure(-4.0), sense="at most")
    assert replace(faster, ours=Figure(0.0)).verdict is ClaimVerdict.NOT_REPRODUCED
    assert replace(faster, ours=Figure(-5.0)).verdict is ClaimVerdict.BOUND


def test_of_a_change_both_numbers_must_agree_or_else_their_ratio():
    change = replace(CLAIM, published=Figure(8.0, 16.0), sense="at most")
    assert replace(change, ours=Figure(8.0, 16.0)).verdict is ClaimVerdict.REPRODUCED
    assert replace(change, ours=Figure(3.0, 6.0)).verdict is ClaimVerdict.RATIOS
    assert (
        replace(change, ours=Figure(5.0, 6.0)).verdict is ClaimVerdict.NOT_REPRODUCED
    )  # smaller, from a smaller start


@pytest.mark.parametrize(
    ("sense", "low", "high", "verdict"),
    [
        ("equal", 9.6, 10.4, ClaimVerdict.REPRODUCED),
        ("equal", 9.6, 10.6, ClaimVerdict.UNDECIDED),
        ("equal", 2.0, 9.4, ClaimVerdict.NOT_REPRODUCED),
        ("at most", 2.0, 9.9, ClaimVerdict.BOUND),
        ("at most", 2.0, 10.1, ClaimVerdict.UNDECIDED),
        ("at most", 2.0, 90.0, ClaimVerdict.UNDECIDED),
        ("at most", 10.6, 90.0, ClaimVerdict.NOT_REPRODUCED),
        ("at least", 10.1, 90.0, ClaimVerdict.BOUND),
        ("at least", 9.0, 90.0, ClaimVerdict.UNDECIDED),
        ("at least", 2.0, 9.4, ClaimVerdict.NOT_REPRODUCED),
    ],
)
def test_the_whole_interval_of_a_measurement_decides(sense, low, high, verdict, tmp_path: Path):
    measured = replace(CLAIM, sense=sense, ours=Figure((low + high) / 2, low=low, high=high))
    assert measured.verdict is verdict
    write(tmp_path, [measured])
    assert read(tmp_path) == (measured,)
    (row,) = claim_rows({"net": [measured]})
    assert f"GB ({low:.3g} to {high:.3g})" in row[3]


def test_what_agrees_on_other_hardware_is_a_ratio():
    assert replace(CLAIM, transferred=True).verdict is ClaimVerdict.RATIOS
    assert replace(CLAIM, transferred=True, ours=Figure(20.0)).verdict is ClaimVerdict.NOT_REPRODUCED


def test_without_a_number_or_with_a_reason_nothing_is_compared():
    for changed in ({"published": None}, {"ours": None}, {"why_not": "another net"}):
        assert replace(CLAIM, **changed).verdict is ClaimVerdict.NOT_COMPARABLE


def test_claims_are_read_as_they_were_written_and_rounded_before_they_are_judged(tmp_path: Path):
    near = replace(CLAIM, published=Figure(1.0), ours=Figure(1.00001), tolerance=0.0)
    (tmp_path / "benchmark").mkdir()
    folder = tmp_path / "net"
    write(folder, [CLAIM, near])
    assert read(folder) == (CLAIM, replace(near, ours=Figure(1.0)))
    assert read(folder)[1].verdict is ClaimVerdict.REPRODUCED
    assert find_experiments(tmp_path) == {"net": folder}


def test_a_verdict_that_its_figures_do_not_bear_is_refused(tmp_path: Path):
    write(tmp_path, [replace(CLAIM, ours=Figure(20.0))])
    path = tmp_path / RESULT
    path.write_text(path.read_text().replace("not reproduced", "reproduced"))
    with pytest.raises(
        ConfigError, match="claim 1 records the verdict 'reproduced', but its figures give 'not reproduced'"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"claims": [3]}', '{"claims": [{}]}', json.dumps({"claims": [{"verdict": "x"}]})]
)
def test_a_file_of_something_else_is_refused_by_its_name(text: str, tmp_path: Path):
    (tmp_path / RESULT).parent.mkdir()
    (tmp_path / RESULT).write_text(text)
    with pytest.raises(ConfigError, match=r"result\.json"):
        read(tmp_path)


def test_rows_show_a_change_its_unit_and_a_missing_number():
    change = replace(CLAIM, published=Figure(4.99, 15.06), ours=None)
    times = replace(CLAIM, unit="x", ours=Figure(1.5), kind="measured")
    assert list(claim_rows({"net": [change, times]})) == [
        ("net", "a net: peak", "15.06 -> 4.99 GB", "-", "-", "not comparable"),
        ("net", "a net: peak", "10x", "1.5x", "measured", "not reproduced"),
    ]
