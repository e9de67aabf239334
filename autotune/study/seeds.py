"""Read the settings and trials of another run, and rescale them to this device's stores."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.measure.device import profile as device_profile
from autotune.planners import KINDS
from autotune.planners.knobs import Int, Settings
from autotune.planners.space import Space, preset_settings
from autotune.records import plan_file as planfile
from autotune.records.device import Device
from autotune.records.json_codec import from_json
from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study.optuna_space import to_parameters
from autotune.study.priors.observations import EarlierRun
from autotune.study.recorded_run import RecordedRun
from autotune.study.verdicts.ranking import TrialScore, allocator_overheads, score_trial

MAX_SEEDS = 3
"""Maximum number of plans whose settings are measured first, fastest first."""
OBSERVED_KINDS = (TrialKind.SEED, TrialKind.PLANNER, TrialKind.SEARCH, TrialKind.REPEAT)
"""Kinds of trials whose settings made a plan for the run's own budget, beside the search's own eager step."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """Settings of another run, with the rates of its stores where they are recorded."""

    settings: tuple[Settings, ...]
    """Settings to measure first."""
    stores: dict[str, StoreCost] = field(default_factory=dict)
    earlier: EarlierRun | None = None
    """Scores of all trials; None for a plan file, or where the run's records are incomplete."""

    def adapt(self, stores: Mapping[str, StoreCost], searched: Space) -> list[Settings]:
        """Return the settings that the search space contains, rescaled to these stores and without repeats.

        The allocator becomes the device's only one, and a knob that the settings lack gets its default.
        """
        scaled = [_complete(_rescale(settings, self.stores, stores), searched) for settings in self.settings]
        valid = [settings for settings in scaled if to_parameters(settings, searched)[0]]
        return [settings for number, settings in enumerate(valid) if settings not in valid[:number]]

    def adapt_scores(self, stores: Mapping[str, StoreCost], searched: Space) -> list[tuple[Settings, TrialScore]]:
        """Return the scores of all trials, with their settings adapted as by `adapt`."""
        scores = self.earlier.scores if self.earlier is not None else ()
        return [(_complete(_rescale(settings, self.stores, stores), searched), score) for settings, score in scores]


def read_seeds(source: Path, runs: Path) -> Seeds:
    """Read the settings of a plan file, or of the fastest plans of a run directory.

    `runs` contains the profile of the source's device, which has the store rates where the source itself has none.
    Raises ConfigError where `source` is neither a plan file nor a run directory with a measured plan.
    """
    if not source.is_dir():
        file = planfile.read(source)
        return Seeds((file.settings,), _read_stores(source.parent, file.device, runs))
    trials = [trial for trial in load_trials(RunDir(source).trials) if _is_usable(trial)]
    if not trials:
        raise ConfigError(
            f"{source}: no plan was measured here; name a plan file, or a directory that autotune tune wrote"
        )
    trials.sort(key=lambda trial: trial.time_cost or math.inf)
    settings: list[Settings] = []
    for trial in trials:
        if trial.settings not in settings and len(settings) < MAX_SEEDS:
            settings.append(trial.settings)
    device = trials[0].measurement.device if trials[0].measurement else None
    return Seeds(tuple(settings), _read_stores(source, device, runs), _read_scores(source, device))


def _read_scores(source: Path, device: Device | None) -> EarlierRun | None:
    """Return the scores of a run's trials by its own rules; None where its records do not contain these rules."""
    try:
        records = RecordedRun.load(source)
        rules = records.rules
    except ConfigError:  # its settings are usable without its other records
        return None
    if rules is None or not records.trials or records.is_front:  # each trial of a front has a budget of its own
        return None
    overheads = allocator_overheads(records.trials)
    scores = [
        (trial.settings, score_trial(trial, rules, overheads))
        for trial in records.trials
        if trial.kind in OBSERVED_KINDS and trial.measurement is not None
    ]
    usable = tuple((settings, score) for settings, score in scores if score.time_ratio > 0)
    return EarlierRun(records.trials[0].graph_digest, records.device or device, rules.budget_bytes, usable)


def _is_usable(trial: Trial) -> bool:
    result = trial.measurement
    return (
        trial.plan is not None
        and trial.kind != TrialKind.REPEAT
        and not trial.move  # its settings make another plan
        and result is not None
        and result.outcome is Outcome.OK
    )


def _read_stores(directory: Path, device: Device | None, runs: Path) -> dict[str, StoreCost]:
    """Return the store rates of the run in this directory, else those in the profile of its device."""
    path = RunDir(directory).costs
    with contextlib.suppress(OSError, ValueError, ConfigError):
        return from_json(Costs, json.loads(path.read_text(encoding="utf-8")), where=str(path)).stores
    profile = device_profile.find(runs, device) if device is not None else None
    return profile.stores if profile is not None else {}


def _complete(settings: Settings, searched: Space) -> Settings:
    """Replace the allocator where the search space has only another one, and add the defaults of knobs that are missing."""
    names = {kind: str(settings.get(kind, {}).get("planner")) for kind in searched}
    if names.get("allocator") not in searched.get("allocator", {}) and len(searched.get("allocator", {})) == 1:
        (names["allocator"],) = searched["allocator"]
    if any(name not in searched[kind] for kind, name in names.items()):
        return settings
    defaults = preset_settings(KINDS, searched, names)
    complete = {
        kind: defaults[kind] | {knob: value for knob, value in settings.get(kind, {}).items() if knob != "planner"}
        for kind in searched
        if kind != "allocator"
    }
    return {**settings, **complete, **({"allocator": defaults["allocator"]} if "allocator" in searched else {})}


def _rescale(settings: Settings, source: Mapping[str, StoreCost], target: Mapping[str, StoreCost]) -> Settings:
    """Widen the offload window by the factor by which the target store is slower, and lower the transfer threshold by it."""
    offload = settings.get("offload", {})
    store = str(offload.get("store"))
    if store not in source or store not in target:
        return settings
    slower = max(
        source[store].write_bytes_per_second / target[store].write_bytes_per_second,
        source[store].read_bytes_per_second / target[store].read_bytes_per_second,
    )
    factors = {"window": slower, "least_bytes": 1 / slower}
    knobs = KINDS["offload"][str(offload["planner"])].knobs if offload.get("planner") in KINDS["offload"] else {}
    rescaled = dict(offload)
    for name, factor in factors.items():
        knob, value = knobs.get(name), offload.get(name)
        if isinstance(knob, Int) and isinstance(value, int):
            rescaled[name] = min(knob.high, max(knob.low, round(value * factor)))
    return {**settings, "offload": rescaled}
