"""Read the config of a night: a list of entries, each a tune config with its share of the time."""

import re
from pathlib import Path

from pydantic import Field, field_validator

from autotune.errors import ConfigError
from autotune.records import yaml_file as yamlfile
from autotune.records.config import Config, Section, validate_section
from autotune.units import parse_seconds

RESERVED = "nights"
"""Directory of the nights' result files, beside the entries' directories."""


class NightlyEntry(Config):
    """One workload on one budget. `time` is the maximum that it uses of a night."""

    name: str = ""
    """Name of the entry's directory; derived from the workload by default."""
    share: float = Field(1.0, gt=0)
    """Weight of this entry when the night's time is divided; `time` is the entry's maximum."""
    refine: bool = True
    """True to search for a faster plan after the champion is verified."""

    @property
    def key(self) -> str:
        """Name of its directory."""
        return self.name or re.sub(r"[^A-Za-z0-9]+", "-", self.workload.removesuffix(".py")).strip("-").lower()

    def search_config(self, seconds: float, plans: Path, champion: Path | None = None) -> Config:
        """Return the config of a search of `seconds`, seeded from the champion's settings."""
        fields = {name: getattr(self, name) for name in Config.model_fields}
        changes = {"time": f"{max(seconds, 1):.0f}s", "plans": str(plans)}
        if champion is not None:
            changes["seed_from"] = str(champion)
        return Config.model_validate({**fields, **changes})


class NightlyConfig(Section):
    """All entries of a night, and the options that apply to each."""

    entries: list[NightlyEntry] = Field(min_length=1)
    """Workloads to verify and to tune, each with its own budget."""
    time: str = "8h"
    """Maximum duration of the night; `--resume` runs the entries that are left."""
    directory: str = "runs/nightly"
    """Directory of champions, histories and results."""
    slower: float = Field(0.03, gt=0, lt=1)
    """Relative slowdown of a champion that counts as a regression."""
    gain: float = Field(0.01, ge=0, lt=1)
    """Relative time that a challenger must save, in two nights, to replace the champion."""

    @property
    def time_seconds(self) -> float:
        return parse_seconds(self.time)

    @field_validator("time")
    @classmethod
    def _check_time(cls, text: str) -> str:
        try:
            parse_seconds(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text


def load_nightly_config(path: Path) -> NightlyConfig:
    """Read and validate a nightly config; ConfigError names the file, the line and the first error."""
    document = yamlfile.read(path)
    options = validate_section(NightlyConfig, document.data, document)
    keys: set[str] = set()
    for number, entry in enumerate(options.entries):
        where = document.where(("entries", number, "name"))
        if Path(entry.key).name != entry.key or entry.key in (".", "..", RESERVED):
            raise ConfigError(f"{where}: name {entry.key!r}: give a plain name, no path and not {RESERVED!r}")
        if entry.key in keys:
            raise ConfigError(f"{where}: two entries are called {entry.key!r}; give one of them another name")
        keys.add(entry.key)
    return options
