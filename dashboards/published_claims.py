"""Compare published numbers with ours, from the result files of the experiments."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.report.claims import HEAD, Claim, ClaimVerdict, claim_rows, find_experiments, read
from dashboards.discovery import Unreadable, try_read

__all__ = ["HEAD", "ClaimRatio", "claim_ratios", "claim_rows", "count_by_verdict", "link_source", "load_claims"]

SOURCES = {
    "Chen et al. 2016": "https://arxiv.org/abs/1604.06174",
    "Zheng et al. 2020": "https://arxiv.org/abs/1805.08899",
    "Caffe2's memonger": "https://github.com/pytorch/pytorch",
    "torch._functorch.config": "https://github.com/pytorch/pytorch/blob/main/torch/_functorch/config.py",
    "nntrainer #": "https://github.com/nnstreamer/nntrainer/issues/",
}
"""Address of each source that names no repository; one that ends with a slash is completed by the number behind the name."""


def link_source(source: str) -> str | None:
    """Return the address of a claim's source; None for one without an address.

    >>> link_source("apache/mxnet#18228; Zheng et al. 2020, abstract")
    'https://github.com/apache/mxnet/issues/18228'
    >>> link_source("nntrainer #789"), link_source("a paper")
    ('https://github.com/nnstreamer/nntrainer/issues/789', None)
    """
    for name, address in SOURCES.items():
        if source.startswith(name):
            number = re.match(r"\d+", source.removeprefix(name))
            return address + (number[0] if number and address.endswith("/") else "")
    repository = re.match(r"([\w.-]+/[\w.-]+)(?:#(\d+))?", source)
    if repository is None:
        return None
    return f"https://github.com/{repository[1]}" + (f"/issues/{repository[2]}" if repository[2] else "")


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
