"""Compare the points of a verified front with the recorded peers of `experiments/benchmarks/frontier`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from autotune.measure.interleaving import EAGER
from experiments.benchmarks.frontier.records import GLIBC, VariantPoint, build_points, compare_variants

Measure = Literal["peak", "charged"]
MEASURES: tuple[Measure, ...] = ("peak", "charged")
POINTS_WANTED = 8
"""Least number of verified points of a front."""


class PeerVerdict(StrEnum):
    """Result of comparing one point of the front with all peers, at one measure of bytes."""

    CLEAR = "clear"
    """Every peer of as few bytes is slower, and the intervals do not overlap."""
    UNCERTAIN = "within the noise"
    """The interval of a peer of as few bytes overlaps the point's."""
    DOMINATED = "dominated"
    """A peer of as few bytes is faster, and the intervals do not overlap."""


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """One point of the front, and the peer that comes nearest to dominating it."""

    plan: int
    measure: Measure
    verdict: PeerVerdict
    peer: str = ""
    peer_bytes: int | None = None
    peer_ratio: float | None = None


def read_peers(
    frontier: Path, model: str, arguments: Mapping[str, Any], *, compiled: bool = False
) -> list[VariantPoint]:
    """Return the peers of a model that compute the same as eager; those on compiled kernels only if asked for.

    Their times are over eager's with glibc's malloc for both, as `tune` measures a front. A peer that was not timed so has
    none: over an eager with a faster malloc its ratio would be larger. Raises SystemExit where the record is of other arguments.
    """
    kinds = ("peer", "compiler") if compiled else ("peer",)
    path = frontier / f"{model}.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["arguments"] != dict(arguments):
        raise SystemExit(f"{path}: measured with {record['arguments']}, not {dict(arguments)}: name another --frontier")
    return [
        replace(peer, ratio=compare_variants(record, f"{peer.variant}{GLIBC}", f"{EAGER}{GLIBC}"))
        for peer in build_points(record)
        if peer.kind in kinds and peer.right
    ]


def compare_with_peers(
    front: Sequence[Mapping[str, Any]], peers: Sequence[VariantPoint], measure: Measure
) -> list[PeerComparison]:
    """Return each point of the front with its verdict; `front` holds rows of `table.json`.

    Times are ratios to eager, each measured in its own session. A peer without times dominates nothing.
    """
    return [_compare(row, peers, measure) for row in front if row["status"] == "front" and row["time_ratio"]]


def _compare(row: Mapping[str, Any], peers: Sequence[VariantPoint], measure: Measure) -> PeerComparison:
    nbytes, ratio = row[f"step_{measure}_bytes"], row["time_ratio"]
    fast = [
        (peer, peer.ratio)
        for peer in peers
        if peer.ratio
        and (size := _bytes(peer, measure)) is not None
        and size <= nbytes
        and peer.ratio.low <= ratio["high"]
    ]
    if not fast:
        return PeerComparison(row["plan"], measure, PeerVerdict.CLEAR)
    nearest, interval = min(fast, key=lambda pair: pair[1].high)
    verdict = PeerVerdict.DOMINATED if interval.high < ratio["low"] else PeerVerdict.UNCERTAIN
    return PeerComparison(row["plan"], measure, verdict, nearest.variant, _bytes(nearest, measure), interval.middle)


def _bytes(point: VariantPoint, measure: Measure) -> int | None:
    return point.peak_bytes if measure == "peak" else point.charged_bytes
