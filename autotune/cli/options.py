"""Command-line options that several commands share, and parsers for their values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.errors import ConfigError

if TYPE_CHECKING:
    from autotune.records.config import Config

Target = Annotated[
    str,
    typer.Argument(help="Config file, zoo name, package.module:factory or file.py:factory."),
]
PlanPath = Annotated[Path, typer.Argument(help="Plan file.")]
OptionalRun = Annotated[Path | None, typer.Argument(help="Run directory under runs/; the latest by default.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help="Upper limit of the charged bytes: a share of eager's peak (65%) or bytes of the step (step:512MiB), both with a tolerance of 0.5 %, or bytes of the process (512MiB, 6GiB, 123456B; no tolerance). By default the config's, else 65%, or 110% for --objective pareto. In plan and with --dry-run a percentage is of the captured step's predicted peak, but with --objective batch or throughput of eager's estimated peak.",
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Argument of the workload's factory; repeatable.")
]
Stores = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        metavar="NAME=DIR",
        help="Directory for offloaded bytes: ssd=DIR, ramdisk=DIR, or host=DIR on a GPU; repeatable.",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="Device that runs the step; cpu by default.")
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="BYTES",
        help="Hard memory limit on every process that runs the step, the baseline's included: 900MiB.",
    ),
]
PlanLimit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="BYTES",
        help="Hard memory limit on the process that captures the step and profiles its ops: 900MiB.",
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="TIME",
        help="Time limit: 90s, 10m, 1h; by default the config's, else 10m. No trial begins after it; capture, baseline and the running trial end first.",
    ),
]
Trials = Annotated[
    int | None, typer.Option("--trials", min=1, help="Maximum number of trials, baseline and repeats included.")
]
MemoryFormat = Annotated[
    str | None,
    typer.Option(
        "--memory-format",
        metavar="channels_last",
        help="Memory format in which plans run convolutions; the model's own by default.",
    ),
]
LoopOption = Annotated[
    str | None,
    typer.Option(
        "--loop",
        metavar="WORDS",
        help="What the training loop does before the update: clip, scaler, accumulate=4, comma-separated; or gradients, to plan no update.",
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="aten|inductor|any",
        help="Kernels of the plans: aten, as in eager (default); inductor, compiled regions; any, the fastest by measurement.",
    ),
]
PlanKernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="aten|inductor",
        help="Kernels of the plan: eager's (default) or compiled regions.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="Number of torch's threads during a step, for plans on a CPU; the process's own by default.",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact",
        help="Accept eager's bits only: refuse other kernels, memory format or threads, and a captured step that differs by rounding.",
    ),
]
Objective = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="time|pareto|throughput|batch",
        help="Objective: the fastest plan within the budget, a Pareto front of plans for all budgets up to --budget, most samples per second, or the largest batch that fits; by default the config's, else time.",
    ),
]
PlanObjective = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="time|batch",
        help="batch: first choose the largest batch size that fits by estimate; time by default.",
    ),
]
BatchArgumentOption = Annotated[
    str | None,
    typer.Option(
        "--batch-argument",
        metavar="NAME",
        help="Argument of the factory that sets the batch size; by default the first usual name that it takes, such as batch or batch_size.",
    ),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        "--micro-batches",
        metavar="auto|never|always",
        help="Micro-batching for --objective throughput: auto tries it unless the step has batch norm. Other objectives ignore it.",
    ),
]
RunName = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the run's directory under runs/; date and workload by default. An existing run of that name is continued.",
    ),
]
SeedFrom = Annotated[
    str | None,
    typer.Option(
        "--seed-from",
        metavar="RUN|PLAN",
        help="Run directory or plan file. Its fastest settings are measured after the smallest plan. The samplers gp and tpe also read its trials, except moves; pareto does not.",
    ),
]
Samplers = Annotated[
    list[str] | None,
    typer.Option(
        "--sampler",
        metavar="NAME",
        help="auto, cmaes, gp, random or tpe, or planners for the planners' own plans without a search; repeatable; auto and "
        "random by default.",
    ),
]
ReplayPriors = Annotated[
    bool,
    typer.Option(
        "--priors/--no-priors", help="Start gp and tpe with simulated settings, as tune does with `priors: true`."
    ),
]
SearchAlone = Annotated[
    bool, typer.Option("--search-alone", help="Leave out the planners' own plans, with which a search begins.")
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        metavar="URI",
        help="MLflow tracking server or database: http://server:5000, postgresql://user@server/name.",
    ),
]
FleetFile = Annotated[
    str | None,
    typer.Option("--fleet", metavar="FILE", help="File of a fleet's classes of devices; $AUTOTUNE_FLEET by default."),
]
OnClass = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLASS",
        help="Class of the fleet's devices that measures. Without --on and --fleet: this machine. doctor --fleet checks all classes; resume keeps the run's class.",
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        metavar="N",
        help="Number of devices of the class that measure trials of the search at the same time; 1 by default.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]


def parse_pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """Return the values of a repeatable KEY=VALUE option by key; ConfigError where one is malformed."""
    pairs = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            example = "ssd=/mnt/disk" if option == "--store" else "batch=8"
            raise ConfigError(f"{option} {text!r} is not NAME=VALUE; write {option} {example}")
        pairs[key] = value
    return pairs


def load_overridden_config(
    target: str, fields: Mapping[str, object], arguments: list[str] | None, stores: list[str] | None
) -> "Config":
    """Return the config of a file or a workload reference, with the command line's options laid over it."""
    from autotune.records.config import load_config  # pydantic takes long to import, `autotune --help` must not

    overrides = {**fields, **({"stores": parse_pairs(stores, "--store")} if stores else {})}
    return load_config(target, overrides=overrides, arguments=parse_pairs(arguments, "--set"), from_command_line=True)
