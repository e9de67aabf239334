"""What a person asks for: a YAML file or a bare workload reference, the command line's options laid over it."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from autotune.errors import ConfigError, nearest
from autotune.planners import KINDS
from autotune.records import yaml_file as yamlfile
from autotune.records.budget import Budget
from autotune.units import parse_bytes, parse_seconds
from autotune.workloads.reference import WorkloadRef

StoreName = Literal["ssd", "ramdisk", "host"]


class Section(BaseModel):
    """A mapping of the file: no unknown keys, no conversions, no changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


S = TypeVar("S", bound=Section)


class Planners(Section):
    """Which planners the search may choose from; a kind that is left out is free."""

    order: list[str] | None = None
    recompute: list[str] | None = None
    reorder: list[str] | None = None
    offload: list[str] | None = None
    update: list[str] | None = None
    inplace: list[str] | None = None
    allocator: list[str] | None = None

    @field_validator("order", "recompute", "reorder", "offload", "update", "inplace", "allocator")
    @classmethod
    def _known(cls, names: list[str] | None, info: ValidationInfo) -> list[str] | None:
        known = KINDS[str(info.field_name)]
        for name in names or []:
            if name not in known:
                raise ValueError(f"no planner {name!r}{nearest(name, known)}")
        if names == []:
            raise ValueError(f"nothing left to choose; name at least one of {', '.join(known)}, or leave it out")
        return names


class Config(Section):
    """One study, resolved: every field has its value."""

    workload: str = Field(min_length=1)
    """A zoo name, `package.module:factory` or `path/file.py:factory`."""
    arguments: dict[str, JsonValue] = {}
    """The factory's."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the step runs; model and batch are moved there."""
    budget: str = "65%"
    objective: Literal["time", "pareto"] = "time"
    time: str = "10m"
    """How long the study may take; for one that is gone on with it begins anew."""
    trials: int | None = Field(None, ge=1)
    """How many it may take; None for as many as there is time for."""
    stores: dict[StoreName, str] = {}
    """Where offloaded bytes may go: the directory of each store."""
    seed: int = Field(0, ge=0)
    """The sampler's; a workload's own seed stands in `arguments`."""
    limit: str | None = None
    """Enforced on the process that runs the step: `900MiB`."""
    samples: int = Field(10, ge=1)
    """Timed steps of one measurement."""
    runs: str = "runs"
    """Directory of the records."""
    plans: str = "plans"
    """Directory of the plans that are handed back."""
    memory_format: Literal["", "channels_last"] = ""
    """What plans run in, and what they are compared with; times are told as ratios to the user's own format."""
    seed_from: str | None = None
    """A plan file or a run directory, of any device: its settings are the first trials."""
    tracking_uri: str | None = None
    """MLflow's: `http://server:5000`, `postgresql://user@server/name`; a SQLite file in `runs` by default."""
    planners: Planners = Planners()
    sampler: Literal["auto", "gp", "tpe", "random"] = "auto"
    patience: int = Field(20, ge=1)
    """Plans of the sampler's that are measured without a new leader, after which the search ends."""

    @property
    def ref(self) -> WorkloadRef:
        """The workload as plan files name it."""
        return WorkloadRef(self.workload, dict(self.arguments))

    @property
    def parsed_budget(self) -> Budget:
        return Budget.parse(self.budget)

    @property
    def time_seconds(self) -> float:
        return parse_seconds(self.time)

    @property
    def limit_bytes(self) -> int | None:
        return None if self.limit is None else parse_bytes(self.limit)

    @field_validator("tracking_uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "holds a password, and configs are logged; leave it out and set PGPASSWORD or MLFLOW_TRACKING_PASSWORD, "
                "or set the whole address as MLFLOW_TRACKING_URI"
            )
        return uri

    @field_validator("budget", "time", "limit", mode="before")
    @classmethod
    def _readable(cls, value: object, info: ValidationInfo) -> object:
        parse = {"budget": Budget.parse, "time": parse_seconds, "limit": parse_bytes}[str(info.field_name)]
        if value is not None:
            try:
                parse(str(value))
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return value


def load_config(
    target: str, *, overrides: Mapping[str, object] | None = None, arguments: Mapping[str, str] | None = None
) -> Config:
    """Read `target`, a `.yaml` file or a workload reference.

    `overrides` are fields, None for an option that was not given; `stores` and `planners` are laid over the file's one
    by one. `arguments` are the factory's as typed on a command line: `8`, `1e-3`, `true`.
    """
    if Path(target).suffix in (".yaml", ".yml"):
        document = yamlfile.read(Path(target))
    else:
        document = yamlfile.Document(target, {"workload": target})
    data = dict(document.data)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if arguments:
        given["arguments"] = {key: yamlfile.scalar(text, f"--set {key}") for key, text in arguments.items()}
    for key, value in given.items():
        below = data.get(key)
        data[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, Mapping) else value
    return checked(Config, data, document, given)


def checked(
    kind: type[S], data: Mapping[str, Any], document: yamlfile.Document, given: Mapping[str, object] | None = None
) -> S:
    """What the document says, with the options that were `given` laid over it; the first fault with its line or option."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # a misspelt `wrokload` says more than the missing one
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise ConfigError(_told(first, kind, document, given or {})) from None


def dump(config: Config) -> str:
    """The config as YAML that `load_config` reads back equal."""
    return yamlfile.text(config.model_dump(mode="json"))


def _told(error: ErrorDetails, kind: type[Section], document: yamlfile.Document, given: Mapping[str, object]) -> str:
    """The first thing wrong, with its line or its option."""
    path = tuple(part for part in error["loc"] if part != "[key]")
    if not path:  # of the whole: a rule between its parts
        return f"{document.name}: {error['ctx']['error']}"
    key, around = path[-1], [part for part in path[:-1] if isinstance(part, str)]
    section = f" in {around[-1]}" if around else ""
    if _holds(given, path):
        place = {"stores": "--store", "arguments": "--set"}.get(str(path[0]), f"--{path[0]}".replace("_", "-"))
    else:
        place = document.where(path)
    match error["type"]:
        case "extra_forbidden":
            return f"{place}: unknown key {key!r}{section}{nearest(str(key), _fields(kind, path[:-1]))}"
        case "literal_error" if "[key]" in error["loc"]:
            return f"{place}: unknown key {key!r}{section}{nearest(str(key), typing.get_args(StoreName))}"
        case "missing" if key == "workload":
            return f"{place}: no {key}{section}; give a zoo name, package.module:factory or path/file.py:factory"
        case "missing":
            return f"{place}: no {key}{section}"
        case "value_error":
            reason = str(error["ctx"]["error"])
        case _:
            reason = f"{error['msg'][:1].lower()}{error['msg'][1:]} (got {error['input']!r})"
    name = ".".join(map(str, path))
    return f"{place}: {reason}" if place == f"--{name}" else f"{place}: {name}: {reason}"


def _holds(given: object, path: yamlfile.KeyPath) -> bool:
    """Whether the options, and not the file, say what stands at `path`."""
    if not path or not isinstance(given, Mapping):
        return not isinstance(given, Mapping)
    return path[0] in given and (len(path) == 1 or _holds(given[path[0]], path[1:]))


def _fields(kind: type[BaseModel], path: yamlfile.KeyPath) -> list[str]:
    """Known keys of the section at `path`."""
    for part in path:
        if isinstance(part, str):
            found = kind.model_fields[part].annotation
            # of a list the section that each of its parts is
            kind = typing.cast("type[BaseModel]", (typing.get_args(found) or (found,))[0])
    return list(kind.model_fields)
