"""Compare published claims with this project's numbers: the records of experiments, and verdicts computed from figures."""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from autotune.errors import ConfigError
from autotune.records.json_codec import from_json, to_json
from autotune.records.run_dir import write_text

RESULT = Path("results", "result.json")
"""Result file in an experiment's folder; a folder with this file is an experiment on published claims."""
HEAD = ("experiment", "claim", "published", "ours", "how", "verdict")
"""Columns of the table of claims."""


SOURCES = {
    "Chen et al. 2016": "https://arxiv.org/abs/1604.06174",
    "Zheng et al. 2020": "https://arxiv.org/abs/1805.08899",
    "Caffe2's memonger": "https://github.com/pytorch/pytorch",
    "torch._functorch.config": "https://github.com/pytorch/pytorch/blob/main/torch/_functorch/config.py",
    "nntrainer #": "https://github.com/nnstreamer/nntrainer/issues/",
}
"""Address of each source that names no repository; one that ends with a slash is completed by the number behind the name."""


PAPERS = {
    "Chen et al. 2016": "https://arxiv.org/abs/1604.06174",
    "Zheng et al. 2020": "https://arxiv.org/abs/1805.08899",
    "Kirisame et al. 2021": "https://arxiv.org/abs/2006.09616",
    "Shah et al. 2021": "https://arxiv.org/abs/2010.14501",
    "Steiner et al. 2023": "https://arxiv.org/abs/2210.12924",
    "Lyken17/pytorch-memonger": "https://arxiv.org/abs/1604.06174",
    "apache/mxnet#18228": "https://arxiv.org/abs/1805.08899",
}
"""Address of the paper behind a source, by a part of the source's name; issues and commit messages may have none."""


def link_paper(source: str) -> str | None:
    """Return the address of the paper behind a claim's source; None without one.

    >>> link_paper("utsaslab/MONeT, README (Shah et al. 2021)")
    'https://arxiv.org/abs/2010.14501'
    """
    return next((address for name, address in PAPERS.items() if name in source), None)


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


class ClaimVerdict(StrEnum):
    """Result of comparing a published claim with our number."""

    REPRODUCED = "reproduced"
    RATIOS = "ratios reproduced"
    """The ratios of the figures agree; the figures themselves come from other hardware, or count something else."""
    BOUND = "bound kept"
    """A claim of "at most" or "at least" holds, by a number that does not agree with the published one."""
    UNDECIDED = "not decided"
    """The interval of our measurement holds numbers that agree, or keep the bound, and others that do not."""
    NOT_REPRODUCED = "not reproduced"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number; for a claim about a change, such as 15.06 -> 8.01, with the number before it."""

    value: float
    before: float | None = None
    low: float | None = None
    """Lower end of the 95 % interval of a measured value; None without one."""
    high: float | None = None
    """Upper end of that interval; None without one."""

    @property
    def ratio(self) -> float | None:
        """Ratio of the change; None without a number before it."""
        return None if not self.before else self.value / self.before


@dataclass(frozen=True, slots=True)
class Claim:
    """One published number and ours, both in `unit`; `text` is short enough for a row of a table."""

    text: str
    source: str
    conditions: str
    """Conditions of our number: size, counted quantity, model."""
    unit: str
    published: Figure | None
    ours: Figure | None
    tolerance: float = 0.0
    """Accepted difference, as a share of the published number."""
    sense: Literal["equal", "at most", "at least"] = "equal"
    """Direction in which ours may differ freely: lower for `at most`, higher for `at least`."""
    transferred: bool = False
    """True if ours comes from other hardware or from a cost model: agreement then reproduces a ratio."""
    why_not: str = ""
    """Reason that the two numbers cannot be compared; empty if they can."""
    kind: Literal["simulated", "modelled", "measured"] = "simulated"
    """Origin of our number: shapes, a cost model, or a measurement on the device that `conditions` names."""
    headline: bool = False
    """True for a claim among the headlines of docs/claims.md."""

    @property
    def verdict(self) -> ClaimVerdict:
        """Verdict computed from figures, sense and tolerance.

        For a change, both numbers or their ratio must agree. Of a number with an interval, the whole interval must.
        """
        if self.why_not or self.published is None or self.ours is None:
            return ClaimVerdict.NOT_COMPARABLE
        if self.ours.low is not None and self.ours.high is not None:
            return self._judge_interval(self.ours.low, self.ours.high, self.published.value)
        starts = self.published.before, self.ours.before
        same_start = starts[0] is None or starts[1] is None or _is_close(starts[1], starts[0], self.tolerance)
        values = (self.ours.value, self.published.value) if same_start else None
        ratios = (
            (self.ours.ratio, self.published.ratio)
            if self.ours.ratio is not None and self.published.ratio is not None
            else None
        )
        if values is not None and _is_close(*values, self.tolerance):
            return ClaimVerdict.RATIOS if self.transferred else ClaimVerdict.REPRODUCED
        if ratios is not None and _is_close(*ratios, self.tolerance):
            return ClaimVerdict.RATIOS
        if any(self._is_better(*pair) for pair in (values, ratios) if pair is not None):
            return ClaimVerdict.BOUND
        return ClaimVerdict.NOT_REPRODUCED

    def _judge_interval(self, low: float, high: float, published: float) -> ClaimVerdict:
        if _is_close(low, published, self.tolerance) and _is_close(high, published, self.tolerance):
            return ClaimVerdict.RATIOS if self.transferred else ClaimVerdict.REPRODUCED
        if self._is_better(low, published) and self._is_better(high, published):
            return ClaimVerdict.BOUND
        margin = self.tolerance * abs(published)
        # with a bound the other side agrees, however far it is
        least = -math.inf if self.sense == "at most" else published - margin
        most = math.inf if self.sense == "at least" else published + margin
        return ClaimVerdict.NOT_REPRODUCED if high < least or low > most else ClaimVerdict.UNDECIDED

    def _is_better(self, ours: float, published: float) -> bool:
        return (self.sense == "at most" and ours <= published) or (self.sense == "at least" and ours >= published)


def _is_close(ours: float, published: float, tolerance: float) -> bool:
    return abs(ours - published) <= tolerance * abs(published)


def write(folder: Path, claims: Sequence[Claim], origins: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the result file of an experiment, figures rounded to four decimals.

    `origins` has the facts of each part (`simulated`, `measured`) that ran now: machine, commit, graphs, date and command.
    Stored facts of other parts are kept.
    """
    rounded = [dataclasses.replace(c, published=_round(c.published), ours=_round(c.ours)) for c in claims]
    path = folder / RESULT
    merged = {**read_origins(folder), **{part: to_json(dict(facts)) for part, facts in (origins or {}).items()}}
    document: dict[str, Any] = {"origins": merged} if merged else {}
    document["claims"] = [{**to_json(claim), "verdict": claim.verdict.value} for claim in rounded]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document, indent=1) + "\n")


