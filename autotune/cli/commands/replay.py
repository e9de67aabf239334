"""Test samplers on a recorded run: `autotune replay`."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import ConfigError, nearest

if TYPE_CHECKING:
    from autotune.study.offline.landscape import Landscape
    from autotune.study.offline.replay import ReplayResult

SAMPLERS = ("auto", "gp", "random", "tpe")
"""Values of a config's `sampler`."""
DEFAULT_SAMPLERS = ("auto", "random")
"""Samplers to replay by default: the one that `autotune tune` uses, and the baseline."""
REPORTED_TRIALS = (5, 10, 15, 25, 40, 60)
"""Numbers of measured trials after which a search is reported, besides its last one."""
HEADER = ("sampler", "trials", "above the best known", "worst seed", "chosen", "lost", "most lost")


def run(record: Path, samplers: Sequence[str], *, trials: int, seeds: int, json: bool) -> None:
    """Replay samplers on a recorded run, and print how close each comes to the best plan and how many trials fail."""
    for name in samplers:
        if name not in SAMPLERS:
            raise ConfigError(f"--sampler {name!r}: no such sampler{nearest(name, SAMPLERS)}")
    from autotune.study.offline.landscape import read_landscape
    from autotune.study.offline.replay import replay

    if not record.exists():
        raise ConfigError(f"{record}: no such file; give a directory that autotune tune made, or a landscape file")
    with answer_stream() as out:
        landscape = read_landscape(record)
        _print_landscape(landscape)
        results = {
            name: [replay(landscape, name, seed, trials) for seed in range(seeds)]
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
    requests = sum(replay.requests for replay in replays)
    share = sum(replay.neighbour_share * replay.requests for replay in replays) / max(requests, 1)
    early = statistics.fmean(replay.stopped_early for replay in replays)
    print_note(
        f"{name}: {100 * share:.0f} % of {requests} requested settings are not recorded and got the result of their nearest "
        f"neighbour; {early:.1f} trials of a search were stopped early"
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
    rows: list[tuple[str, ...]] = []
    for count in (*(reported for reported in REPORTED_TRIALS if reported < trials), trials):
        gaps = [replay.fastest_gaps[min(count, len(replay.fastest_gaps)) - 1] for replay in replays]
        chosen = [replay.leader_gaps[min(count, len(replay.leader_gaps)) - 1] for replay in replays]
        lost = [replay.lost[min(count, len(replay.lost)) - 1] for replay in replays]
        rows.append((
            name, str(count), _percent(statistics.median(gaps)), _percent(max(gaps)), _percent(statistics.median(chosen)),
            f"{statistics.fmean(lost):.1f}", str(max(lost)),
        ))  # fmt: skip
    return rows


def _percent(gap: float) -> str:
    return f"{100 * gap:+.1f} %" if math.isfinite(gap) else "none fits"
