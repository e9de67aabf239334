"""Commands that show results: published claims beside ours, and the dashboard; `app` adds them to the command line."""
# ruff: noqa: ARG001 - `-v` is read by `main`, which needs it even where a command's own options are wrong

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json, Verbose

# each function imports its command when it runs: torch and pydantic take seconds, `autotune --help` must not


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of the experiments to run; --list shows them.")
    ] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Run all experiments.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the last results without running anything.")] = False,
    experiments: Annotated[
        Path | None,
        typer.Option(
            "--experiments",
            metavar="DIR",
            help="Directory of the experiments; experiments/claims of this checkout by default.",
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Reproduce published claims, each in its own process, and print our numbers beside the published ones."""
    from autotune.cli.commands.reproduce import run

    run(names or [], every=all_, listed=list_, root=experiments, json=json)


def dashboard(
    *,
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="Directory of the records; runs/ by default.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="P", min=1, max=65535, help="Port of the dashboard; 8501, or a free port."),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve the dashboard on this machine only, with the pages of MLflow and optuna-dashboard, until Ctrl-C."""
    from autotune.cli.commands.dashboard import run

    run(runs, port, browser=not no_open, json=json)
