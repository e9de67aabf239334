"""The time that logging may take of a search."""

from autotune.report.tracking.allowance import TimeAllowance


def test_logging_may_use_some_seconds_and_then_a_share_of_the_time() -> None:
    now = 0.0
    allowance = TimeAllowance(60.0, 0.05, lambda: now)
    with allowance.use():
        now = 63.0
        assert allowance.is_left, "60 s and 5 % of 63 s are allowed"
        now = 64.0
        assert not allowance.is_left, "the time of this use counts while it lasts"
    now = 90.0
    assert allowance.is_left, "64 of 64.5 s are used"
