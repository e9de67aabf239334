"""Run this checkout in a child process of a test."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ONE_ROUND = {
    ("autotune.study.verdicts.confirm", "MIN_ROUNDS"): 1,
    ("autotune.study.verdicts.confirm", "MAX_ROUNDS"): 1,
    ("autotune.study.verdicts.front", "MIN_ROUNDS"): 1,
    ("autotune.study.verdicts.front", "MAX_ROUNDS"): 1,
    ("autotune.study.runner", "MAX_REPEATS"): 0,
}
"""Constants of a study that measures each plan once and re-measures it once.

Beside another test every measurement is disturbed. Repeats, and rounds until a comparison is conclusive, would take all of
`--time`, however short the rest of a study is.
"""
BRIEF = "\n".join(
    (
        "import importlib",
        f"for (module, constant), value in {ONE_ROUND}.items():",
        "    setattr(importlib.import_module(module), constant, value)",
        "from autotune.cli.main import main",
        "main()",
    )
)
"""The command line with the constants of `ONE_ROUND`."""
SIMULATED = "\n".join(
    (
        "import autotune.measure.harness, tests.support.simulated as simulated",
        "autotune.measure.harness.Harness = simulated.SimulatedHarness",
        BRIEF,
    )
)
"""`BRIEF` with simulated measurements."""


def environment() -> dict[str, str]:
    """Return the environment of a command that runs this checkout from any directory, on its own records."""
    own = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def run_python(
    *arguments: str | Path, here: Path | None = None, seconds: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """Run Python on this checkout in a process of its own; the caller checks how it ended."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=here, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )
