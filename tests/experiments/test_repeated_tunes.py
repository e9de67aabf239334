"""The benchmark of repeated searches: what counts as a good ending."""

from typing import Any

import pytest

from experiments.benchmarks.repeated_tunes.__main__ import count_faster, is_good, read_ending


def document(
    *, best: str, confirmed: bool = True, disturbed: str = "", smallest: float | None = None
) -> dict[str, Any]:
    """A study; `smallest` is the time of the smallest plan over eager's."""
    measurement = {"charged_bytes": 300, "floor_bytes": 100, "outcome": "ok", "step_seconds": [0.4, 0.5]}
    timed = {"baseline_seconds": [0.45 / smallest]} if smallest else {}
    trials = [
        {"number": 0, "kind": "baseline", "plan": None, "measurement": measurement},
        {"number": 1, "kind": "smallest", "plan": "small", "measurement": measurement | timed},
        {"number": 2, "kind": "planner", "plan": "fast", "measurement": measurement | {"outcome": "over_budget"}},
        {"number": 3, "kind": "confirm", "plan": best, "measurement": measurement},
    ]
    rows = [{"trial": 3, "time_ratio": {"middle": 1.0, "low": 0.9, "high": 1.1}}] if confirmed else []
    return {"best": trials[3], "trials": trials, "confirmed": rows, "disturbed": disturbed}


@pytest.mark.parametrize(
    ("ending", "good"),
    [
        (document(best="fast"), True),
        (document(best="small"), False),
        (document(best="fast", confirmed=False), False),
        (document(best="small", disturbed="2 of 5 measurements"), True),
    ],
)
def test_a_good_search_ends_with_a_confirmed_plan_that_is_not_the_smallest_or_reports_a_busy_machine(
    ending: dict[str, Any], good: bool
):
    run = read_ending(ending)
    assert (run["charged_bytes"], run["over_budget"], run["trials"], run["measured"]) == (200, 1, 4, 3)
    assert run["eager_seconds"] == 0.45
    assert is_good({"code": 0, **run}) is good


def test_a_plan_is_faster_than_the_smallest_where_its_whole_interval_is_and_where_that_has_a_time():
    endings = [document(best="fast", smallest=1.2), document(best="fast", smallest=1.05), document(best="fast")]
    runs = [{"code": 0, **read_ending(ending)} for ending in endings]  # the interval ends at 1.1
    assert count_faster([*runs, {"code": 4}]) == (1, 2)


def test_a_search_that_fails_is_no_good_ending():
    assert not is_good({"code": 4})
