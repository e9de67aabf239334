"""Compare published numbers with ours, from the result files of the experiments."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.report.claims import HEAD, Claim, ClaimVerdict, claim_rows, find_experiments, link_source, read
from dashboards.discovery import Unreadable, try_read

__all__ = ["HEAD", "ClaimRatio", "claim_ratios", "claim_rows", "count_by_verdict", "link_source", "load_claims"]


@dataclass(frozen=True, slots=True)
class ClaimRatio:
    """Ratio of our figure to a published one."""

    experiment: str
    claim: str
    ours_over_published: float
    verdict: str


def load_claims(root: Path) -> tuple[dict[str, tuple[Claim, ...]], list[Unreadable]]:
    """Return (claims by experiment, result files that cannot be read)."""
    results = {name: try_read(folder, read) for name, folder in find_experiments(root).items()}
    readable = {name: claims for name, claims in results.items() if not isinstance(claims, Unreadable)}
    return readable, [claims for claims in results.values() if isinstance(claims, Unreadable)]


def count_by_verdict(results: Mapping[str, Sequence[Claim]]) -> dict[str, int]:
    """Return the number of claims with each verdict, zeros included."""
    counts = Counter(claim.verdict for claims in results.values() for claim in claims)
    return {verdict.value: counts[verdict] for verdict in ClaimVerdict}


def claim_ratios(results: Mapping[str, Sequence[Claim]]) -> list[ClaimRatio]:
    """Return the ratio of every claim whose two figures are above 0."""
    return [ratio for name, claims in results.items() for ratio in _ratios(name, claims)]


def _ratios(experiment: str, claims: Iterable[Claim]) -> Iterable[ClaimRatio]:
    for claim in claims:
        published, ours = claim.published, claim.ours
        if published is not None and ours is not None and published.value > 0 and ours.value > 0:
            yield ClaimRatio(experiment, claim.text, ours.value / published.value, claim.verdict.value)