def read(folder: Path) -> tuple[Claim, ...]:
    """Return the claims of an experiment; ConfigError if a recorded verdict contradicts its figures."""
    path = folder / RESULT
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        entries = [(claim.pop("verdict"), claim) for claim in document["claims"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} is no list of claims ({reason}); run {folder.name} again: autotune reproduce {folder.name}"
        ) from None
    claims = []
    for number, (verdict, fields) in enumerate(entries, 1):
        claim = from_json(Claim, fields, where=f"{path}: claim {number}")
        if verdict != claim.verdict:
            raise ConfigError(
                f"{path}: claim {number} records the verdict {verdict!r}, but its figures give {claim.verdict.value!r}; "
                f"run autotune reproduce {folder.name}"
            )
        claims.append(claim)
    return tuple(claims)


def read_origins(folder: Path) -> dict[str, dict[str, Any]]:
    """Return machine, commit, graphs, date and command of each part of an experiment; empty where none are recorded."""
    path = folder / RESULT
    if not path.exists():
        return {}
    try:
        origins = json.loads(path.read_text(encoding="utf-8")).get("origins", {})
    except (ValueError, AttributeError):  # a broken file is replaced
        return {}
    return dict(origins)


def find_experiments(root: Path) -> dict[str, Path]:
    """Return the folders of experiments on published claims, by name."""
    return {path.parent.parent.name: path.parent.parent for path in sorted(root.glob(f"*/{RESULT}"))}


def claim_rows(results: Mapping[str, Sequence[Claim]]) -> Iterator[tuple[str, ...]]:
    """Yield a row of text under `HEAD` for each claim."""
    for name, claims in results.items():
        for claim in claims:
            yield (
                name,
                claim.text,
                _format_figure(claim.published, claim.unit),
                _format_figure(claim.ours, claim.unit),
                claim.kind if claim.ours else "-",
                claim.verdict.value,
            )


def source_lines(results: Mapping[str, Sequence[Claim]]) -> list[str]:
    """Return a line for each experiment with the sources of its claims and their addresses."""
    lines = []
    for name, claims in results.items():
        sources = dict.fromkeys(claim.source for claim in claims)
        addresses = dict.fromkeys(filter(None, map(link_source, sources)))
        lines.append(f"{name}: {'; '.join([*sources, *addresses])}")
    return lines


def count_verdicts(results: Mapping[str, Sequence[Claim]]) -> str:
    """Return the number of claims and the number of each verdict, as `3 claims: 2 reproduced, 1 ratios reproduced, ...`."""
    verdicts = Counter(claim.verdict for claims in results.values() for claim in claims)
    count = verdicts.total()
    listed = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in ClaimVerdict)
    return f"{count} claim{'' if count == 1 else 's'}: {listed}"


def _round(figure: Figure | None) -> Figure | None:
    if figure is None:
        return None
    optional = (None if part is None else round(part, 4) for part in (figure.before, figure.low, figure.high))
    return Figure(round(figure.value, 4), *optional)


def _format_figure(figure: Figure | None, unit: str) -> str:
    if figure is None:
        return "-"
    change = "" if figure.before is None else f"{figure.before:.4g} -> "
    interval = "" if figure.low is None or figure.high is None else f" ({figure.low:.3g} to {figure.high:.3g})"
    return f"{change}{figure.value:.4g}{'' if unit in ('', 'x') else ' '}{unit}{interval}"
