"""What `autotune dashboard` tells the app, as arguments of its script."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Asked:
    """Where to look, and which servers run beside."""

    runs: Path
    experiments: Path | None = None
    """Folder of the experiments of published claims; an installed package has none."""
    mlflow: str = ""
    """Address of MLflow's pages; empty where there are none."""
    optuna: str = ""
    """Of optuna-dashboard."""


def asked(arguments: Sequence[str] | None = None) -> Asked:
    """Read the script's own arguments, those that Streamlit leaves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--experiments", type=Path)
    parser.add_argument("--mlflow", default="")
    parser.add_argument("--optuna", default="")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    return Asked(given.runs, given.experiments, given.mlflow, given.optuna)
