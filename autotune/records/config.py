"""Define the config of a study: a YAML file or a workload reference, with the command line's options applied."""

import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from autotune.errors import ConfigError, nearest
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.planners import KINDS
from autotune.records import yaml_file as yamlfile
from autotune.records.budget import Budget
from autotune.records.tracking_address import check_address, has_secret
from autotune.units import parse_bytes, parse_seconds
from autotune.workloads.loop import Loop
from autotune.workloads.reference import WorkloadRef, name_factory

StoreName = Literal["ssd", "ramdisk", "host"]
BATCH_OBJECTIVES = ("batch", "throughput")
"""Objectives that choose the batch size before the study."""
FRONT_BUDGET = "110%"
"""Default upper limit of a Pareto front: eager's peak, and what an allocator adds to it."""


class Section(BaseModel):
    """Mapping of the file: unknown keys and wrong types raise an error, and the values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


S = TypeVar("S", bound=Section)


class Planners(Section):
    """Planners that the search chooses from; None for all planners of a kind."""

    order: list[str] | None = None
    recompute: list[str] | None = None
    reorder: list[str] | None = None
    offload: list[str] | None = None
    update: list[str] | None = None
    inplace: list[str] | None = None
    allocator: list[str] | None = None

    @field_validator("order", "recompute", "reorder", "offload", "update", "inplace", "allocator")
    @classmethod
    def _check_names(cls, names: list[str] | None, info: ValidationInfo) -> list[str] | None:
        planners = KINDS[str(info.field_name)]
        for name in names or []:
            if name not in planners:
                raise ValueError(f"no planner {name!r}{nearest(name, planners)}")
        if names == []:
            raise ValueError(f"no planner is left; name at least one of {', '.join(planners)}, or leave the key out")
        return names


class Config(Section):
    """Config of one study; every field has a value."""

    workload: str = Field(min_length=1)
    """Workload: a zoo name, `package.module:factory` or `path/file.py:factory`."""
    arguments: dict[str, JsonValue] = {}
    """Arguments of the workload's factory."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that the step runs on. With `cuda` model and batch are moved to the GPU; with `cpu` nothing is moved."""
    budget: str = "65%"
    """Upper limit of the charged bytes: a share of eager's peak (`65%`) or bytes of the step without the idle process
    (`step:6GiB`), both with a tolerance of 0.5 %, or bytes of the whole process (`6GiB`, no tolerance). With
    `objective: pareto` it limits the front, and is `110%` by default."""
    loop: str = ""
    """Work of the training loop between backward and the update, comma-separated: `clip`, `scaler`, `accumulate=N`.
    `gradients` plans no update, for `PlannedLoss`. Default: the factory's own loop, or updates at once."""
    objective: Literal["time", "pareto", "throughput", "batch"] = "time"
    """Objective: step time within the budget, step time for every budget, samples per second, or the batch size. `pareto`
    searches budgets from the smallest plan to eager's peak, or to a lower `budget`, and confirms a Pareto front with one plan
    file per point. `throughput` and `batch` choose the batch size, then tune the step of that size."""
    batch_argument: str | None = Field(None, min_length=1)
    """Argument of the factory that sets the batch size; default: the first that it takes of `batch`, `batch_size`,
    `micro_batch_size`, `per_device_batch_size`, `per_device_train_batch_size`, `bs`. Where plain eager does not
    fit, results are compared at smaller batches: then the default is `batch` alone."""
    micro_batches: Literal["auto", "never", "always"] = "auto"
    """Micro-batching for `objective: throughput`: `auto` tries several per update, unless the step has batch norm, whose
    statistics would be those of a micro-batch; `always` tries them with batch norm too."""
    time: str = "10m"
    """Time limit: `90s`, `10m`, `1h`. No trial begins after it; capture, baseline and the running trial end first. It starts
    again when a study is resumed."""
    trials: int | None = Field(None, ge=1)
    """Maximum number of trials with the baseline and repeats, without re-measurements; by default `time` and `patience` end the
    search. The baseline, the smallest plan and one plan of the planners are measured in any case."""
    stores: dict[StoreName, str] = {}
    """Directory of each store that plans may offload to, by its name: `ssd`, `ramdisk`, or `host` on a GPU."""
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of the sampler; a workload's own seed is one of its `arguments`."""
    limit: str | None = None
    """Hard memory limit on every process that runs the step, the baseline's included: `900MiB`."""
    samples: int = Field(10, ge=1)
    """Number of timed steps per measurement."""
    runs: str = "runs"
    """Directory of the run directories."""
    plans: str = "plans"
    """Directory of the resulting plan files."""
    memory_format: Literal["", "channels_last"] = ""
    """Memory format of the plans and of their reference results. Time ratios still refer to the user's own format."""
    kernels: Literal["", "inductor", "any"] = Field("", json_schema_extra={"enum": ["", "aten", "inductor", "any"]})
    """Kernels of the plans: `aten` (the default) gives eager's bits; `inductor` fuses ops into compiled regions, whose
    results differ from eager's by rounding. `any` measures one plan of each, also in channels_last, and tunes the fastest.
    Where regions lead and `rebuild_price` is the default, three other prices are measured, too. `any` is for `tune`, and for
    `--dry-run` with the objectives `batch` and `throughput`."""
    threads: int = Field(0, ge=0)
    """Number of threads that torch's CPU ops use in plans and in their reference results; 0 for those that the process has. Time
    ratios still refer to eager on the process's own. With `kernels: any`, half of them, a quarter and so on are measured too, as
    long as fewer are faster."""
    exact: bool = False
    """Accept eager's bits only: no other `kernels`, `memory_format` or `threads`, and no captured step that differs by rounding."""
    rebuild_price: float = Field(REBUILD_PRICE, ge=0, allow_inf_nan=False)
    """Weight of rebuilding in compiled regions. They minimize the bytes kept for the backward pass, plus this number times the
    bytes that rebuilding ops read or write. 0 keeps the fewest bytes; 4 rebuilds hardly anything."""
    seed_from: str | None = None
    """Plan file or run directory, of any device. Its fastest settings are measured after the smallest plan. The samplers `gp` and `tpe`
    also read the run's trials, except moves, as earlier observations; objective `pareto` does not."""
    tracking_uri: str | None = None
    """Tracking URI of MLflow: `http://server:5000`, `postgresql://user@server/name`; default: `$MLFLOW_TRACKING_URI`,
    else a SQLite file in `runs`."""
    optuna_storage: str | None = None
    """Database to which the Optuna study is copied when a session ends, such as `postgresql://user@server/name`: another one than
    MLflow's. The run keeps its own file."""
    fleet: str | None = None
    """File of a fleet, such as `fleet.yaml`; default: `$AUTOTUNE_FLEET`. Used with `on`."""
    on: str | None = None
    """Class of the fleet's devices that measures, such as `a100`; this machine by default."""
    parallel: int = Field(1, ge=1)
    """Number of devices of the class that measure trials of the search at the same time, at most its `devices`. In a night an
    entry uses at most the devices of its class divided by the entries on that class, rounded down, and at least one."""
    planners: Planners = Planners()
    sampler: Literal["auto", "gp", "tpe", "cmaes", "random"] = "auto"
    """Search algorithm. `auto` is `gp` (a Gaussian process) for a few knobs, else `tpe` (Parzen estimators). `cmaes` needs the
    package of that name and objective `time`."""
    priors: bool = False
    """Start `gp` and `tpe` with simulated settings beside the measured trials. They are no trials: nothing reports them. Off,
    because they showed no certain gain on a recorded landscape. Used with `objective: time`, and by `batch` and `throughput`
    for the chosen size."""
    moves: bool = True
    """Change the fastest plan itself, too: drop, add or exchange recomputations and offloads, fill the budget, move updates.
    Each change is measured like any plan. Used with `objective: time`, and by `batch` and `throughput` for the chosen size."""
    patience: int = Field(40, ge=1)
    """Number of measured plans without a new leader after which the search ends; a resumed study counts from zero."""

    @property
    def ref(self) -> WorkloadRef:
        """Workload as plan files name it."""
        return WorkloadRef(self.workload, dict(self.arguments))

    @property
    def parsed_budget(self) -> Budget:
        """Budget as a value."""
        return Budget.parse(self.budget)

    @property
    def time_seconds(self) -> float:
        """Time limit in seconds."""
        return parse_seconds(self.time)

    @property
    def limit_bytes(self) -> int | None:
        """Enforced memory limit in bytes; None for none."""
        return None if self.limit is None else parse_bytes(self.limit)

    def captured(self, plan: Plan) -> Plan:
        """Return a plan with what holds for all plans of the study: kernels, memory format, rebuild price and threads."""
        return plan.captured_as(self)

    @model_validator(mode="before")
    @classmethod
    def _choose_budget(cls, data: Any) -> Any:
        is_open = isinstance(data, Mapping) and data.get("objective") == "pareto" and data.get("budget") is None
        return {**data, "budget": FRONT_BUDGET} if is_open else data

    @field_validator("tracking_uri", "optuna_storage")
    @classmethod
    def _refuse_password(cls, uri: str | None, info: ValidationInfo) -> str | None:
        if uri is not None:
            try:
                check_address(uri)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        if uri is not None and has_secret(uri):
            remedy = "set PGPASSWORD"
            if info.field_name == "tracking_uri":
                remedy += " or MLFLOW_TRACKING_PASSWORD, or set the whole address as MLFLOW_TRACKING_URI"
            raise ValueError(f"contains a password, and configs are logged; leave it out and {remedy}")
        return uri

    @field_validator("kernels", mode="before")
    @classmethod
    def _accept_default_name(cls, kernels: object) -> object:
        if kernels not in ("", "aten", "inductor", "any"):  # the type's own error would show '' in place of aten
            raise ValueError(f"input should be 'aten', 'inductor' or 'any' (got {kernels!r})")
        return "" if kernels == "aten" else kernels

    @field_validator("exact")
    @classmethod
    def _refuse_other_bits(cls, exact: bool, info: ValidationInfo) -> bool:
        for name in ("kernels", "memory_format", "threads"):
            if exact and info.data.get(name):
                raise ValueError(
                    f"eager's bits need eager's own {name.replace('_', ' ')}, but {name} is {info.data[name]}; leave one of both out"
                )
        return exact

    @field_validator("loop")
    @classmethod
    def _check_loop(cls, text: str) -> str:
        try:
            return str(Loop.parse(text))
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("budget", "time", "limit", mode="before")
    @classmethod
    def _check_unit(cls, value: object, info: ValidationInfo) -> object:
        parse = {"budget": Budget.parse, "time": parse_seconds, "limit": parse_bytes}[str(info.field_name)]
        if value is None:  # the type of the field decides whether it may be empty
            return value
        try:
            parse(str(value))
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if info.field_name == "time" and parse_seconds(str(value)) <= 0:
            raise ValueError(f"{value} leaves no time for a trial; write 90s, 10m or 1.5h")
        return value


