"""The commands of `autotune device`: names, options and help."""
# ruff: noqa: ARG001 - `-v` is read by `main`, which needs it even where a command's own options are wrong

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import DeviceOption, Json, Stores, Verbose, parse_pairs

devices = typer.Typer()


@devices.command("probe", short_help="Write a profile of this device.")
def probe(
    *,
    store: Stores = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="File for the profile; under runs/devices/ by default."),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure this device: its matmul rate, its copy and store bandwidth, and the noise of its timings."""
    from autotune.cli.commands.device import probe as run

    run(device or "cpu", parse_pairs(store, "--store"), out, json=json)


@devices.command("diff", short_help="Compare two device profiles.")
def diff(
    first: Annotated[Path, typer.Argument(help="Profile of the device on which plans were made.")],
    second: Annotated[Path, typer.Argument(help="Profile of the other device.")],
    *,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare two device profiles, and explain what each difference means for plans made on the first."""
    from autotune.cli.commands.device import diff as run

    run(first, second, json=json)
