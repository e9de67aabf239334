"""Measure the fastest plans of a landscape afresh."""

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.records.measurement import Measurement
from autotune.records.trial import Trial, TrialKind
from autotune.study.offline.landscape import Landscape, pool_measurements
from autotune.study.runner import Runner
from autotune.study.verdicts.ranking import apply_rules, plan_hash

ROUNDS = 3
"""Fresh measurements of a leading plan."""


def remeasure_leaders(recorded: Landscape, trials: Sequence[Trial], runner: Runner, leaders: int) -> Landscape:
    """Measure the fastest plans afresh in turns, until the fastest so many of all have fresh measurements alone.

    Of many plans that were measured once, the fastest one was lucky, too. Disturbed points are left out.
    """
    by_plan = {plan_hash(trial.plan): trial for trial in trials if trial.plan is not None}
    fresh: dict[str, Measurement] = {}
    points = recorded.points
    while True:
        recorded = replace(
            recorded,
            points=tuple(
                point
                for point in (replace(point, measurement=fresh.get(point.plan, point.measurement)) for point in points)
                if not point.measurement.disturbed
            ),
        )
        ratios = {point.plan: ratio for point in recorded.points if (ratio := recorded.ratio_of(point)) is not None}
        if not (waiting := [plan for plan in sorted(ratios, key=ratios.__getitem__)[:leaders] if plan not in fresh]):
            return recorded
        runs: dict[str, list[Trial]] = {plan: [] for plan in waiting}
        for _ in range(ROUNDS):
            for plan in waiting:
                trial = by_plan[plan]
                assert trial.plan is not None
                result = runner.measure(trial.plan, budget_bytes=recorded.rules.accepted_bytes)
                runs[plan].append(
                    replace(trial, kind=TrialKind.SEARCH, measurement=apply_rules(result, recorded.rules))
                )
        for plan, measured in runs.items():
            fresh[plan] = pool_measurements(measured)
            after = replace(recorded.points[0], plan=plan, measurement=fresh[plan])
            print(f"{plan}: {ratios[plan]:.3f}x, afresh {recorded.ratio_of(after) or math.nan:.3f}x", flush=True)
