"""Origin of a benchmark's figures, and a median with its interval as text."""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.records.json_codec import to_json
from autotune.study.verdicts.statistics import Interval
from experiments.common.repository import name_commit

ROOT = Path(__file__).parents[2]
SAME_MACHINE = ("kind", "silicon", "cores", "torch", "processors")
"""Facts of a machine that change times. A record of the device alone has no `processors`."""
MEMORY_TOLERANCE = 0.01
"""Relative difference of the memory of one machine: its kernel reserves another amount at each start."""


def collect_facts() -> dict[str, Any]:
    """Return machine, commit, date and command of this run, and the load average before it.

    A commit whose code was changed since ends with `+changes`.
    """
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    module = ".".join(part for part in script.parts if part != "__main__")
    return {
        "machine": to_json(this_device("cpu")) | {"processors": os.cpu_count()},
        "commit": name_commit(ROOT),
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", module, *list_arguments()]),
        "load_before": os.getloadavg()[0],
    }


def list_arguments(arguments: Sequence[str] | None = None) -> list[str]:
    """Return this command's arguments as results name them: without the places of one machine.

    A path below the repository becomes relative to it; any other absolute path becomes `DIR`.

    >>> list_arguments(["--ssd", "/mnt/disk", f"--out={ROOT / 'runs'}", "--models", "gpt2"])
    ['--ssd', 'DIR', '--out=runs', '--models', 'gpt2']
    """
    return [_without_place(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]


def _without_place(argument: str) -> str:
    name, equals, place = ("", "", argument) if argument.startswith("/") else argument.rpartition("=")
    path = Path(place)
    if not path.is_absolute():
        return argument
    return f"{name}{equals}{path.relative_to(ROOT) if ROOT in path.parents else 'DIR'}"


def is_same_machine(stored: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return True if results of two recorded machines belong together.

    The release of the kernel and the exact size of the memory may differ, since a restart changes both.

    >>> machine = {"silicon": "a chip", "torch": "2.13.0", "memory_bytes": 25_276_502_016, "driver": "Linux 6.18.44"}
    >>> is_same_machine(machine, machine | {"memory_bytes": 25_276_514_304, "driver": "Linux 6.18.45"})
    True
    >>> is_same_machine(machine, machine | {"torch": "2.14.0"})
    False
    """
    return all(stored.get(fact) == current.get(fact) for fact in SAME_MACHINE) and math.isclose(
        stored.get("memory_bytes", 0), current.get("memory_bytes", 0), rel_tol=MEMORY_TOLERANCE
    )


def format_origin(document: dict[str, Any]) -> str:
    """Format the facts as one sentence, and the other commits at which the results were continued as a second one."""
    machine, command, commit = document["machine"]["silicon"], document["command"], document["commit"]
    text = f"{machine}, commit {commit}, {document['date']}, load {document['load_before']:.2f}: `{command}`."
    others = dict.fromkeys(session["commit"] for session in document.get("continued", ()))
    others.pop(commit, None)
    return f"{text} Continued at commit {', '.join(others)}." if others else text


def format_interval(interval: Interval) -> str:
    """Format a ratio with its interval and the basis of that.

    >>> format_interval(Interval(1.01, 1.0, 1.02, samples=3))
    '1.010 (1.000 to 1.020; range of 3)'
    """
    basis = f"; {interval.basis}" if interval.basis else ""
    return f"{interval.middle:.3f} ({interval.low:.3f} to {interval.high:.3f}{basis})"


def judge_at_most(interval: Interval, limit: float) -> str:
    """Return whether a ratio is at most a limit: "kept" or "missed" where its whole interval says so, else "not decided".

    >>> [judge_at_most(Interval(1.0, 0.9, high, samples=8), 1.05) for high in (1.04, 1.1)]
    ['kept', 'not decided']
    """
    return "kept" if interval.high <= limit else "missed" if interval.low > limit else "not decided"
