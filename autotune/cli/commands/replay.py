"""Test samplers on a recorded run: `autotune replay`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import ConfigError, nearest

if TYPE_CHECKING:
    from autotune.study.offline.landscape import Landscape
    from autotune.study.offline.replay import ReplayResult

SAMPLERS = ("auto", "cmaes", "gp", "planners", "random", "tpe")
"""Values of a config's `sampler`, and `planners` for the planners' own plans alone."""
DEFAULT_SAMPLERS = ("auto", "random")
"""Samplers to replay by default: the one that `autotune tune` uses, and the baseline."""
REPORTED_TRIALS = (5, 10, 15, 25, 40, 60)
"""Numbers of measured trials after which a search is reported, besides its last one."""
NEAR = 0.02
"""Gap to the best known within which a search counts as successful, as a share of its time."""
HEADER = ("sampler", "trials", "above the best known", "interval", "worst seed", "chosen", "lost", "most lost")


def run(
    record: Path, samplers: Sequence[str], *, trials: int, seeds: int, starts: Mapping[str, bool], json: bool
) -> None:
    """Replay samplers on a recorded run, and print how close each comes to the best plan and how many trials fail.

    `starts` has the arguments `priors` and `planners` of `replay`.
    """
    for name in samplers:
        if name not in SAMPLERS:
            raise ConfigError(f"--sampler {name!r}: no such sampler{nearest(name, SAMPLERS)}")
    from autotune.study.offline.landscape import read_landscape
    from autotune.study.offline.replay import replay
    from autotune.study.optuna_space import check_sampler

    for name in samplers:
        check_sampler(name, objective="time")
    if not record.exists():
        raise ConfigError(f"{record}: no such file; give a directory that autotune tune made, or a landscape file")
    with answer_stream() as out:
        landscape = read_landscape(record)
        _print_landscape(landscape)
        results = {
            name: [replay(landscape, name, seed, trials, **starts) for seed in range(seeds)]
            for name in samplers or DEFAULT_SAMPLERS
        }
        if json:
            print_json(_document(landscape, results), out)
            return
        rows = [HEADER, *(row for name, replays in results.items() for row in _rows(name, replays, trials))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            out.write("  ".join((row[0].ljust(widths[0]), *cells)).rstrip() + "\n")
    for name, replays in results.items():
        _print_coverage(name, replays)


def _print_landscape(landscape: "Landscape") -> None:
    fitting = {point.plan for point in landscape.points if landscape.ratio_of(point) is not None}
    print_note(
        f"{landscape.workload} within {landscape.budget} on {landscape.device.silicon}; {landscape.source}\n"
        f"{len(landscape.points)} recorded settings, {len(fitting)} plans within the budget, "
        f"the best at {landscape.best_ratio:.3f}x"
    )


def _print_coverage(name: str, replays: "Sequence[ReplayResult]") -> None:
    from autotune.study.offline.replay import trials_until_near

    requests = sum(replay.requests for replay in replays)
    share = sum(replay.neighbour_share * replay.requests for replay in replays) / max(requests, 1)
    early = statistics.fmean(replay.stopped_early for replay in replays)
    print_note(
        f"{name}: {100 * share:.0f} % of {requests} requested settings are not recorded and got the result of their nearest "
        f"neighbour; {early:.1f} trials of a search were stopped early"
    )
    counts = [trials_until_near(replay, NEAR) for replay in replays]
    near = [count for count in counts if math.isfinite(count)]
    middle = statistics.median(counts)
    print_note(
        f"{name}: {len(near)} of {len(counts)} searches come within {100 * NEAR:.0f} % of the best"
        + (f"; the median search after {middle:g} trials" if math.isfinite(middle) else "")
    )


def _document(landscape: "Landscape", results: "dict[str, list[ReplayResult]]") -> dict[str, Any]:
    """Return the document that `--json` prints; a gap is null while no plan fits."""

    def finite(values: Sequence[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    return {
        "workload": landscape.workload,
        "budget": landscape.budget,
        "source": landscape.source,
        "known_best": landscape.best_ratio,
        "replays": [
            {
                "sampler": replay.sampler,
                "seed": replay.seed,
                "priors": replay.priors,
                "planners": replay.planners,
                "found": finite(replay.fastest_gaps),
                "chosen": finite(replay.leader_gaps),
                "lost": list(replay.lost),
                "stopped_early": replay.stopped_early,
                "asked": replay.requests,
                "neighbours": replay.neighbour_share,
            }
            for replays in results.values()
            for replay in replays
        ],
    }


def _rows(name: str, replays: "Sequence[ReplayResult]", trials: int) -> list[tuple[str, ...]]:
    """Return a row for each reported number of trials; a search that ended earlier keeps its last values."""
    from autotune.study.offline.replay import summarize_regret

    rows: list[tuple[str, ...]] = []
    for count in (*(reported for reported in REPORTED_TRIALS if reported < trials), trials):
        regret = summarize_regret(replays, count)
        gaps = [_last(replay.fastest_gaps, count, math.inf) for replay in replays]
        chosen = [_last(replay.leader_gaps, count, math.inf) for replay in replays]
        lost = [_last(replay.lost, count, 0) for replay in replays]
        rows.append((
            name, str(count), _percent(regret.middle), f"{_percent(regret.low)} to {_percent(regret.high)}",
            _percent(max(gaps)), _percent(statistics.median(chosen)), f"{statistics.fmean(lost):.1f}", str(max(lost)),
        ))  # fmt: skip
    return rows


def _last(values: Sequence[float], count: int, otherwise: float) -> float:
    """Return the value after `count` trials, or after the last one; `otherwise` without a trial."""
    return values[min(count, len(values)) - 1] if values else otherwise


def _percent(gap: float) -> str:
    return f"{100 * gap:+.1f} %" if math.isfinite(gap) else "none fits"
