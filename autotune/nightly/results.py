"""What a night came to, and what that is to a script."""

from dataclasses import dataclass

from autotune.errors import AutotuneError, InconclusiveError, OutOfTimeError, RegressionError
from autotune.nightly.history import Night, Verdict

SEVERITY = (
    Verdict.REGRESSION, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PROMOTED, Verdict.NEW, Verdict.SAME,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Results:
    """One night."""

    name: str
    config: str
    """The file that it was asked for by."""
    nights: tuple[Night, ...]
    """Of the entries that are done, in the config's order."""
    left: tuple[str, ...]
    """Entries that are not."""
    interrupted: int = 0
    """Number of the signal that ended it early; 0 for none."""

    @property
    def by_severity(self) -> list[Night]:
        """The worst first."""
        return sorted(self.nights, key=lambda night: SEVERITY.index(night.verdict))

    def of(self, verdict: Verdict) -> list[Night]:
        """Entries that it came to this for."""
        return [night for night in self.nights if night.verdict is verdict]

    @property
    def headline(self) -> str:
        """`nightly 2026-11-20: 3 entries: 1 regression, 2 same`."""
        counts = [f"{len(found)} {verdict}" for verdict in SEVERITY if (found := self.of(verdict))]
        counts += [f"{len(self.left)} not done"] if self.left else []
        return f"nightly {self.name}: {len(self.nights) + len(self.left)} entries: {', '.join(counts)}"


def failure(results: Results) -> AutotuneError | None:
    """The error that a night is to a script: the worst of its entries, then what is left of it."""
    if red := results.of(Verdict.REGRESSION):
        said = ", ".join(f"{one.entry} ({', '.join(one.causes)})" for one in red)
        return RegressionError(f"night {results.name}: regression of {said}{_more(results)}")
    if failed := results.of(Verdict.FAILED):
        error = AutotuneError(f"night {results.name}: {failed[0].entry}: {failed[0].detail}{_more(results)}")
        error.exit_code = failed[0].exit_code
        return error
    if results.left:
        return OutOfTimeError(f"night {results.name} ended before {', '.join(results.left)}{_more(results)}")
    if unclear := results.of(Verdict.INCONCLUSIVE):
        return InconclusiveError(f"night {results.name}: {unclear[0].entry}: {unclear[0].detail}")
    return None


def _more(results: Results) -> str:
    return f"; go on with: autotune nightly {results.config} --resume" if results.left else ""
