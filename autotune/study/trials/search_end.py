"""Decide when a search ends for want of a gain or of time, and describe why a study ended."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.records.config import Config
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.ranking import NEW_RUNS
from autotune.units import fmt_seconds

FRONT_PAUSE = 6
"""Number of measured trials without a gain after which the uncertain plans of a front run again, before the search goes on."""
RECENT = 8
"""Number of last trials whose longest one tells the time to reserve for the next."""
UNMEASURED = 0.25
"""Weight of a trial that was not run, in measured trials, when the study counts trials without a gain."""


@dataclass(slots=True)
class Patience:
    """Trials of one session since the last gain. A resumed session starts from zero, because the user asked for more."""

    limit: int
    """Number of measured trials without a gain after which the search ends."""
    without_gain: float = 0.0

    def count(self, trial: Trial, *, is_gain: bool) -> None:
        """Count a trial that ended; a gain starts the count again."""
        if is_gain:
            self.without_gain = 0.0
        elif trial.kind in (TrialKind.SEARCH, TrialKind.MOVE, TrialKind.REPEAT):
            self.without_gain += 1 if trial.kind != TrialKind.REPEAT and trial.was_run else UNMEASURED

    @property
    def is_waning(self) -> bool:
        """True after `FRONT_PAUSE` trials without a gain."""
        return self.without_gain >= FRONT_PAUSE

    @property
    def is_used_up(self) -> bool:
        """True if the limit is reached."""
        return self.without_gain >= self.limit


@dataclass(slots=True)
class RecentSeconds:
    """Seconds of the last `RECENT` trials. One slow trial, such as one beside other work, is forgotten in time."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, seconds: float, *, is_whole: bool = True) -> None:
        """Add a trial; one that was not measured to its end counts only where it took longer than the others."""
        if is_whole or seconds > self.longest:
            self.last.append(seconds)

    @property
    def longest(self) -> float:
        """Seconds of the longest of these trials; 0 before the first."""
        return max(self.last, default=0.0)


def ran_to_end(trial: Trial) -> bool:
    """Return True if the trial's duration tells how long the next may take: its plan was measured, and nothing ended that early."""
    return trial.kind != TrialKind.REPEAT and trial.measurement is not None and trial.measurement.outcome is Outcome.OK


def describe_end(config: Config, trials: Sequence[Trial], patience: Patience, seconds: float) -> str:
    """Return why a search ended: by its number of trials, for want of a gain, or by its time.

    `seconds` is the part of its time that has passed. Where no setting was tried in it, the text names the next step.
    """
    if config.trials is not None and sum(trial.kind not in NEW_RUNS for trial in trials) >= config.trials:
        return f"its maximum of {config.trials} trials is reached"
    if patience.is_used_up:
        return f"no gain in {patience.limit} trials"
    if any(trial.kind in (TrialKind.SEARCH, TrialKind.MOVE) for trial in trials):
        return "its time is used up"
    passed = f"{seconds:.0f} s" if seconds < 120 else fmt_seconds(seconds)
    rest = ", and re-measuring needs the rest" if seconds < config.time_seconds else ""
    return (
        "its time is used up before a first setting was tried: "
        f"the phases before the search took {passed} of {config.time}{rest}; give it more --time"
    )
