"""Settings that served elsewhere, as first trials here: rescaled to this device's stores, planned and measured anew."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.measure.device import profile as device_profile
from autotune.planners import KINDS
from autotune.planners.knobs import Int, Settings
from autotune.planners.space import Space
from autotune.records import plan_file as planfile
from autotune.records.device import Device
from autotune.records.json_codec import from_json
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial, load
from autotune.study.optuna_space import parameters

MOST = 3
"""Of a run's plans the fastest."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """Settings from one place, and what the stores did there, where that is known."""

    settings: tuple[Settings, ...]
    stores: dict[str, StoreCost] = field(default_factory=dict)

    def here(self, stores: Mapping[str, StoreCost], searched: Space) -> list[Settings]:
        """Those that can be searched here, rescaled."""
        scaled = [_rescaled(settings, self.stores, stores) for settings in self.settings]
        kept = [settings for settings in scaled if parameters(settings, searched)[0]]
        return [settings for number, settings in enumerate(kept) if settings not in kept[:number]]


def read(source: Path, runs: Path) -> Seeds:
    """Of a run directory the fastest plans' settings, of a plan file its own; ConfigError where it is neither."""
    if not source.is_dir():
        file = planfile.read(source)
        return Seeds((file.settings,), _stores(source.parent, file.device, runs))
    trials = [trial for trial in load(source / "trials.jsonl") if _served(trial)]
    if not trials:
        raise ConfigError(
            f"{source}: no plan was measured here; give a plan file, or a directory that autotune tune made"
        )
    trials.sort(key=lambda trial: (trial.measurement.time_ratio if trial.measurement else None) or float("inf"))
    settings: list[Settings] = []
    for trial in trials:
        if trial.settings not in settings and len(settings) < MOST:
            settings.append(trial.settings)
    device = trials[0].measurement.device if trials[0].measurement else None
    return Seeds(tuple(settings), _stores(source, device, runs))


def _served(trial: Trial) -> bool:
    seen = trial.measurement
    return trial.plan is not None and trial.kind != "repeat" and seen is not None and seen.outcome is Outcome.OK


def _stores(beside: Path, device: Device | None, runs: Path) -> dict[str, StoreCost]:
    """As measured for the run that lies there, else as in the profile of its device."""
    path = beside / "costs.json"
    with contextlib.suppress(OSError, ValueError, ConfigError):
        return from_json(Costs, json.loads(path.read_text()), where=str(path)).stores
    profile = device_profile.find(runs, device) if device is not None else None
    return profile.stores if profile is not None else {}


def _rescaled(settings: Settings, there: Mapping[str, StoreCost], here: Mapping[str, StoreCost]) -> Settings:
    """With a window as many times wider as the store is slower here; and as much smaller what is still worth a transfer."""
    offload = settings.get("offload", {})
    store = str(offload.get("store"))
    if store not in there or store not in here:
        return settings
    slower = max(
        there[store].write_bytes_per_second / here[store].write_bytes_per_second,
        there[store].read_bytes_per_second / here[store].read_bytes_per_second,
    )
    factors = {"window": slower, "least_bytes": 1 / slower}
    knobs = KINDS["offload"][str(offload["planner"])].knobs if offload.get("planner") in KINDS["offload"] else {}
    turned = dict(offload)
    for name, factor in factors.items():
        knob, value = knobs.get(name), offload.get(name)
        if isinstance(knob, Int) and isinstance(value, int):
            turned[name] = min(knob.high, max(knob.low, round(value * factor)))
    return {**settings, "offload": turned}
