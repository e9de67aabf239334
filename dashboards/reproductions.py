"""Published numbers beside ours, from what experiments of claims wrote."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.report.claims import HEAD, Claim, Verdict, experiments, read, rows
from dashboards.found import Broken, attempt

__all__ = ["HEAD", "Beside", "beside", "claims", "counted", "rows"]


@dataclass(frozen=True, slots=True)
class Beside:
    """One claim whose two figures can be set beside each other."""

    experiment: str
    claim: str
    ours_over_published: float
    verdict: str


def claims(root: Path) -> tuple[dict[str, tuple[Claim, ...]], list[Broken]]:
    """(claims by experiment, results that cannot be read)."""
    found = {name: attempt(folder, read) for name, folder in experiments(root).items()}
    good = {name: one for name, one in found.items() if not isinstance(one, Broken)}
    return good, [one for one in found.values() if isinstance(one, Broken)]


def counted(results: Mapping[str, Sequence[Claim]]) -> dict[str, int]:
    """Claims by verdict, all verdicts."""
    seen = Counter(claim.verdict for some in results.values() for claim in some)
    return {verdict.value: seen[verdict] for verdict in Verdict}


def beside(results: Mapping[str, Sequence[Claim]]) -> list[Beside]:
    """Of claims whose figures are both above 0."""
    return [one for name, some in results.items() for one in _beside(name, some)]


def _beside(name: str, some: Iterable[Claim]) -> Iterable[Beside]:
    for claim in some:
        published, ours = claim.published, claim.ours
        if published is not None and ours is not None and published.value > 0 and ours.value > 0:
            yield Beside(name, claim.text, ours.value / published.value, claim.verdict.value)
