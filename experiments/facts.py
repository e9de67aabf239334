"""Where a figure comes from, and how sure a median is: shared by benchmarks."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json

HERE = Path(__file__).parent


def facts() -> dict[str, Any]:
    """Machine, commit, date and command of this run, and the load before it."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    script = Path(sys.argv[0]).resolve().relative_to(HERE.parent)
    return {
        "machine": to_json(this_device("cpu")) | {"processors": os.cpu_count()},
        "commit": found.stdout.strip() or "unknown",
        "date": date.today().isoformat(),
        "command": " ".join(["python", str(script), *sys.argv[1:]]),
        "load_before": os.getloadavg()[0],
    }


def origin(document: dict[str, Any]) -> str:
    """The facts as one sentence."""
    machine, command = document["machine"]["silicon"], document["command"]
    return (
        f"{machine}, commit {document['commit']}, {document['date']}, load {document['load_before']:.2f}: `{command}`."
    )


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Narrowest order statistics that hold the median with this confidence, whatever the distribution.

    None where there are too few values: below six none do with 95 %.
    """
    ordered, count = sorted(values), len(values)
    for rank in range(count // 2, 0, -1):
        outside = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
        if 1 - outside >= level:
            return ordered[rank - 1], ordered[count - rank]
    return None
