"""Settings outside of a plan that decide how fast its step runs: threads, their waiting, and the usable CPUs."""

import os
from collections.abc import Mapping

PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_CPU_")
"""Prefixes of the environment variables that choose threads or kernels."""
NOT_SET = "not set"
AFFINITY = "CPU affinity"
"""Name of the setting with the numbers of the usable CPUs."""


def speed_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that choose threads or kernels, by name.

    >>> speed_variables({"OMP_NUM_THREADS": "4", "HOME": "/root"})
    {'OMP_NUM_THREADS': '4'}
    """
    return {name: environ[name] for name in sorted(environ) if name.startswith(PREFIXES)}


def read_speed_environment(threads: int, interop_threads: int) -> dict[str, str]:
    """Return this process's thread variables, CPU affinity and torch thread counts, which the caller reads from torch."""
    return {
        **speed_variables(),
        "torch threads": str(threads),
        "torch interop threads": str(interop_threads),
        AFFINITY: format_cpus(os.sched_getaffinity(0)),
    }


def advise_passive_waiting(environ: Mapping[str, str] = os.environ) -> str:
    """Return how to run beside other work; empty where the variable is set.

    Beside one busy process a step with spinning threads took up to 20 times as long.

    >>> advise_passive_waiting({"OMP_WAIT_POLICY": "PASSIVE"})
    ''
    """
    if "OMP_WAIT_POLICY" in environ:
        return ""
    return "OMP_WAIT_POLICY=PASSIVE stops torch's idle threads from spinning"


def list_changes(recorded: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Return each setting whose value differs, as text; none where a record of an earlier version holds no settings.

    >>> list_changes({"torch threads": "4"}, {"torch threads": "2", "OMP_WAIT_POLICY": "PASSIVE"})
    ['torch threads: recorded 4, now 2', 'OMP_WAIT_POLICY: recorded not set, now PASSIVE']
    """
    if not recorded or not present:
        return []
    return [
        f"{name}: recorded {recorded.get(name, NOT_SET)}, now {present.get(name, NOT_SET)}"
        for name in {**recorded, **present}
        if recorded.get(name) != present.get(name)
    ]


def format_cpus(cpus: set[int]) -> str:
    """Return numbers of CPUs as ranges.

    >>> format_cpus({0, 1, 2, 5})
    '0-2,5'
    """
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1] = [ranges[-1][0], cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, ends)) for ends in ranges)
