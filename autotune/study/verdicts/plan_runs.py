"""Group the measured runs of a study by plan."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from autotune.ir.plan import Plan
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.statistics import block_means, block_ratios


def group_runs(trials: Iterable[Trial]) -> dict[Plan, list[Trial]]:
    """Return the trials that ran a plan, grouped by plan, in the given order.

    Trials of kind REPEAT are left out: they reuse an earlier measurement. So is a run that was cut off
    (`was_cut_off`), where another run of the same plan came to an end.
    """
    runs: dict[Plan, list[Trial]] = {}
    for trial in trials:
        if trial.plan is not None and trial.kind != TrialKind.REPEAT and trial.was_run:
            runs.setdefault(trial.plan, []).append(trial)
    return {plan: [run for run in same if not was_cut_off(run)] or same for plan, same in runs.items()}


def was_cut_off(trial: Trial) -> bool:
    """Return whether the run of a trial ended for a reason outside of its plan: a signal, or a full disk."""
    is_full = trial.measurement is not None and trial.measurement.outcome is Outcome.DISK_FULL
    return is_full or was_killed(trial)


def was_killed(trial: Trial) -> bool:
    """Return whether a signal from outside ended the run of a trial."""
    return trial.measurement is not None and trial.measurement.was_killed


def count_rounds(trials: Iterable[Trial]) -> Counter[Plan | None]:
    """Return the number of times that each plan was re-measured in new processes."""
    return Counter(trial.plan for trial in trials if trial.kind == TrialKind.CONFIRM and trial.was_run)


def pool_seconds(runs: Iterable[Trial]) -> tuple[float, ...]:
    """Return the seconds of a step in each block of all runs; blocks do not span runs."""
    return tuple(chain.from_iterable(block_means(run.measurement.step_seconds) for run in runs if run.measurement))


def pool_ratios(runs: Iterable[Trial]) -> tuple[float, ...]:
    """Return the block ratios of all runs, or seconds where eager did not run; see `block_ratios`.

    Blocks do not span runs, since a run's last block may be a step short.
    """
    return tuple(chain.from_iterable(block_ratios(run.measurement) for run in runs if run.measurement is not None))
