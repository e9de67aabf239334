"""The commands of the command line: names, options and help; `autotune.cli.commands` does their work."""
# ruff: noqa: ARG001 - `-v` is read by `main`, which needs it even where a command's own options are wrong

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.device_commands import devices
from autotune.cli.options import (
    Arguments,
    BatchArgumentOption,
    BudgetOption,
    DeviceOption,
    Exact,
    FleetFile,
    Json,
    Kernels,
    Limit,
    LoopOption,
    MemoryFormat,
    MicroBatches,
    Objective,
    OnClass,
    OptionalRun,
    Parallel,
    PlanKernels,
    PlanLimit,
    PlanObjective,
    PlanPath,
    ReplayPriors,
    RunName,
    Samplers,
    SearchAlone,
    SeedFrom,
    Stores,
    Target,
    Threads,
    Time,
    TrackingUri,
    Trials,
    Verbose,
    load_overridden_config,
    parse_pairs,
)
from autotune.cli.view_commands import dashboard, reproduce

# each function imports its command when it runs: torch and pydantic take seconds, `autotune --help` must not

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(value: bool) -> None:
    if value:
        import autotune

        print(f"autotune {autotune.__version__}")
        raise typer.Exit


@app.callback()
def describe_package(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fit a training step into a memory budget at the least cost in time, by measuring, not guessing."""


@app.command(short_help="Check what this machine can measure.")
def doctor(
    *,
    store: Stores = None,
    fleet: FleetFile = None,
    on: OnClass = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check what this machine can measure, and how to fix what it cannot; with --fleet, one device of each class instead."""
    from autotune.cli.commands.doctor import run

    run(stores=parse_pairs(store, "--store"), fleet=fleet, on=on, json=json)


app.add_typer(
    devices, name="device", help="Profile this device, or compare two.", short_help="Profile or compare devices."
)


@app.command(short_help="Search for the fastest plan within the budget.")
def tune(
    workload: Target,
    *,
    budget: BudgetOption = None,
    set_: Arguments = None,
    store: Stores = None,
    device: DeviceOption = None,
    limit: Limit = None,
    time: Time = None,
    trials: Trials = None,
    objective: Objective = None,
    batch_argument: BatchArgumentOption = None,
    micro_batches: MicroBatches = None,
    loop: LoopOption = None,
    memory_format: MemoryFormat = None,
    kernels: Kernels = None,
    threads: Threads = None,
    exact: Exact = None,
    seed_from: SeedFrom = None,
    tracking_uri: TrackingUri = None,
    fleet: FleetFile = None,
    on: OnClass = None,
    parallel: Parallel = None,
    name: RunName = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only predict the Pareto front, the number of trials and the time; for the objectives batch and throughput, the largest batch sizes.",
        ),
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Search for the fastest plan within the budget; every number is measured. Ctrl-C ends the search and keeps all results."""
    fields = {
        "budget": budget, "device": device, "limit": limit, "time": time, "trials": trials, "objective": objective,
        "batch_argument": batch_argument, "micro_batches": micro_batches, "loop": loop,
        "memory_format": memory_format, "kernels": kernels, "threads": threads, "exact": exact, "seed_from": seed_from,
        "tracking_uri": tracking_uri, "fleet": fleet, "on": on, "parallel": parallel,
    }  # fmt: skip
    config = load_overridden_config(workload, fields, set_, store)
    if dry_run:
        from autotune.cli.commands.dry_run import run as predict

        without_effect = {"--name": name, "--seed-from": seed_from, "--parallel": parallel}
        predict(config, json=json, without_effect=[option for option, value in without_effect.items() if value])
        return
    from autotune.cli.commands.tune import run

    run(config, name=name, json=json)


@app.command(short_help="Continue an interrupted run.")
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory under runs/.")],
    *,
    time: Time = None,
    trials: Trials = None,
    tracking_uri: TrackingUri = None,
    fleet: FleetFile = None,
    on: OnClass = None,
    parallel: Parallel = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue an interrupted run. --trials counts those of the whole run; --time starts from zero."""
    from autotune.cli.commands.tune import resume as continue_run

    limits = {
        "time": time, "trials": trials, "tracking_uri": tracking_uri, "fleet": fleet, "on": on, "parallel": parallel,
    }  # fmt: skip
    continue_run(run, limits, json=json)


@app.command(short_help="Test samplers on a recorded run, without a device.")
def replay(
    run: Annotated[
        Path,
        typer.Argument(help="Run directory under runs/, or a landscape file: the recorded measurements of a study."),
    ],
    *,
    sampler: Samplers = None,
    priors: ReplayPriors = True,
    search_alone: SearchAlone = False,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of measured trials in each search.")] = 25,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of searches by each sampler, each from another seed.")
    ] = 5,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Test samplers on the trials of a recorded run: how close each comes to the best plan, and how many trials fail."""
    from autotune.cli.commands.replay import run as replay_samplers

    starts = {"priors": priors, "planners": not search_alone}
    replay_samplers(run, sampler or [], trials=trials, seeds=seeds, starts=starts, json=json)


@app.command(short_help="Make a plan from estimates alone.")
def plan(
    workload: Target,
    *,
    budget: BudgetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="File for the plan; required unless --json is set."),
    ] = None,
    set_: Arguments = None,
    store: Stores = None,
    device: DeviceOption = None,
    limit: PlanLimit = None,
    objective: PlanObjective = None,
    batch_argument: BatchArgumentOption = None,
    loop: LoopOption = None,
    memory_format: MemoryFormat = None,
    kernels: PlanKernels = None,
    threads: Threads = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make one plan from estimates alone, without training. A budget in percent is a share of the captured step's predicted peak."""
    from autotune.cli.commands.plan import run

    fields = {
        "budget": budget, "device": device, "limit": limit, "objective": objective, "batch_argument": batch_argument,
        "loop": loop, "memory_format": memory_format, "kernels": kernels, "threads": threads,
    }  # fmt: skip
    run(load_overridden_config(workload, fields, set_, store), out=out, json=json)


