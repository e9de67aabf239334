"""Lay out the buffers of a file: a CSV, or a plan in its run directory."""

import time
from dataclasses import dataclass
from pathlib import Path

from autotune.layout import Buffers, Layout, check_layout, lay_out
from autotune.layout import csv_file as csvfile
from autotune.predict.plan_layout import plan_buffers, to_buffers
from autotune.records import plan_file as planfile
from autotune.records.plan_file import read_records

WORK_PER_SECOND = 500_000_000
"""Steps of the layout search per second, of which four searches share two threads."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of the buffers of one file."""

    names: tuple[str, ...]
    """Name of each buffer, in the order of the file."""
    buffers: Buffers
    layout: Layout
    seconds: float
    """Duration of the search."""

    @property
    def lower_bound_bytes(self) -> int:
        """Proved lower bound on the size of every layout of these buffers."""
        return max(self.layout.bound, self.layout.max_live)

    def write(self, path: Path) -> None:
        """Write the buffers with their offsets as a CSV."""
        csvfile.write(path, self.names, self.buffers, self.layout)


def lay_out_file(path: Path, capacity_bytes: int | None, *, alignment: int, effort: int) -> FileLayout:
    """Lay out the buffers of a CSV, or of a plan with its graph and costs beside it, and check the layout.

    Args:
        path: CSV, or a plan file with the suffix `.json`.
        capacity_bytes: Size at which the search may stop; None for the smallest size.
        alignment: Multiple of bytes for the offsets of a CSV's buffers.
        effort: Duration of the search, in seconds of a usual core.
    """
    names, buffers = _read_plan(path) if path.suffix == ".json" else csvfile.read(path, alignment=alignment)
    start = time.perf_counter()
    layout = lay_out(buffers, capacity_bytes, work=effort * WORK_PER_SECOND)
    seconds = time.perf_counter() - start
    check_layout(buffers, layout)
    return FileLayout(tuple(names), buffers, layout, seconds)


def _read_plan(path: Path) -> tuple[tuple[str, ...], Buffers]:
    """Return the names and buffers of a plan in its run directory."""
    file = planfile.read(path)
    graph, costs = read_records(path, file)
    tenants = plan_buffers(graph, file.plan, costs)
    return tuple(f"{number}:{tenant.name}" for number, tenant in enumerate(tenants)), to_buffers(tenants)
