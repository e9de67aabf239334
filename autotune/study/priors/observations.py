"""Records of settings that were not measured in this study: simulated ones, and trials of another run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from autotune.planners.knobs import Settings
from autotune.records.device import Device
from autotune.records.json_codec import read_whole, to_json
from autotune.records.run_dir import RunDir, write_json
from autotune.study.verdicts.ranking import NOTABLE_SHARE, TrialScore

SCHEMA = 1


class PriorSource(StrEnum):
    """Origin of an observation, which decides how far its time is trusted."""

    SIMULATED = "simulated"
    """Predicted by the simulator for this graph, device and budget."""
    SAME_STUDY = "same graph and device"
    """Measured in another run of this graph on this device."""
    OTHER_DEVICE = "other device"
    """Measured in a run of this graph on another device."""
    OTHER_GRAPH = "other graph"
    """Measured on this device in a run of another graph or budget: only ratios between its settings are used."""
    OTHER_GRAPH_AND_DEVICE = "other graph and device"
    """Measured on another device in a run of another graph or budget: only ratios between its settings are used."""

    @property
    def has_bytes(self) -> bool:
        """True if the bytes of such an observation hold for this graph."""
        return self in (PriorSource.SIMULATED, PriorSource.SAME_STUDY, PriorSource.OTHER_DEVICE)


@dataclass(frozen=True, slots=True)
class PriorObservation:
    """Settings with the score that another run measured for them, or that the simulator predicts."""

    source: PriorSource
    settings: Settings
    score: TrialScore
    """Score as recorded, before its time is calibrated."""
    plan: str = ""
    """Hash of the simulated plan; empty for a trial of another run, whose plan is for another budget or device."""


@dataclass(frozen=True, slots=True)
class Priors:
    """Observations of one study that it did not measure, as its run directory keeps them."""

    schema: int = SCHEMA
    earlier: tuple[PriorObservation, ...] = ()
    """Trials of the run that `seed_from` names."""
    simulated: tuple[PriorObservation, ...] | None = None
    """Settings that were planned and simulated; None until the search begins."""

    @property
    def observations(self) -> tuple[PriorObservation, ...]:
        """All observations, the least certain source last."""
        return (*self.earlier, *(self.simulated or ()))


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """Scores of another run's trials, with what decides how far they hold here."""

    graph_digest: str
    device: Device | None
    budget_bytes: int
    """Budget of the step in that run."""
    scores: tuple[tuple[Settings, TrialScore], ...] = ()

    def classify(self, graph_digest: str, device: Device, budget_bytes: int) -> PriorSource:
        """Return the source of this run's observations in a study of this graph on this device within this budget."""
        same_device = self.device is not None and self.device.key == device.key
        # plans of another budget recompute other values, and fit where others do not
        same_budget = abs(self.budget_bytes / max(budget_bytes, 1) - 1) <= NOTABLE_SHARE
        if self.graph_digest == graph_digest and same_budget:
            return PriorSource.SAME_STUDY if same_device else PriorSource.OTHER_DEVICE
        return PriorSource.OTHER_GRAPH if same_device else PriorSource.OTHER_GRAPH_AND_DEVICE


def observe_earlier(source: PriorSource, scores: Sequence[tuple[Settings, TrialScore]]) -> tuple[PriorObservation, ...]:
    """Return the scores of another run as observations.

    A run of another graph predicts no bytes here, and its failures depend on its own budget. So its imputed and wrong
    results are left out, and its bytes count as within the budget.
    """
    if source.has_bytes:
        return tuple(PriorObservation(source, settings, score) for settings, score in scores)
    return tuple(
        PriorObservation(source, settings, replace(score, memory=0.0))
        for settings, score in scores
        if not score.imputed and not score.numerics
    )


def read_priors(run_dir: Path) -> Priors:
    """Read the observations in a run directory, empty ones where none are recorded.

    Raises ConfigError where the file is damaged.
    """
    path = RunDir(run_dir).priors
    if not path.exists():
        return Priors()
    return read_whole(
        Priors,
        path,
        schema=SCHEMA,
        what="priors",
        again="delete it: settings are simulated again, and the trials of --seed-from are read no more",
    )


def write_priors(run_dir: Path, priors: Priors) -> None:
    """Replace the observations in a run directory, in one step."""
    write_json(RunDir(run_dir).priors, to_json(priors))
