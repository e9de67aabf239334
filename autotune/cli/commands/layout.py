"""`autotune layout`: buffers of a CSV, or of a plan, in as few bytes as possible."""

import time
from pathlib import Path

from autotune.cli.commands.session import answering, print_json
from autotune.cli.console import costs_beside, graph_beside
from autotune.errors import ConfigError, InfeasibleError
from autotune.layout import Buffers, Layout, check_layout, lay_out
from autotune.layout import csv_file as csvfile
from autotune.predict.plan_layout import buffers_of, tenants
from autotune.records import plan_file as planfile
from autotune.units import fmt_seconds, parse_bytes

WORK_PER_SECOND = 500_000_000
"""Of a search, of which four share two threads."""


def run(file: Path, *, capacity: str | None, alignment: int, effort: int, out: Path | None, json: bool) -> None:
    """Print what the layout takes, and write it where a file was named; InfeasibleError where none within the capacity
    was found."""
    room = None if capacity is None else int(capacity) if capacity.isdecimal() else parse_bytes(capacity)
    ids, buffers = _of_plan(file) if file.suffix == ".json" else csvfile.read(file, alignment=alignment)
    with answering() as answer:
        began = time.perf_counter()
        found = lay_out(buffers, room, work=effort * WORK_PER_SECOND)
        seconds = time.perf_counter() - began
        check_layout(buffers, found)
        if out is not None:
            csvfile.write(out, ids, buffers, found)
        if json:
            print_json(
                {
                    "buffers": len(buffers), "max_live_bytes": found.max_live, "layout_bytes": found.bytes,
                    "lower_bound_bytes": max(found.bound, found.max_live), "gap": found.gap, "capacity_bytes": room,
                    "seconds": seconds, "offsets": dict(zip(ids, found.offsets, strict=True)),
                },
                answer,
            )  # fmt: skip
        else:
            answer.write("\n".join(_lines(found, buffers, room, seconds, out)) + "\n")
    if room is not None and found.bytes > room:
        low = max(found.bound, found.max_live)
        why = f"none exists below {low}" if low > room else "none was found; raise --effort to look for longer"
        raise InfeasibleError(f"{file} needs {found.bytes} bytes, the capacity is {room}: {why}")


def _lines(found: Layout, buffers: Buffers, room: int | None, seconds: float, out: Path | None) -> list[str]:
    low = max(found.bound, found.max_live)
    certain = "the least there is" if found.bytes == low else f"none exists below {low}"
    lines = [
        f"buffers    {len(buffers)}, of which {found.max_live} bytes live at once",
        f"layout     {found.bytes} bytes, {100 * found.gap:.2f} % above that; {certain}",
        f"searched   {fmt_seconds(seconds)}",
    ]
    lines += [] if room is None else [f"capacity   {room} bytes: {'kept' if found.bytes <= room else 'not kept'}"]
    return lines + ([] if out is None else [f"offsets    {out}"])


def _of_plan(path: Path) -> tuple[tuple[str, ...], Buffers]:
    file = planfile.read(path)
    graph = graph_beside(path, file.graph_digest)
    costs = costs_beside(path, graph)
    if graph is None or costs is None:
        raise ConfigError(f"{path}: its graph.json and costs.json are not beside it; name a plan in its run directory")
    made = tenants(graph, file.plan, costs)
    return tuple(f"{number}:{one.name}" for number, one in enumerate(made)), buffers_of(made)
