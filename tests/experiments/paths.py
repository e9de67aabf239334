"""Folders of the experiments, of which tests read the committed results."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
CLAIMS = EXPERIMENTS / "claims"
BENCHMARKS = EXPERIMENTS / "benchmarks"
