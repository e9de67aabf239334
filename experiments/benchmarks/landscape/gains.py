"""Compare the fastest plan that a search found with the planners' fastest plan, in fresh measurements in turns.

`python -m experiments.benchmarks.landscape.gains`

Needs the studies of `landscape.record_all` in `runs/landscapes`. Workloads with a result of the same recording are skipped; `--fresh` compares all again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.measure.harness import Harness
from autotune.records.config import load_config
from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir, write_text
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study.offline.landscape import Landscape, read_landscape
from autotune.study.runner import CompleteRunner, QuietRunner, Runner
from autotune.study.verdicts.ranking import plan_hash
from autotune.study.verdicts.statistics import Interval, median_interval
from experiments.benchmarks.landscape.__main__ import make_spec
from experiments.benchmarks.landscape.record_all import HERE, WORK
from experiments.benchmarks.landscape.replays import digest_file
from experiments.common.facts import collect_facts, format_interval, format_origin
from experiments.common.result_file import write_result

SCREENING = 3
"""Measurements of each planners' plan, to find their fastest."""
ROUNDS = 8
"""Measurements of the two plans that are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="landscapes of results/; all with a study by default")
    parser.add_argument("--fresh", action="store_true", help="compare again where a result exists")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gains")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the studies")
    options = parser.parse_args()
    known = sorted(path.parent.name for path in options.work.glob("*/run"))
    if missing := set(options.names) - set(known):
        parser.error(
            f"no study of {', '.join(sorted(missing))} in {options.work}; run landscape.record_all --fresh NAME first"
        )
    if not known:
        sys.exit(f"no study in {options.work}; record one first: python -m experiments.benchmarks.landscape.record_all")
    for name in options.names or known:
        target, source = options.out / f"{name}.json", HERE / "results" / f"{name}.json"
        recording = digest_file(source)
        stored = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        if not options.fresh and stored.get("recording", recording) == recording and stored:
            continue
        facts, recorded = collect_facts(), read_landscape(source)
        files = RunDir(options.work / name / "run")
        config = load_config(str(files.config))
        with Harness(make_spec(config, options.work / name / "logs")) as harness:
            harness.prepare()
            runner = QuietRunner(CompleteRunner(harness), lambda _: True, lambda reason: print(reason, flush=True))
            result = compare(recorded, load_trials(files.trials), runner)
        write_result(
            target, {**facts, "landscape": name, "recording": recording, **result}, {recorded.workload: recorded.graph}
        )
        print(f"{name}: {format_gain(result)}", flush=True)
    write_text(options.out / "summary.md", summarize(options.out))


def compare(recorded: Landscape, trials: Sequence[Trial], runner: Runner) -> dict[str, Any]:
    """Measure the record's fastest plan of the search, and the planners' fastest of fresh measurements, in turns."""
    plans = {plan_hash(trial.plan): trial.plan for trial in trials if trial.plan is not None}
    ratios = {point.plan: ratio for point in recorded.points if (ratio := recorded.ratio_of(point)) is not None}
    settings = {point.plan: point.settings for point in recorded.points}
    planned = {point.plan for point in recorded.points if point.kind in (TrialKind.PLANNER, TrialKind.SMALLEST)}

    def measure(plan: str) -> float | None:
        result = runner.measure(plans[plan], budget_bytes=recorded.rules.accepted_bytes)
        return result.time_ratio if result.outcome is Outcome.OK else None

    screened: dict[str, list[float]] = {plan: [] for plan in ratios if plan in planned}
    for _ in range(SCREENING):
        for plan in screened:
            screened[plan] += filter(None, [measure(plan)])
    planner = min((plan for plan in screened if screened[plan]), key=lambda plan: statistics.median(screened[plan]))
    found = min((plan for plan in ratios if plan not in planned), key=ratios.__getitem__)
    rounds = []
    for number in range(ROUNDS):
        order = (planner, found) if number % 2 == 0 else (found, planner)
        rounds.append({plan: measure(plan) for plan in order})
    return {
        "planner": {"plan": planner, "settings": settings[planner], "screened": screened},
        "search": {"plan": found, "settings": settings[found], "recorded": ratios[found]},
        "rounds": [{"planner": turn[planner], "search": turn[found]} for turn in rounds],
    }


def format_gain(result: dict[str, Any]) -> str:
    """Return the time of the search's plan over that of the planners' plan, with its interval."""
    return format_interval(gain_interval(result))


def gain_interval(result: dict[str, Any]) -> Interval:
    """Return the median over rounds of the search's time over the planners', each over eager beside it."""
    return median_interval([turn["search"] / turn["planner"] for turn in complete_rounds(result)])


def complete_rounds(result: dict[str, Any]) -> list[dict[str, float]]:
    """Return the rounds in which both plans ran to their end."""
    return [turn for turn in result["rounds"] if turn["planner"] and turn["search"]]


def summarize(folder: Path) -> str:
    """Return the table of all results in Markdown."""
    return "\n".join(
        [
            "| workload | planners' fastest plan | plan that the search found | the latter over the former | faster |",
            "|---|--:|--:|--:|---|",
            *_rows(folder),
            "",
        ]
    )


def _rows(folder: Path) -> Iterator[str]:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    for result in results:
        sides = [
            format_interval(median_interval([turn[side] for turn in complete_rounds(result)]))
            for side in ("planner", "search")
        ]
        gain = gain_interval(result)
        verdict = "yes" if gain.high < 1 else "no" if gain.low > 1 else "not decided"
        yield f"| {result['landscape']} | {' | '.join(sides)} | {format_interval(gain)} | {verdict} |"
    yield ""
    yield "Times over eager's. " + " ".join(f"{result['landscape']}: {format_origin(result)}" for result in results)


if __name__ == "__main__":
    main()
