"""The command line: options, and one line for everything that goes wrong."""
# ruff: noqa: ARG001 - `-v` is read by `main`, which must know it before a command's own options are understood

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.errors import AutotuneError, ConfigError

# what a command needs is imported when it runs: torch and its like take seconds, `autotune --help` must not

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Target = Annotated[
    str,
    typer.Argument(help="A config file, a zoo name, package.module:factory or file.py:factory."),
]
PlanPath = Annotated[Path, typer.Argument(help="A plan file.")]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", "-b", help="65% of the baseline's step bytes, or the whole process: 512MiB, 6GiB, 123456B."
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of the factory; repeatable.")
]
Stores = Annotated[
    list[str] | None,
    typer.Option("--store", metavar="NAME=DIR", help="Where offloaded bytes may go: ssd=DIR, ramdisk=DIR; repeatable."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="Where the step runs; cpu by default.")
]
Limit = Annotated[
    str | None,
    typer.Option("--limit", metavar="BYTES", help="Enforce a memory limit on every process that runs the step."),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="TIME",
        help="How long it may take: 90s, 10m, 1h. The baseline, two plans and a confirmation are measured in any case.",
    ),
]
Trials = Annotated[int | None, typer.Option("--trials", min=1, help="How many trials it may take.")]
MemoryFormat = Annotated[
    str | None,
    typer.Option("--memory-format", metavar="channels_last", help="Run plans of a convolution net with channels last."),
]
Objective = Annotated[str | None, typer.Option("--objective", metavar="time|pareto", help="What the search lowers.")]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of the run's directory under runs/; the time by default.")
]
SeedFrom = Annotated[
    str | None,
    typer.Option(
        "--seed-from", metavar="RUN|PLAN", help="Measure the settings of a run or a plan of another device first."
    ),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri", metavar="URI", help="MLflow's: http://server:5000 or postgresql://user@server/name."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only tell what is predicted, how many trials it takes and how long.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]


@app.callback()
def about() -> None:
    """Fit a training step into a memory budget at the least cost in time, by measuring, not guessing."""


@app.command(short_help="Say what this machine can measure.")
def doctor(*, store: Stores = None, json: Json = False, verbose: Verbose = False) -> None:
    """Say what this machine can measure, and how to mend what it cannot."""
    from autotune.cli.commands.doctor import run

    run(stores=_pairs(store, "--store"), json=json)


devices = typer.Typer(no_args_is_help=True)
app.add_typer(
    devices, name="device", help="Measure this device, or compare two.", short_help="Measure or compare devices."
)


@devices.command("probe", short_help="Write a profile of this device.")
def probe(
    *,
    store: Stores = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write it; under runs/ by default.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure how fast this device multiplies, copies and reaches its stores, and how much the same work varies."""
    from autotune.cli.commands.device import probe as run

    run(device or "cpu", _pairs(store, "--store"), out, json=json)


@devices.command("diff", short_help="Say what differs between two profiles.")
def diff(
    first: Annotated[Path, typer.Argument(help="The profile of the device that plans were made on.")],
    second: Annotated[Path, typer.Argument(help="The other device's.")],
    *,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say what differs between two device profiles, and what that means for plans made on the first."""
    from autotune.cli.commands.device import diff as run

    run(first, second, json=json)


@app.command(short_help="Search for the fastest plan within the budget.")
def tune(
    workload: Target,
    *,
    budget: Budget = None,
    set_: Arguments = None,
    store: Stores = None,
    device: Device = None,
    limit: Limit = None,
    time: Time = None,
    trials: Trials = None,
    objective: Objective = None,
    memory_format: MemoryFormat = None,
    seed_from: SeedFrom = None,
    tracking_uri: TrackingUri = None,
    name: Name = None,
    dry_run: DryRun = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Search for the fastest plan within the budget, every number measured; Ctrl-C ends it early and keeps all."""

    given = {
        "budget": budget,
        "device": device,
        "limit": limit,
        "time": time,
        "trials": trials,
        "objective": objective,
        "memory_format": memory_format,
        "seed_from": seed_from,
        "tracking_uri": tracking_uri,
    }
    config = _config(workload, given, set_, store)
    if dry_run:
        from autotune.cli.commands.dry_run import run as foretell

        foretell(config, json=json)
        return
    from autotune.cli.commands.tune import run

    run(config, name=name, json=json)


@app.command(short_help="Go on with a run that was interrupted.")
def resume(
    run: Annotated[Path, typer.Argument(help="A directory under runs/.")],
    *,
    time: Time = None,
    trials: Trials = None,
    tracking_uri: TrackingUri = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Go on with a run that was interrupted, by whatever; --trials are those of the whole run, --time begins anew."""
    from autotune.cli.commands.tune import go_on

    go_on(run, {"time": time, "trials": trials, "tracking_uri": tracking_uri}, json=json)


@app.command(short_help="Try searches on a recorded run, without a device.")
def simulate(
    run: Annotated[Path, typer.Argument(help="A directory under runs/, or a landscape's file.")],
    *,
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            "--sampler", metavar="NAME", help="auto, gp, random or tpe; repeatable; auto and random by default."
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="How many measured trials a search has.")] = 25,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many searches of each sampler.")] = 5,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Try searches on what a run recorded: how near to its best plan they come, and how many trials they lose on the way."""
    from autotune.cli.commands.simulate import run as replay

    replay(run, sampler or [], trials=trials, seeds=seeds, json=json)


@app.command(short_help="Make a plan by estimate alone.")
def plan(
    workload: Target,
    *,
    budget: Budget = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write the plan.")] = None,
    set_: Arguments = None,
    store: Stores = None,
    device: Device = None,
    limit: Limit = None,
    memory_format: MemoryFormat = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make one plan for the budget by estimate alone; nothing is trained, percentages are of the simulated step."""
    from autotune.cli.commands.plan import run

    given = {"budget": budget, "device": device, "limit": limit, "memory_format": memory_format}
    run(_config(workload, given, set_, store), out=out, json=json)


@app.command(short_help="Run a plan and the baseline in turns.")
def measure(
    plan: PlanPath,
    *,
    set_: Arguments = None,
    store: Stores = None,
    limit: Limit = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a plan and the baseline on this machine, in turns, and tell what they took."""
    from autotune.cli.commands.measure import run

    run(plan, _pairs(set_, "--set"), _pairs(store, "--store"), limit, json=json)


@app.command(short_help="Verify and refine champions, and tell regressions.")
def nightly(
    config: Annotated[Path, typer.Argument(help="A file of entries, as configs/nightly.yaml.")],
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the entries that the last night left.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Verify every entry's champion beside plain eager, search around it, and tell what became worse, and why."""
    from autotune.cli.commands.nightly import run

    run(config, resume=resume, json=json)


@app.command(short_help="Write the report of a run anew.")
def report(
    run: Annotated[Path | None, typer.Argument(help="A directory under runs/; the latest.")] = None,
    *,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Also write its pictures there, as SVG.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Also log to MLflow what it lacks of the run.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the report of a run anew from its records."""
    from autotune.cli.commands.report import run as write

    write(run, pictures=pictures, log=log, json=json)


@app.command(short_help="Lay buffers out in as few bytes as possible.")
def layout(
    file: Annotated[Path, typer.Argument(help="A CSV of id,lower,upper,size, as minimalloc's; or a plan in its run.")],
    *,
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="BYTES", help="Be content with a layout of so many bytes.")
    ] = None,
    alignment: Annotated[int, typer.Option("--alignment", min=1, help="Of every offset, for a CSV.")] = 1,
    effort: Annotated[int, typer.Option("--effort", min=1, help="How long to search, in seconds at most, about.")] = 20,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write the CSV.")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Lay buffers of known size and life out in one block, in as few bytes as possible or within a capacity."""
    from autotune.cli.commands.layout import run

    run(file, capacity=capacity, alignment=alignment, effort=effort, out=out, json=json)


@app.command(short_help="Say in words what a plan decides.")
def show(
    plan: PlanPath,
    *,
    table: Annotated[bool, typer.Option("--table", help="Also what lives while each op runs.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say in words what a plan decides, what was predicted of it and what was seen."""
    from autotune.cli.commands.show import run

    run(plan, json=json, table=table)


@app.command(short_help="Run published claims anew, ours beside theirs.")
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments of claims; --list shows them.")] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="What was found last, nothing run.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Write it into the README beside experiments/.")] = False,
    experiments: Annotated[
        Path | None,
        typer.Option("--experiments", metavar="DIR", help="Where they are; by default in this checkout."),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run experiments of published claims, each in a process of its own, and print our numbers beside theirs."""
    from autotune.cli.commands.reproduce import run

    run(names or [], every=all_, listed=list_, table=table, root=experiments, json=json)


@app.command(short_help="Show runs, plans and nights in a browser.")
def dashboard(
    *,
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="Directory of the records; runs/ by default.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="P", min=1, max=65535, help="Of the dashboard; 8501, or a free one.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve the dashboard on this machine alone, MLflow's pages and optuna-dashboard beside it, until Ctrl-C."""
    from autotune.cli.commands.dashboard import run

    run(runs, port, browser=not no_open, json=json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every error becomes one line on standard error and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "-v" in given or "--verbose" in given
    try:
        code = app(given or ["--help"], standalone_mode=False)
        if code == 130:  # Ctrl-C, which typer turns into a code; commands raise
            code = _fail("interrupted", 130, verbose=False)
    except AutotuneError as error:
        code = _fail(f"{error}", error.exit_code, verbose)
    except BrokenPipeError:
        code = 1
    except Exception as error:  # noqa: BLE001 - the last line of defence: whatever else it is, it is ours
        if (said := getattr(error, "format_message", None)) is not None:
            code = _fail(f"{_lower(said())}; try autotune --help", 2, verbose=False)
        else:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            hint = "" if verbose else "; run again with -v for the traceback"
            code = _fail(f"a fault of autotune's own: {reason}{hint}", 1, verbose)
    sys.exit(code)


def _fail(message: str, code: int, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _config(target: str, fields: dict[str, Any], arguments: list[str] | None, stores: list[str] | None) -> Any:
    from autotune.records.config import load_config

    overrides = fields | ({"stores": _pairs(stores, "--store")} if stores else {})
    return load_config(target, overrides=overrides, arguments=_pairs(arguments, "--set"))


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            example = "ssd=/mnt/disk" if option == "--store" else "batch=8"
            raise ConfigError(f"{option} {text!r}: write {option} {example}")
        pairs[key] = value
    return pairs


def _lower(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")
