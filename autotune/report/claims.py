"""A published claim beside our number: what an experiment writes, and the verdict that figures alone decide."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from autotune.errors import ConfigError
from autotune.records.json_codec import from_json, to_json

RESULT = Path("results", "result.json")
"""Of an experiment, in its folder: with it, the experiment is one of published claims."""
HEAD = ("experiment", "claim", "published", "ours", "how", "verdict")
BEGIN, END = "<!-- claims: written by autotune reproduce --table -->", "<!-- end of claims -->"


class Verdict(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    RATIOS = "ratios reproduced"
    """On other hardware, or counted otherwise: what the figures say of each other holds."""
    NOT = "not reproduced"
    INCOMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, with the one before it where the claim is of a change: 15.06 -> 8.01."""

    value: float
    before: float | None = None

    @property
    def ratio(self) -> float | None:
        """Of the change."""
        return None if not self.before else self.value / self.before


@dataclass(frozen=True, slots=True)
class Claim:
    """One published number and ours, both in `unit`; `text` is short enough for a row of a table."""

    text: str
    source: str
    conditions: str
    """How ours was had: size, what is counted, what is modelled."""
    unit: str
    published: Figure | None
    ours: Figure | None
    tolerance: float = 0.0
    """Part of the published number by which ours may differ."""
    sense: Literal["equal", "at most", "at least"] = "equal"
    """`at most`: ours is free to be lower; `at least`: higher."""
    transferred: bool = False
    """Ours is from other hardware, or from a model of costs: agreeing, it is a ratio that was reproduced."""
    why_not: str = ""
    """Why the two cannot be compared, where they cannot."""
    kind: Literal["simulated", "modelled", "measured"] = "simulated"
    """What ours is: bytes of shapes, seconds by a model of costs, or something seen on the device that `conditions` names."""
    headline: bool = False
    """Whether it has a row in the README's table, which counts all others."""

    @property
    def verdict(self) -> Verdict:
        """Decided by figures, sense and tolerance. Of a change both numbers must agree, or else their ratio."""
        if self.why_not or self.published is None or self.ours is None:
            return Verdict.INCOMPARABLE
        begun = self.published.before, self.ours.before
        same_start = begun[0] is None or begun[1] is None or _close(begun[1], begun[0], self.tolerance)
        if same_start and self._holds(self.ours.value, self.published.value):
            return Verdict.RATIOS if self.transferred else Verdict.REPRODUCED
        ratios = self.published.ratio, self.ours.ratio
        if ratios[0] is not None and ratios[1] is not None and self._holds(ratios[1], ratios[0]):
            return Verdict.RATIOS
        return Verdict.NOT

    def _holds(self, ours: float, published: float) -> bool:
        free = (self.sense == "at most" and ours <= published) or (self.sense == "at least" and ours >= published)
        return free or _close(ours, published, self.tolerance)


def _close(ours: float, published: float, tolerance: float) -> bool:
    return abs(ours - published) <= tolerance * abs(published)


def write(folder: Path, claims: Sequence[Claim]) -> None:
    """The result of the experiment in that folder, figures to four decimals."""
    rounded = [dataclasses.replace(c, published=_rounded(c.published), ours=_rounded(c.ours)) for c in claims]
    path = folder / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"claims": [{**to_json(claim), "verdict": claim.verdict.value} for claim in rounded]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(folder: Path) -> tuple[Claim, ...]:
    """The claims of the experiment in that folder; ConfigError where a verdict is not what its figures say."""
    path = folder / RESULT
    try:
        document: Any = json.loads(path.read_text())
        given = [(claim.pop("verdict"), claim) for claim in document["claims"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no list of claims ({reason}); run {folder / 'run.py'} again") from None
    claims = []
    for number, (verdict, fields) in enumerate(given, 1):
        claim = from_json(Claim, fields, where=f"{path}: claim {number}")
        if verdict != claim.verdict:
            raise ConfigError(
                f"{path}: claim {number} says {verdict!r}, its figures say {claim.verdict.value!r}; run {folder / 'run.py'}"
            )
        claims.append(claim)
    return tuple(claims)


def experiments(root: Path) -> dict[str, Path]:
    """Folders of experiments of claims, by name."""
    return {path.parent.parent.name: path.parent.parent for path in sorted(root.glob(f"*/{RESULT}"))}


def rows(results: Mapping[str, Sequence[Claim]]) -> Iterator[tuple[str, ...]]:
    """Words under `HEAD`."""
    for name, claims in results.items():
        for claim in claims:
            yield (
                name,
                claim.text,
                _words(claim.published, claim.unit),
                _words(claim.ours, claim.unit),
                claim.kind if claim.ours else "-",
                claim.verdict.value,
            )


def markdown(results: Mapping[str, Sequence[Claim]]) -> str:
    """The table of a page, between the lines that mark it: headlines, and how many claims of which verdict there are."""
    headlines = {name: [claim for claim in claims if claim.headline] for name, claims in results.items()}
    lines = [HEAD, ("---",) * len(HEAD), *rows(headlines)]
    table = (f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return "\n".join((BEGIN, *table, "", f"Of all claims (`autotune reproduce --list`), {counted(results)}.", END))


def counted(results: Mapping[str, Sequence[Claim]]) -> str:
    """How many claims there are, and of which verdict."""
    verdicts = Counter(claim.verdict for claims in results.values() for claim in claims)
    return f"{verdicts.total()}: " + ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict)


def into_page(page: str, results: Mapping[str, Sequence[Claim]]) -> str:
    """The page with its table made anew; ConfigError where nothing marks its place."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page has no place for the table: put the lines {BEGIN!r} and {END!r} into it")
    return before + markdown(results) + after


def _rounded(figure: Figure | None) -> Figure | None:
    if figure is None:
        return None
    return Figure(round(figure.value, 4), None if figure.before is None else round(figure.before, 4))


def _words(figure: Figure | None, unit: str) -> str:
    if figure is None:
        return "-"
    change = "" if figure.before is None else f"{figure.before:.4g} -> "
    return f"{change}{figure.value:.4g}{'' if unit in ('', 'x') else ' '}{unit}"