@app.command(short_help="Measure a plan interleaved with the baseline.")
def measure(
    plan: PlanPath,
    *,
    set_: Arguments = None,
    store: Stores = None,
    limit: Limit = None,
    allow_reference: Annotated[
        bool,
        typer.Option(
            "--allow-reference",
            help="Run the workload that the plan names even where it lies outside of this directory.",
        ),
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure a plan on this machine, interleaved with the baseline: results, bytes and seconds.

    This runs the code that the plan file names.
    """
    from autotune.cli.commands.measure import run

    run(
        plan,
        parse_pairs(set_, "--set"),
        parse_pairs(store, "--store"),
        limit,
        allow_reference=allow_reference,
        json=json,
    )


@app.command(short_help="Verify and improve champions, and detect regressions.")
def nightly(
    config: Annotated[Path, typer.Argument(help="File of entries, such as configs/nightly.yaml.")],
    *,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Run only the entries that the last night did not reach, and begin no new night."
        ),
    ] = False,
    fleet: FleetFile = None,
    on: OnClass = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="ENTRY", help="Run one entry: its name, with @CLASS on a fleet.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Verify every entry's champion against plain eager, search for a better plan, and report regressions with their causes."""
    from autotune.cli.commands.nightly import run

    run(config, resume=resume, fleet=fleet, on=on, only=only, json=json)


@app.command(short_help="Serve this machine's device to a study elsewhere.")
def serve(*, verbose: Verbose = False) -> None:
    """Serve this machine's device on standard input and output, for a study that starts this command by ssh or a job system."""
    from autotune.fleet.far_end.serve import serve as answer_requests
    from autotune.fleet.local import open_device

    raise typer.Exit(answer_requests(open_device))


@app.command(short_help="Regenerate the report of a run.")
def report(
    run: OptionalRun = None,
    *,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Directory for the report's pictures as SVG.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Also log the records that MLflow lacks.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Regenerate the report of a run from its records."""
    from autotune.cli.commands.report import run as write

    write(run, pictures=pictures, log=log, json=json)


@app.command(short_help="Lay buffers out in as few bytes as possible.")
def layout(
    file: Annotated[
        Path, typer.Argument(help="CSV of id,lower,upper,size, as minimalloc reads it; or a plan of a run.")
    ],
    *,
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity", metavar="BYTES", help="Stop at a layout of at most this size; exit code 4 if none is found."
        ),
    ] = None,
    alignment: Annotated[
        int,
        typer.Option("--alignment", min=1, help="Alignment of every offset, for a CSV; sizes are rounded up to it."),
    ] = 1,
    effort: Annotated[int, typer.Option("--effort", min=1, help="Approximate maximum search time, in seconds.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="File for the layout: a CSV of the buffers with their offsets."
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Lay buffers of known size and lifetime out in one block, as small as possible or within a capacity."""
    from autotune.cli.commands.layout import run

    run(file, capacity=capacity, alignment=alignment, effort=effort, out=out, json=json)


@app.command(short_help="Describe the decisions of a plan.")
def show(
    plan: PlanPath,
    *,
    table: Annotated[bool, typer.Option("--table", help="Also list the live tensors of each op.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Describe the decisions of a plan, its estimate and its measurement."""
    from autotune.cli.commands.show import run

    run(plan, json=json, table=table)


@app.command(short_help="Write a step as a trace for Perfetto.")
def trace(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN|PLAN]", help="Run directory, or plan file of a run; the latest run by default."),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File for the trace; by default trace.json in the run's directory, or PLAN.trace.json beside a plan file.",
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the simulated step of a plan beside the traced step, as a Chrome trace: ops, transfers, and memory by use.

    Open the file at https://ui.perfetto.dev or in chrome://tracing.
    """
    from autotune.cli.commands.trace import run

    run(source, out=out, json=json)


app.command(short_help="Reproduce published claims beside our results.")(reproduce)
app.command(short_help="Show runs, plans and nights in a browser.")(dashboard)
