"""Replay samplers on the recorded landscapes: regret against measured trials, with and without priors, as table and picture.

`python -m experiments.benchmarks.landscape.replays --seeds 20`

Runs no step. Searches that the results have already are not repeated: run it again to continue. `--fresh` repeats all.
"""

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autotune.study.offline.landscape import read_landscape
from autotune.study.offline.replay import PLANNERS_ALONE, replay
from autotune.study.verdicts.statistics import Interval, median_interval
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result
from experiments.common.resumption import note_session, resume_results

HERE = Path(__file__).parent
TRIALS = 25
NEAR = 0.02
COUNTS = (3, 5, 10, 15, 20, 25)


@dataclass(frozen=True)
class Variant:
    """One way to search."""

    name: str
    sampler: str
    priors: bool = False
    planners: bool = False


VARIANTS = (
    Variant("planners alone", PLANNERS_ALONE, planners=True),
    Variant("random", "random"),
    Variant("tpe", "tpe"),
    Variant("tpe with priors", "tpe", priors=True),
    Variant("cmaes", "cmaes"),
    Variant("planners, then random", "random", planners=True),
    Variant("planners, then tpe", "tpe", planners=True),
    Variant("planners, then tpe with priors", "tpe", priors=True, planners=True),
    Variant("gp", "gp"),
    Variant("gp with priors", "gp", priors=True),
)
"""All but those with planners begin with the smallest plan alone, so that the picture shows what the sampler adds."""
DRAWN = {"planners alone": "#8a9099", "random": "#E69F00", "planners, then tpe": "#0072B2"}
"""The three lines of the picture, with their colours; the last one is how `tune` searches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", nargs="*", type=Path, help="files of results/; all by default")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="names of the variants to replay; all by default")
    parser.add_argument("--fresh", action="store_true", help="drop the replays that the results have")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "replays")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    summaries = []
    for path in options.landscapes or sorted((HERE / "results").glob("*.json")):
        target = options.out / path.name
        empty = {"landscape": path.name, "recording": digest_file(path), "trials": TRIALS, "searches": {}}
        facts = collect_facts()
        results = resume_results(target, facts, empty, fresh=options.fresh, is_timed=False)
        for variant in VARIANTS:
            if options.only is None or variant.name in options.only:
                run_variant(path, variant, options.seeds, results, target=target, facts=facts)
        draw(results, options.out / f"{path.stem}.png")
        summaries.append(summarize(results))
    (options.out / "summary.md").write_text("\n".join(summaries), encoding="utf-8")
    print("\n".join(summaries))


def digest_file(path: Path) -> str:
    """Return the first 16 digits of a file's SHA-256 sum, which tells one recording of a landscape from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def run_variant(
    path: Path, variant: Variant, seeds: int, results: dict[str, Any], *, target: Path, facts: dict[str, Any]
) -> None:
    """Replay the seeds that the results lack, and write each at once."""
    if variant.sampler == "cmaes" and find_spec("cmaes") is None:
        print("cmaes: the package cmaes is not installed: left out", file=sys.stderr)
        return
    landscape = read_landscape(path)
    searches = results["searches"].setdefault(variant.name, [])
    for seed in range(len(searches), seeds):
        print(f"{path.stem}: {variant.name}, seed {seed}", file=sys.stderr, flush=True)
        result = replay(landscape, variant.sampler, seed, TRIALS, priors=variant.priors, planners=variant.planners)
        gaps = [round(gap, 5) if math.isfinite(gap) else None for gap in result.fastest_gaps]
        searches.append({"gaps": gaps, "lost": list(result.lost), "requests": result.requests})
        note_session(results, facts)
        write_result(target, results, {landscape.workload: landscape.graph})


def gap_after(search: dict[str, Any], count: int) -> float:
    """Return the gap after so many measured trials, or after the last one of a search that ended earlier."""
    gaps = search["gaps"][:count]
    return math.inf if not gaps or gaps[-1] is None else gaps[-1]


def trials_to_near(search: dict[str, Any]) -> float:
    """Return the measured trials until the gap is at most `NEAR`; infinite where it never is."""
    gaps = enumerate(search["gaps"], 1)
    return next((number for number, gap in gaps if gap is not None and gap <= NEAR), math.inf)


def summarize(results: dict[str, Any]) -> str:
    """Return the table of search landscape in Markdown."""
    lines = [
        f"### {Path(results['landscape']).stem}",
        "",
        f"Median gap to the best on record, with its 95 % interval over seeds; {format_origin(results)}",
        "",
        "| search | seeds | " + " | ".join(f"{count} trials" for count in COUNTS) + " | within 2 % | lost | requests |",
        "|---|---:|" + "---:|" * (len(COUNTS) + 3),
    ]
    for name, searches in results["searches"].items():
        if not searches:
            continue
        cells = [format_gap(median_interval([gap_after(search, count) for search in searches])) for count in COUNTS]
        lines.append(f"| {name} | {len(searches)} | {' | '.join(cells)} | {format_near(searches)} |")
    return "\n".join(lines) + "\n"


def format_gap(gap: Interval) -> str:
    return f"{percent(gap.middle)} ({percent(gap.low)} to {percent(gap.high)})"


def format_near(searches: Sequence[dict[str, Any]]) -> str:
    """Return the cells for searches within 2 %, lost trials and requests per search."""
    counts = [trials_to_near(search) for search in searches]
    near, median = sum(map(math.isfinite, counts)), statistics.median(counts)
    text = f"{near} of {len(counts)}" + (f", median after {median:g}" if math.isfinite(median) else "")
    lost = statistics.fmean(search["lost"][-1] if search["lost"] else 0 for search in searches)
    return f"{text} | {lost:.1f} | {statistics.fmean(search['requests'] for search in searches):.0f}"


def percent(gap: float) -> str:
    return f"{100 * gap:.1f} %" if math.isfinite(gap) else "none fits"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the median regret of three searches against measured trials, with intervals over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    counts = range(1, TRIALS + 1)
    for name, colour in DRAWN.items():
        searches = results["searches"].get(name)
        if not searches:
            continue
        regrets = [median_interval([gap_after(search, count) for search in searches]) for count in counts]
        axes.step(counts, [100 * regret.middle for regret in regrets], where="post", color=colour, label=name)
        low, high = (
            [100 * min(end, 10.0) for end in ends]
            for ends in zip(*((regret.low, regret.high) for regret in regrets), strict=True)
        )
        axes.fill_between(counts, low, high, step="post", color=colour, alpha=0.15, linewidth=0)
    axes.axhline(100 * NEAR, color="#c9cdd2", linewidth=0.8, linestyle="--")
    axes.set_xlabel("measured trials")
    axes.set_ylabel("slower than the best on record, %")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{Path(results['landscape']).stem}: median of {len(next(iter(results['searches'].values())))} seeds"
    )
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
