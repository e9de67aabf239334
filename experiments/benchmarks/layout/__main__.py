"""Layouts of minimalloc's hard instances and of real training steps: bytes above the peak of live bytes, and seconds.

`python -m experiments.benchmarks.layout [--minimalloc DIR] [--models resnet50 ...] [--repeats 3] [--out results]`

Without `--minimalloc` the stored rows of its instances stay, with the facts of the call that measured them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.layout import WORK, Buffers, Layout, check_layout, lay_out
from autotune.layout import csv_file as csvfile
from autotune.planners import make_plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import peak_bytes, simulate
from autotune.records.json_codec import from_json
from autotune.records.plan_file import PlanFile
from autotune.runtime import arena
from autotune.runtime.op_profiler import profile
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.reference import WorkloadRef
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts
from experiments.common.result_file import (
    ORIGINS,
    capture_digests,
    join_digests,
    read_origins,
    write_result,
)

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 8}, "resnet152": {"batch": 2}, "mobilenet_v2": {"batch": 8}, "gpt2": {"batch": 8},
    "bert": {"batch": 8}, "lstm": {"batch": 32},
}  # fmt: skip
SHARES = (None, 0.5, 0.0)
"""Budgets as shares of the bytes beside the static ones; None is the traced plan."""
PLANNED: Settings = {
    "update": {"planner": "with_gradient"}, "recompute": {"planner": "greedy"}, "inplace": {"planner": "greedy"},
}  # fmt: skip
HARD_WORK = 10_000_000_000
"""Work limit of a minimalloc instance; four searches on two cores."""


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One problem, its layout and the planning time."""

    part: str
    name: str
    buffers: int
    max_live_bytes: int
    capacity_bytes: int | None
    layout_bytes: int
    gap: float
    seconds: float
    slowest_seconds: float


def time_layout(part: str, name: str, buffers: Buffers, capacity: int | None, *, work: int, repeats: int) -> LayoutRow:
    """Lay out the buffers repeatedly, check the layout, and return its figures."""
    durations: list[float] = []
    layouts: list[Layout] = []
    for _ in range(repeats):
        fresh = replace(buffers)  # nothing that is known of it already
        start = time.perf_counter()
        layouts.append(lay_out(fresh, capacity, work=work))
        durations.append(time.perf_counter() - start)
    assert len({layout.offsets for layout in layouts}) == 1
    check_layout(buffers, layouts[0])
    layout = layouts[0]
    return LayoutRow(
        part,
        name,
        len(buffers),
        layout.max_live,
        capacity,
        layout.bytes,
        layout.gap,
        statistics.median(durations),
        max(durations),
    )


def read_instances(folder: Path) -> Iterator[tuple[str, Buffers, int]]:
    """Yield minimalloc's instances; the capacity is the second part of a file's name."""
    for path in sorted(folder.glob("*.csv")):
        name, capacity, _ = path.name.split(".")
        yield name, csvfile.read(path)[1], int(capacity)


def record_buffers(model: str, **arguments: Any) -> Iterator[tuple[str, Buffers]]:
    """Yield the buffers that the arena records of a step under each plan."""
    workload = load_workload(model, arguments)
    program = capture(workload)
    graph, costs = program.graph, profile(program)
    traced = Plan.traced(graph)
    traced_peak = peak_bytes(graph, traced, costs)
    for share in SHARES:
        budget = traced_peak if share is None else int(graph.static_bytes + share * (traced_peak - graph.static_bytes))
        plan = traced if share is None else make_plan(graph, PLANNED, budget, costs)
        file = PlanFile(
            WorkloadRef(model, arguments), graph.digest, f"{budget}B", budget, 0, {}, replace(plan, allocator="arena"),
            simulate(graph, lower(graph, plan), costs),
        )  # fmt: skip
        buffers_of_steps: list[Buffers] = []

        def keep(buffers: Buffers, *rest: Any, recorded: list[Buffers] = buffers_of_steps, **more: Any) -> Layout:
            recorded.append(buffers)
            return lay_out(buffers, *rest, **more)

        with (
            mock.patch.object(arena, "lay_out", keep),
            TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, file) as step,
        ):
            for _ in range(3):
                step(workload.batch)
        yield f"{model}, {'as traced' if share is None else f'{share:.0%}'}", buffers_of_steps[-1]


def read_stored(path: Path) -> tuple[dict[str, list[LayoutRow]], dict[str, dict[str, Any]]]:
    """Return the rows and the facts of each part of a result file; empty without one."""
    if not path.exists():
        return {}, {}
    document = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[str, list[LayoutRow]] = {}
    for number, row in enumerate(document["rows"]):
        rows.setdefault(row["part"], []).append(from_json(LayoutRow, row, where=f"rows[{number}]"))
    return rows, read_origins(document, dict.fromkeys(rows, ""))


def summary(rows: Mapping[str, list[LayoutRow]], origins: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a table per part."""
    lines: list[str] = []
    for part, rows_of_part in rows.items():
        facts, unit = origins[part], 1 if part == "minimalloc" else 2**20
        machine = facts["machine"]
        lines += [
            f"## {part}",
            "",
            f"{machine['silicon']}, cores: {machine['cores']}; `{facts['command']}`, commit {facts['commit']}, {facts['date']}",
            "",
            f"| | buffers | live at once{'' if unit == 1 else ', MiB'} | layout | above it | capacity | seconds | slowest |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for row in rows_of_part:
            verdict = (
                "" if row.capacity_bytes is None else "kept" if row.layout_bytes <= row.capacity_bytes else "not kept"
            )
            live, top = ((f"{n}" if unit == 1 else f"{n / unit:.2f}") for n in (row.max_live_bytes, row.layout_bytes))
            lines.append(
                f"| {row.name} | {row.buffers} | {live} | {top} | {row.gap:.2%} | {verdict} | {row.seconds:.2f} |"
                f" {row.slowest_seconds:.2f} |"
            )
        lines += [
            "",
            f"All: {sum(row.seconds for row in rows_of_part):.1f} s; the widest gap {max(row.gap for row in rows_of_part):.2%}.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minimalloc", type=Path, help="a folder of NAME.CAPACITY.csv")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    options = parser.parse_args()
    refuse_busy_machine(anyway=options.anyway)
    facts = collect_facts()
    path = options.out / "results.json"
    rows, origins = read_stored(path)
    if options.minimalloc:
        rows["minimalloc"] = []
        origins["minimalloc"] = facts | {"graphs": {}}
        for name, buffers, capacity in read_instances(options.minimalloc):
            row = time_layout("minimalloc", name, buffers, capacity, work=HARD_WORK, repeats=options.repeats)
            rows["minimalloc"].append(row)
            print(row, flush=True)
    if options.models:
        rows["models"] = []
        digests = capture_digests({name: (name, MODELS[name]) for name in options.models})
        origins["models"] = facts | {"graphs": digests}
        for model in options.models:
            for name, buffers in record_buffers(model, **MODELS[model]):
                row = time_layout("models", name, buffers, None, work=WORK, repeats=options.repeats)
                rows["models"].append(row)
                print(row, flush=True)
    all_rows = [asdict(row) for rows_of_part in rows.values() for row in rows_of_part]
    write_result(path, {**facts, "rows": all_rows, ORIGINS: origins}, join_digests(origins))
    (options.out / "summary.md").write_text(summary(rows, origins), encoding="utf-8")
    print(summary(rows, origins))


if __name__ == "__main__":
    main()
