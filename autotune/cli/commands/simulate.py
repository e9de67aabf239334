"""`autotune simulate`: searches tried on a recorded study, without a device."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.commands.session import answering, print_json, say
from autotune.errors import ConfigError, nearest

if TYPE_CHECKING:
    from autotune.study.offline.landscape import Landscape
    from autotune.study.offline.replay import Replayed

SAMPLERS = ("auto", "gp", "random", "tpe")
"""As a config's `sampler`."""
USUAL = ("auto", "random")
"""What is tried where none is named: what `tune` does, beside chance."""
AFTER = (5, 10, 15, 25, 40, 60)
"""Measured trials after which a search is looked at, and after the last one."""
HEAD = ("sampler", "trials", "above the best known", "worst seed", "chosen", "lost", "most lost")


def run(record: Path, samplers: Sequence[str], *, trials: int, seeds: int, json: bool) -> None:
    """Print for each sampler how near it came and what it lost; ConfigError where the record cannot be searched."""
    for name in samplers:
        if name not in SAMPLERS:
            raise ConfigError(f"--sampler {name!r}: no such sampler{nearest(name, SAMPLERS)}")
    from autotune.study.offline import landscape, replay

    if not record.exists():
        raise ConfigError(
            f"{record}: nothing is there; give a directory that autotune tune made, or a landscape's file"
        )
    with answering() as out:
        known = landscape.read(record)
        say(f"{known.workload} within {known.budget} on {known.device.silicon}; {known.source}")
        plans = {point.plan for point in known.points if known.worth(point) is not None}
        say(
            f"{len(known.points)} settings on record, {len(plans)} plans within it, the best at {known.known_best:.3f}x"
        )
        found = {
            name: [replay.replay(known, name, seed, trials) for seed in range(seeds)] for name in samplers or USUAL
        }
        if json:
            print_json(document(known, found), out)
            return
        rows = [HEAD, *(row for name, ran in found.items() for row in _rows(name, ran, trials))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
        for row in rows:
            first, *others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            out.write("  ".join((row[0].ljust(widths[0]), first, *others)).rstrip() + "\n")
    for name, ran in found.items():
        asked = sum(one.asked for one in ran)
        share = sum(one.neighbours * one.asked for one in ran) / max(asked, 1)
        early = statistics.fmean(one.stopped_early for one in ran)
        say(
            f"{name}: {100 * share:.0f} % of {asked} settings that it asked for are not on record: their nearest neighbours "
            f"answered; {early:.1f} trials of a search were stopped early"
        )


def document(known: "Landscape", found: dict[str, "list[Replayed]"]) -> dict[str, Any]:
    """What `--json` prints; null where no plan was found to fit."""
    from autotune.records.json_codec import to_json

    def finite(values: Sequence[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    return {
        "workload": known.workload,
        "budget": known.budget,
        "source": known.source,
        "known_best": known.known_best,
        "replays": [
            to_json(one) | {"found": finite(one.found), "chosen": finite(one.chosen)}
            for ran in found.values()
            for one in ran
        ],
    }


def _rows(name: str, ran: "Sequence[Replayed]", trials: int) -> list[tuple[str, ...]]:
    """One for each count of measured trials; a search that ended before stands as it ended."""
    rows: list[tuple[str, ...]] = []
    for after in (*(count for count in AFTER if count < trials), trials):
        near = [one.found[min(after, len(one.found)) - 1] for one in ran]
        chosen = [one.chosen[min(after, len(one.chosen)) - 1] for one in ran]
        lost = [one.lost[min(after, len(one.lost)) - 1] for one in ran]
        rows.append((
            name, str(after), _percent(statistics.median(near)), _percent(max(near)), _percent(statistics.median(chosen)),
            f"{statistics.fmean(lost):.1f}", str(max(lost)),
        ))  # fmt: skip
    return rows


def _percent(gap: float) -> str:
    return f"{100 * gap:+.1f} %" if math.isfinite(gap) else "none fits"
