"""The end of a search: the time that is reserved for the next trial is that of trials which measured a plan."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.ir.plan import Plan
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.session import _Session
from autotune.study.trials.next_trial import Proposal
from autotune.study.trials.search_end import RECENT, Patience, RecentSeconds, describe_end


def trial(kind: TrialKind, measurement: Measurement, plan: Plan | None = None) -> Trial:
    return Trial(1, kind, "w", "d", plan=plan, measurement=measurement)


def record(seconds: RecentSeconds, ended: Trial, duration: float) -> None:
    """Record a trial that took so many seconds, as a session does."""
    store, ignore = SimpleNamespace(record=lambda *_: None), lambda _: None
    session: Any = SimpleNamespace(trial_seconds=seconds, store=store, trials=[], announce=ignore, progress=ignore)
    _Session.record(session, ended, Proposal(ended.kind, {}), time.monotonic() - duration)


@pytest.mark.parametrize(
    "unmeasured",
    [
        trial(TrialKind.REPEAT, Measurement(Outcome.OK, step_seconds=(1.0,)), Plan((0,))),
        trial(TrialKind.SEARCH, Measurement(Outcome.CRASHED, "the planner found no plan")),
        trial(TrialKind.SEARCH, Measurement(Outcome.STOPPED_EARLY, step_seconds=(1.0,)), Plan((0,))),
    ],
    ids=["known plan", "no plan", "stopped early"],
)
def test_trials_that_are_not_measured_to_their_end_do_not_shorten_the_time_reserved_for_one_that_does(
    unmeasured: Trial,
):
    seconds = RecentSeconds()
    record(seconds, trial(TrialKind.SEARCH, Measurement(Outcome.OK, step_seconds=(1.0,)), Plan((0,))), 60.0)
    for _ in range(RECENT):
        record(seconds, unmeasured, 0.0)
    assert seconds.longest == pytest.approx(60.0, abs=5.0)


def test_a_search_that_ends_before_its_first_setting_names_the_time_until_then_and_one_that_tried_a_setting_does_not():
    config, tried = Config(workload="w", time="4m"), trial(TrialKind.SEARCH, Measurement(Outcome.OK), Plan((0,)))
    ended = describe_end(config, [], Patience(40), 226.0)
    assert ended.endswith("took 3m46s of 4m, and re-measuring needs the rest; give it more --time")
    assert describe_end(config, [], Patience(40), 250.0).endswith("took 4m10s of 4m; give it more --time")
    assert describe_end(config, [tried], Patience(40), 226.0) == "its time is used up"
