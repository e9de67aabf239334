"""Origin of a benchmark's figures, and the exact confidence interval of a median."""

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json
from autotune.study.verdicts.statistics import median_interval

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


def exact_median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return the narrowest order statistics that contain the median with this confidence.

    The interval holds for every distribution. None: too few values; a level of 95 % needs six.
    """
    interval = median_interval(values, level) if values else None
    return None if interval is None or interval.confidence is None else (interval.low, interval.high)
