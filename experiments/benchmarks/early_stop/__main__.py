"""Compare rules that stop a plan early: the number of plans that a search times by each, and how fast its best plan is.

`python -m experiments.benchmarks.early_stop` simulates searches of one workload. It runs no step and takes seconds.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.measure.early_stop import MAX_ERROR, cannot_beat
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import write_text
from autotune.study.verdicts.ranking import ratio_noise
from experiments.benchmarks import trial_cost
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
TRIAL_COST = Path(trial_cost.__file__).parent / "results" / "results.json"
SEARCH_SECONDS = 330.0
"""Time that a search of eight minutes has for its plans, beside preparation and confirmation."""
SAMPLES = 10
"""Pairs of steps of a plan that is not stopped."""
NOISES = (0.02, 0.04, 0.08)
"""Standard deviations of a pair's ratio."""
NEAR, NEAR_MOST, FAR_MOST = 0.5, 0.04, 0.25
"""Half of the plans are at most 4 % slower than the fastest possible one, the others up to 25 %."""
HEAVY_TAILS = 4
"""Degrees of freedom of Student's distribution, from which the noise is drawn."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """Rule by which a search stops a plan."""

    error: float
    """Probability per step of stopping a plan that is exactly as fast as the leader; 0 stops none."""
    allows_noise: bool
    """True if the plan has to exceed the leader's ratio by the noise of that ratio, too."""

    def __str__(self) -> str:
        if not self.error:
            return "none"
        return f"{100 * self.error:g} % per step" + (", the leader's ratio plus its noise" if self.allows_noise else "")


RULES = (
    StopRule(0.0, allows_noise=False), StopRule(0.012, allows_noise=True), StopRule(0.012, allows_noise=False),
    StopRule(0.05, allows_noise=False), StopRule(0.1, allows_noise=False), StopRule(0.2, allows_noise=False),
)  # fmt: skip
USED = StopRule(MAX_ERROR, allows_noise=False)
"""Rule of the search."""


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """Seconds of the parts of a trial: `plan` once, `pair` for each pair of steps, `bytes` once if the plan becomes the leader."""

    plan: float
    pair: float
    bytes: float


def read_trial_times(path: Path = TRIAL_COST) -> TrialTimes:
    """Read the parts from the result of `experiments.benchmarks.trial_cost`."""
    phases = {phase["phase"]: phase for phase in json.loads(path.read_text(encoding="utf-8"))["phases"]}
    whole = {work["work"]: work for work in phases["whole trial"]["work"]}
    pairs = [whole["TimeBlock, beside"], whole["TimeBlock, seconds"]]
    check = whole["PlanCheckRequest, bytes"]
    timed = sum(work["seconds"] for work in pairs)
    return TrialTimes(
        plan=phases["whole trial"]["seconds"] - timed - check["seconds"],
        pair=timed / pairs[0]["count"],
        bytes=check["seconds"] / check["count"],
    )


def simulate_search(rule: StopRule, noise: float, times: TrialTimes, seed: int) -> tuple[int, float]:
    """Return the number of plans that a search times, and the share by which its best plan is slower than the fastest possible."""
    dice = random.Random(seed)
    scale = noise / math.sqrt(HEAVY_TAILS / (HEAVY_TAILS - 2))
    seconds, count = 0.0, 0
    leader: tuple[float, float, float] | None = None  # ratio as measured, its noise, and the true excess
    while seconds < SEARCH_SECONDS:
        excess = dice.uniform(0, NEAR_MOST) if dice.random() < NEAR else dice.uniform(NEAR_MOST, FAR_MOST)
        ratios = [math.exp(excess + scale * _student(dice)) for _ in range(SAMPLES)]
        used = SAMPLES
        if leader is not None and rule.error:
            beat = leader[0] * (1 + (leader[1] if rule.allows_noise else 0.0))
            used = next(
                (n for n in range(1, SAMPLES) if cannot_beat(ratios[:n], (1.0,) * n, beat, rule.error)), SAMPLES
            )
        count += 1
        seconds += times.plan + used * times.pair
        if used == SAMPLES:
            ratio = statistics.median(ratios)
            if leader is None or ratio < leader[0]:
                seconds += times.bytes
                leader = ratio, _noise(ratios), excess
    assert leader is not None
    return count, leader[2]


def _student(dice: random.Random) -> float:
    return dice.gauss(0, 1) / math.sqrt(dice.gammavariate(HEAVY_TAILS / 2, 2) / HEAVY_TAILS)


def _noise(ratios: Sequence[float]) -> float:
    measured = Measurement(Outcome.OK, step_seconds=tuple(ratios), baseline_seconds=(1.0,) * len(ratios))
    return ratio_noise(measured)


def compare_rules(times: TrialTimes, searches: int) -> Iterable[dict[str, Any]]:
    """Yield a row for each noise and rule: means with the standard error of each."""
    for noise in NOISES:
        for rule in RULES:
            found = [simulate_search(rule, noise, times, seed) for seed in range(searches)]
            plans, slower = zip(*found, strict=True)
            yield {
                "noise": noise,
                **asdict(rule),
                "plans": statistics.fmean(plans),
                "plans_error": statistics.stdev(plans) / math.sqrt(searches),
                "slower": statistics.fmean(slower),
                "slower_error": statistics.stdev(slower) / math.sqrt(searches),
            }


def summarize(document: Mapping[str, Any]) -> str:
    """Format a table of the rules."""
    lines = [
        "| noise of a pair | rule | plans timed | slower than the fastest possible plan |", "|--:|---|--:|--:|",
    ]  # fmt: skip
    for row in document["rows"]:
        rule = StopRule(row["error"], row["allows_noise"])
        mark = " (used)" if rule == USED else ""
        lines.append(
            f"| {100 * row['noise']:g} % | {rule}{mark} | {row['plans']:.1f} ± {2 * row['plans_error']:.1f} | "
            f"{100 * row['slower']:.2f} ± {200 * row['slower_error']:.2f} % |"
        )
    lines += [
        "",
        f"Means of {document['searches']} simulated searches, with two standard errors.",
        "",
        format_origin(dict(document)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=400)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    times = read_trial_times()
    document = collect_facts() | {
        "searches": options.searches,
        "trial_seconds": asdict(times),
        "rows": list(compare_rules(times, options.searches)),
    }
    write_result(options.out / "early_stop.json", document, {})
    write_text(options.out / "summary.md", summarize(document))
    print(summarize(document))


if __name__ == "__main__":
    main()
