"""Origin of a benchmark's figures, and a median with its interval as text."""

import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json
from autotune.study.verdicts.statistics import Interval

ROOT = Path(__file__).parents[2]


def collect_facts() -> dict[str, Any]:
    """Return machine, commit, date and command of this run, and the load average before it."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    module = ".".join(part for part in script.parts if part != "__main__")
    return {
        "machine": to_json(this_device("cpu")) | {"processors": os.cpu_count()},
        "commit": revision.stdout.strip() or "unknown",
        "date": date.today().isoformat(),
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "load_before": os.getloadavg()[0],
    }


def format_origin(document: dict[str, Any]) -> str:
    """Format the facts as one sentence."""
    machine, command = document["machine"]["silicon"], document["command"]
    return (
        f"{machine}, commit {document['commit']}, {document['date']}, load {document['load_before']:.2f}: `{command}`."
    )


def format_interval(interval: Interval) -> str:
    """Format a ratio with its interval and the basis of that.

    >>> format_interval(Interval(1.01, 1.0, 1.02, samples=3))
    '1.010 (1.000 to 1.020; range of 3)'
    """
    return f"{interval.middle:.3f} ({interval.low:.3f} to {interval.high:.3f}; {interval.basis})"