def load_config(
    target: str | Config | Callable[..., Any],
    *,
    overrides: Mapping[str, object] | None = None,
    arguments: Mapping[str, str] | None = None,
    from_command_line: bool = False,
) -> Config:
    """Return the config in `target`: a `.yaml` file, a workload reference, a factory function, or a config to copy.

    Args:
        target: path of a YAML file, the `workload` of a config with defaults, a factory of a module or file, or a config.
        overrides: fields that replace the file's; None means not set. Entries of `stores` and `planners` are merged.
        arguments: the factory's arguments as typed on a command line: `8`, `1e-3`, `true`.
        from_command_line: True if messages name an override by its option, `--budget`, instead of its argument, `budget`.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; the message names the line or the option.

    >>> load_config("resnet18", overrides={"budget": "50%"}).budget
    '50%'
    """
    if isinstance(target, Config):
        # the default of a field that is not set may depend on the overrides
        document = yamlfile.Document("config", target.model_dump(mode="json", exclude_unset=True))
    elif callable(target):
        reference = name_factory(target)
        document = yamlfile.Document(reference, {"workload": reference})
    elif Path(target).suffix in (".yaml", ".yml"):
        document = yamlfile.read(Path(target))
    else:
        document = yamlfile.Document(target, {"workload": target})
    data = dict(document.data)
    options = {key: value for key, value in (overrides or {}).items() if value is not None}
    if arguments:
        options["arguments"] = {key: yamlfile.scalar(text, f"--set {key}") for key, text in arguments.items()}
    for key, value in options.items():
        base = data.get(key)
        data[key] = {**base, **value} if isinstance(base, dict) and isinstance(value, Mapping) else value
    return validate_section(Config, data, document, options, from_command_line=from_command_line)


def validate_section(
    kind: type[S],
    data: Mapping[str, Any],
    document: yamlfile.Document,
    options: Mapping[str, object] | None = None,
    *,
    from_command_line: bool = False,
) -> S:
    """Return the section that `data` describes.

    Raises ConfigError for the first error, with its line in the document, its option or its argument.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # a misspelt `wrokload` is a better message than the missing one
        first = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
        path = tuple(part for part in first["loc"] if part != "[key]")
        place = document.where(path)
        if path and _has_option(options or {}, path):
            place = _option_name(str(path[0])) if from_command_line else str(path[0])
        raise ConfigError(_describe_error(first, kind, document, place)) from None


def dump_config(config: Config) -> str:
    """Return the config as YAML that `load_config` reads back equal."""
    return yamlfile.text(config.model_dump(mode="json"))


def _option_name(key: str) -> str:
    return {"stores": "--store", "arguments": "--set"}.get(key, f"--{key}".replace("_", "-"))


def _describe_error(error: ErrorDetails, kind: type[Section], document: yamlfile.Document, place: str) -> str:
    """Return an error with its place: a line, an option or an argument."""
    path = tuple(part for part in error["loc"] if part != "[key]")
    if not path:  # a rule between several keys
        return f"{document.name}: {error['ctx']['error']}"
    key, enclosing = path[-1], [part for part in path[:-1] if isinstance(part, str)]
    section = f" in {enclosing[-1]}" if enclosing else ""
    match error["type"]:
        case "extra_forbidden":
            return f"{place}: unknown key {key!r}{section}{nearest(str(key), _fields(kind, path[:-1]))}"
        case "literal_error" if "[key]" in error["loc"]:
            return f"{place}: unknown key {key!r}{section}{nearest(str(key), typing.get_args(StoreName))}"
        case "missing" if key == "workload":
            return f"{place}: no {key}{section}; write a zoo name, package.module:factory or path/file.py:factory"
        case "missing":
            return f"{place}: no {key}{section}"
        case "value_error":
            reason = str(error["ctx"]["error"])
        case _:
            reason = f"{error['msg'][:1].lower()}{error['msg'][1:]} (got {error['input']!r})"
    name = ".".join(map(str, path))
    return f"{place}: {reason}" if place in (name, f"--{name}") else f"{place}: {name}: {reason}"


def _has_option(options: object, path: yamlfile.KeyPath) -> bool:
    """Return whether the value at `path` comes from an option rather than from the file."""
    if not path or not isinstance(options, Mapping):
        return not isinstance(options, Mapping)
    return path[0] in options and (len(path) == 1 or _has_option(options[path[0]], path[1:]))


def _fields(kind: type[BaseModel], path: yamlfile.KeyPath) -> list[str]:
    """Return the keys of the section at `path`, through lists and mappings of sections."""
    place: typing.Any = kind
    for part in path:
        # the items of a list or of a mapping stand for each of its keys
        place = typing.get_args(place)[-1] if typing.get_args(place) else place.model_fields[part].annotation
    return list(place.model_fields)
