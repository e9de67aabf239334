"""Parse the arguments that `autotune dashboard` passes to the app's script."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AppArguments:
    """Directories to show, and addresses of the servers that run beside the app."""

    runs: Path
    experiments: Path | None = None
    """Folder of the experiments on published claims; None in an installed package."""
    mlflow: str = ""
    """Address of MLflow's pages; empty if the server does not run."""
    optuna: str = ""
    """Address of optuna-dashboard; empty if the server does not run."""


def parse_arguments(arguments: Sequence[str] | None = None) -> AppArguments:
    """Parse the script's own arguments, which Streamlit leaves in `sys.argv`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--experiments", type=Path)
    parser.add_argument("--mlflow", default="")
    parser.add_argument("--optuna", default="")
    parsed = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    return AppArguments(parsed.runs, parsed.experiments, parsed.mlflow, parsed.optuna)
