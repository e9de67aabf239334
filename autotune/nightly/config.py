"""What a night is to do: entries, each a tune config with its share of the time."""

import re
from pathlib import Path

from pydantic import Field, field_validator

from autotune.errors import ConfigError
from autotune.records import yaml_file as yamlfile
from autotune.records.config import Config, Section, checked
from autotune.units import parse_seconds

RESERVED = "nights"
"""Directory of the nights' own results, beside those of the entries."""


class Entry(Config):
    """One workload on one budget. `time` is the most that it takes of a night."""

    name: str = ""
    """Of its directory; the workload's by default."""
    share: float = Field(1.0, gt=0)
    """Of the night's time, beside the other entries'."""
    refine: bool = True
    """Whether to search for a faster plan once the champion is verified."""

    @property
    def key(self) -> str:
        """Name of its directory."""
        return self.name or re.sub(r"[^A-Za-z0-9]+", "-", self.workload.removesuffix(".py")).strip("-").lower()

    def study(self, seconds: float, plans: Path, champion: Path | None = None) -> Config:
        """The config of a search of so many seconds, seeded from the champion's settings."""
        own = {name: getattr(self, name) for name in Config.model_fields}
        changed = {"time": f"{max(seconds, 1):.0f}s", "plans": str(plans)}
        if champion is not None:
            changed["seed_from"] = str(champion)
        return Config.model_validate({**own, **changed})


class Nightly(Section):
    """All entries, and what holds for each."""

    entries: list[Entry] = Field(min_length=1)
    time: str = "8h"
    """How long the night may take; entries that it has no time for are left to `--resume`."""
    directory: str = "runs/nightly"
    """Of champions, histories and results."""
    slower: float = Field(0.03, gt=0, lt=1)
    """Share of time: a champion that takes so much more than on record is to be found."""
    gain: float = Field(0.01, ge=0, lt=1)
    """Share of time that a challenger must save, in two nights, to replace the champion."""

    @property
    def time_seconds(self) -> float:
        return parse_seconds(self.time)

    @field_validator("time")
    @classmethod
    def _readable(cls, text: str) -> str:
        try:
            parse_seconds(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text


def load_night(path: Path) -> Nightly:
    """Read and check; ConfigError names the file, the line and the first thing wrong there."""
    document = yamlfile.read(path)
    night = checked(Nightly, document.data, document)
    known: set[str] = set()
    for number, entry in enumerate(night.entries):
        where = document.where(("entries", number, "name"))
        if Path(entry.key).name != entry.key or entry.key in (".", "..", RESERVED):
            raise ConfigError(f"{where}: name {entry.key!r}: a plain name, no path and not {RESERVED!r}")
        if entry.key in known:
            raise ConfigError(f"{where}: two entries are called {entry.key!r}; give one of them another name")
        known.add(entry.key)
    return night
