"""Summarize a night for people and for scripts: a headline, the order of severity, and the exit code."""

import shlex
from dataclasses import dataclass

from autotune.errors import AutotuneError, InconclusiveError, OutOfTimeError, RegressionError
from autotune.nightly.history import NightRecord, NightVerdict

SEVERITY = (
    NightVerdict.REGRESSION, NightVerdict.FAILED, NightVerdict.INCONCLUSIVE, NightVerdict.PROMOTED, NightVerdict.NEW,
    NightVerdict.SAME,
)  # fmt: skip
"""Verdicts, the worst first."""


@dataclass(frozen=True, slots=True)
class NightResults:
    """Results of one night."""

    name: str
    config: str
    """Path of the nightly config."""
    nights: tuple[NightRecord, ...]
    """Entries that are done, in the order of the config."""
    left: tuple[str, ...]
    """Entries that are not done."""
    arguments: tuple[str, ...] = ()
    """Options of the command that choose devices and entries; the command that goes on needs them again."""
    interrupted: int = 0
    """Number of the signal that ended the night early; 0 for none."""

    @property
    def resume_command(self) -> str:
        """Command that runs the entries that are left, quoted for a shell."""
        return shlex.join(("autotune", "nightly", self.config, *self.arguments, "--resume"))

    @property
    def by_severity(self) -> list[NightRecord]:
        """Entries that are done, the worst first."""
        return sorted(self.nights, key=lambda night: SEVERITY.index(night.verdict))

    def with_verdict(self, verdict: NightVerdict) -> list[NightRecord]:
        """Return the entries with this verdict."""
        return [night for night in self.nights if night.verdict is verdict]

    @property
    def headline(self) -> str:
        """Count of each verdict, as `nightly 2026-11-20: 3 entries: 1 regression, 2 same`."""
        counts = [f"{len(nights)} {verdict}" for verdict in SEVERITY if (nights := self.with_verdict(verdict))]
        counts += [f"{len(self.left)} not done"] if self.left else []
        return f"nightly {self.name}: {len(self.nights) + len(self.left)} entries: {', '.join(counts)}"


def worst_error(results: NightResults) -> AutotuneError | None:
    """Return the error that the night's command ends with: the worst entry's, then that of a missing entry, or None."""
    if regressions := results.with_verdict(NightVerdict.REGRESSION):
        names = ", ".join(f"{night.entry} ({', '.join(night.causes) or 'cause unknown'})" for night in regressions)
        return RegressionError(f"night {results.name}: regression of {names}{_resume_hint(results)}")
    if failed := results.with_verdict(NightVerdict.FAILED):
        error = AutotuneError(f"night {results.name}: {failed[0].entry}: {failed[0].detail}{_resume_hint(results)}")
        error.exit_code = failed[0].exit_code
        return error
    if results.left:
        return OutOfTimeError(f"night {results.name} ended before {', '.join(results.left)}{_resume_hint(results)}")
    if unclear := results.with_verdict(NightVerdict.INCONCLUSIVE):
        return InconclusiveError(f"night {results.name}: {unclear[0].entry}: {unclear[0].detail}")
    return None


def _resume_hint(results: NightResults) -> str:
    return f"; go on with: {results.resume_command}" if results.left else ""
