"""Read the config of a night: a list of entries, each a tune config with its share of the time."""

import hashlib
import re
from pathlib import Path

from pydantic import Field, field_validator

from autotune.errors import ConfigError
from autotune.records import yaml_file as yamlfile
from autotune.records.config import BATCH_OBJECTIVES, Config, Section, validate_section
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

    @field_validator("objective")
    @classmethod
    def _refuse_other_objectives(cls, objective: str) -> str:
        if objective == "pareto":
            raise ValueError(
                "'pareto' searches many plans, and an entry of a night keeps one champion; write time here, or search the front "
                "with autotune tune --objective pareto"
            )
        if objective in BATCH_OBJECTIVES:  # champions of several nights are compared on one graph
            raise ValueError(
                f"{objective} chooses the batch size, and a champion has one; choose it with autotune tune, then write it "
                "into the entry's arguments, with its plan's loop"
            )
        return objective

    @property
    def key(self) -> str:
        """Name of its directory; on a class of a fleet it ends with `@CLASS`: each class has its own champion."""
        name = self.name or re.sub(r"[^A-Za-z0-9]+", "-", self.workload.removesuffix(".py")).strip("-").lower()
        return name if self.on is None else f"{name}@{self.on}"

    def search_config(self, seconds: float, plans: Path, champion: Path | None = None, *, night: str = "") -> Config:
        """Return the config of a search of `seconds`, with the settings of the champion and the seed of the night."""
        fields = {name: getattr(self, name) for name in Config.model_fields}
        changes = {"time": f"{max(seconds, 1):.0f}s", "plans": str(plans), "seed": night_seed(self.seed, night)}
        if champion is not None:
            changes["seed_from"] = str(champion)
        return Config.model_validate({**fields, **changes})


def night_seed(seed: int, night: str) -> int:
    """Return the seed of a night's search: another one each night, and the same one where a night is resumed.

    It is the entry's seed plus the first 31 bits of the SHA-256 of the night's name, modulo 2**31. The `config.yaml` of
    the search records it. Without a name it is the entry's seed.

    >>> night_seed(3, ""), night_seed(3, "2026-11-20_020000") == night_seed(3, "2026-11-21_020000")
    (3, False)
    """
    if not night:
        return seed
    digest = int.from_bytes(hashlib.sha256(night.encode()).digest()[:4], "big") >> 1
    return (seed + digest) % 2**31


class NightlyConfig(Section):
    """All entries of a night, and the options that apply to each."""

    entries: list[NightlyEntry] = Field(min_length=1)
    """Workloads to verify and to tune, each with its own budget."""
    time: str = "8h"
    """Maximum duration of the night; `--resume` runs the entries that are left."""
    directory: str = "runs/nightly"
    """Directory of champions, histories and results."""
    slower: float = Field(0.03, gt=0, lt=1)
    """Relative slowdown that a night must be able to exclude. A champion counts as slower from half of it on, if the interval excludes
    equal time and the night is an outlier among past nights."""
    gain: float = Field(0.01, ge=0, lt=1)
    """Relative time that a challenger must save, in two nights, to replace the champion."""
    fleet: str | None = None
    """File of the fleet for all entries with `on`, which may name one class or a list of classes."""

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


def load_nightly_config(path: Path, *, fleet: str | None = None, on: str | None = None) -> NightlyConfig:
    """Read and validate a nightly config; ConfigError names the file, the line and the first error.

    An entry with a list of classes becomes one entry for each. `fleet` and `on` replace those of the file and its entries.
    Raises ConfigError also for a fleet that no entry measures on.
    """
    document = expand_classes(yamlfile.read(path), fleet, on)
    options = validate_section(NightlyConfig, document.data, document)
    if options.fleet is not None and all(entry.on is None for entry in options.entries):
        where = f"--fleet {fleet}" if fleet is not None else f"{document.where(('fleet',))}: fleet {options.fleet}"
        raise ConfigError(f"{where}: no entry names a class; add `on` to the entries that it measures, or --on CLASS")
    keys: set[str] = set()
    for number, entry in enumerate(options.entries):
        where = document.where(("entries", number, "name"))
        if Path(entry.key).name != entry.key or entry.key in (".", "..", RESERVED):
            raise ConfigError(f"{where}: name {entry.key!r} is a path or reserved; give a plain name")
        if entry.key in keys:
            raise ConfigError(f"{where}: two entries are called {entry.key!r}; give one of them another name")
        keys.add(entry.key)
    return options


def expand_classes(document: yamlfile.Document, fleet: str | None, on: str | None) -> yamlfile.Document:
    """Return a document with one entry for each class that an entry names; every entry keeps the line of its origin."""
    entries = document.data.get("entries")
    if not isinstance(entries, list):
        return document
    default = fleet or document.data.get("fleet")
    expanded: list[object] = []
    lines = {path: line for path, line in document.lines.items() if path[:1] != ("entries",) or len(path) == 1}
    for number, entry in enumerate(entries):
        copies: list[object] = [entry]
        if isinstance(entry, dict):
            classes = [on] if on is not None else entry.get("on")
            chosen = fleet or entry.get("fleet") or default
            shared = {} if chosen is None else {"fleet": chosen}
            named = classes if isinstance(classes, list) and classes else [classes]
            copies = [entry if name is None else {**entry, **shared, "on": name} for name in named]
        for copy in copies:
            for path, line in document.lines.items():
                if path[:2] == ("entries", number):
                    lines["entries", len(expanded), *path[2:]] = line
            expanded.append(copy)
    data = {**document.data, "entries": expanded}
    return yamlfile.Document(document.name, data if default is None else {**data, "fleet": default}, lines)
