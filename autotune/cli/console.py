"""What people see: rich on a terminal, plain lines elsewhere; nothing here decides anything."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.predict.order_bounds import order_lower_bound
from autotune.predict.simulate import Estimate
from autotune.records.measurement import Measurement
from autotune.records.plan_file import PlanFile
from autotune.report.tables import COLUMNS, FIGURES, Row, words
from autotune.units import fmt_bytes, fmt_seconds, mib

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cli.doctor import Finding

T = TypeVar("T")


def on_terminal(stream: IO[str]) -> bool:
    """Whether a person watches the stream."""
    return stream.isatty()


def rich_console(stream: IO[str]) -> "Console":
    """Colours unless NO_COLOR is set, as rich does by itself."""
    from rich.console import Console

    return Console(file=stream, highlight=False)


def print_table(rows: Sequence[Row], stream: IO[str] | None = None, columns: Sequence[str] = COLUMNS) -> None:
    """The trials, aligned; the best one stands out."""
    out = stream or sys.stdout
    if on_terminal(out):
        _print_rich(rows, out, columns)
        return
    lines = [columns, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        cells = (
            cell.rjust(width) if name in FIGURES else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )  # fmt: skip
        print("  ".join(cells).rstrip(), file=out)


def _print_rich(rows: Sequence[Row], out: IO[str], columns: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in FIGURES else "left", no_wrap=name in FIGURES)
    for row in rows:
        style = "bold green" if row.best else "dim" if row.pale else ""
        table.add_row(*(Text(cell) for cell in row.cells), style=style)
    rich_console(out).print(table)


def describe(file: PlanFile, graph: TrainGraph | None = None, costs: Costs | None = None) -> list[str]:
    """A plan in words, a line each; with its graph also the layers that it touches, with the costs of its ops also what
    their order alone could do.
    """
    plan, expected = file.plan, file.estimate
    lines = [
        f"workload   {file.workload}",
        f"budget     {file.budget}: {fmt_bytes(file.budget_bytes)} for the step, floor {fmt_bytes(file.floor_bytes)}",
        f"device     {file.device.silicon}, {file.device.cores} cores, torch {file.device.torch}" if file.device else
        "device     not recorded",
        f"order      {words(file.settings.get('order', {}))}",
        f"update     {words(file.settings.get('update', {}))}",
        f"recompute  {_recomputed(file, graph)}",
        f"in place   {len(plan.inplace) or 'no'} runs overwrite an input",
        f"offload    {_offloaded(file, graph)}",
        f"results    {file.verified}",
        "",
    ]  # fmt: skip
    seen = file.measurement
    lines += compare(expected, seen)
    lines.append(
        f"no plan of this graph peaks below {fmt_bytes(expected.lower_bound_bytes)}; "
        f"this one is {100 * expected.gap:.1f} % above"
        if expected.lower_bound_bytes
        else "no lower bound is known"
    )
    if graph is not None and costs is not None:
        low, op = order_lower_bound(graph, costs, inplace=True)
        lines.append(
            f"with nothing computed again or moved away no order peaks below {fmt_bytes(low)}, for {graph.ops[op].name}"
        )
    lines.append(
        f"no plan within the budget takes less than {fmt_seconds(expected.lower_bound_seconds)}; "
        f"this one takes {100 * expected.seconds_gap:.1f} % more"
    )
    if expected.layout_bytes:
        lines.append(
            f"its buffers lie in an arena of {fmt_bytes(expected.layout_bytes)}, "
            f"{100 * expected.layout_gap:.1f} % above what lives in it at once"
        )
    if not plan.recomputed and not plan.offload:
        lines.append("nothing is recomputed and nothing offloaded: only the order saves memory")
    return lines


def compare(expected: Estimate, seen: Measurement | None, baseline: Measurement | None = None) -> list[str]:
    """Estimate and measurement side by side, and the baseline where it was measured too."""
    peak = seen.step_peak_bytes if seen else None
    charged = seen.step_charged_bytes if seen else None
    seconds = seen.median_seconds if seen else None
    ratio = seen.time_ratio if seen else None
    stall = seen.stall_seconds if seen else None
    moved = seen.transfer_bytes if seen else None
    table = [
        ("", "estimate", "measured"),
        ("peak of the step, MiB", mib(expected.peak_bytes), mib(peak)),
        ("charged for the step, MiB", mib(expected.charged_bytes), mib(charged)),
        ("step", fmt_seconds(expected.seconds), _time(seconds)),
        ("ratio to baseline", "-", "-" if ratio is None else f"{ratio:.3f}"),
        ("computing again", fmt_seconds(expected.recompute_seconds), "-"),
        ("waiting for the store", fmt_seconds(expected.stall_seconds), _time(stall)),
        ("through the store, MiB", mib(expected.transfer_bytes), mib(moved)),
        ("outcome", "-", seen.outcome.value if seen else "not measured"),
    ]
    lines = [f"{name:<26}{left:>12}{right:>14}" for name, left, right in table]
    if baseline is not None:
        plain = (
            "baseline", mib(baseline.step_peak_bytes), mib(baseline.step_charged_bytes), _time(baseline.median_seconds),
            "1.000", "-", "-", "-", baseline.outcome.value,
        )  # fmt: skip
        lines = [f"{line}{cell:>14}" for line, cell in zip(lines, plain, strict=True)]
    return lines


def outcomes(rows: Iterable[Row]) -> str:
    """`ok 5  over budget 2`."""
    return "  ".join(f"{verdict} {count}" for verdict, count in Counter(row.cells[-1] for row in rows).most_common())


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else fmt_seconds(seconds)


def _recomputed(file: PlanFile, graph: TrainGraph | None) -> str:
    order = file.plan.order
    runs = file.plan.recomputed
    if not runs:
        return "nothing"
    counts = Counter(order)
    ops = [op for op, count in counts.items() if count > 1]
    text = f"{len(ops)} ops, {runs} runs more than traced, {fmt_seconds(file.estimate.recompute_seconds)} a step"
    text += f" ({words(file.settings.get('recompute', {}))})"
    return text + (_layers(graph, ops) if graph else "")


def _offloaded(file: PlanFile, graph: TrainGraph | None) -> str:
    plan = file.plan
    if not plan.offload:
        return "nothing"
    values = sorted({swap.value for swap in plan.offload})
    text = f"{len(values)} values to {plan.store}, window of {plan.window} layers, "
    text += f"{fmt_bytes(file.estimate.transfer_bytes)} written and read a step"
    makers = [maker for value in values if graph and (maker := graph.producer[value]) is not None]
    return text + (_layers(graph, makers) if graph else "")


def _layers(graph: TrainGraph, ops: Iterable[int], most: int = 4) -> str:
    named = list(dict.fromkeys(graph.ops[op].layer or graph.ops[op].name for op in sorted(ops)))
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return f": {', '.join(named[:most])}{more}"


def graph_beside(path: Path, digest: str) -> TrainGraph | None:
    """The graph of a plan that still lies in its run directory."""
    graph = _beside(path, "graph.json", TrainGraph)
    return graph if graph is not None and graph.digest == digest else None


def costs_beside(path: Path, graph: TrainGraph | None) -> Costs | None:
    """What was measured of the graph's ops, for a plan that still lies in its run directory."""
    costs = _beside(path, "costs.json", Costs)
    return costs if costs is not None and graph is not None and costs.belong_to(graph) else None


def _beside(path: Path, name: str, kind: type[T]) -> T | None:
    import json

    from autotune.errors import ConfigError
    from autotune.records.json_codec import from_json

    found = path.parent / name
    try:
        return from_json(kind, json.loads(found.read_text()), where=str(found))
    except (OSError, ValueError, ConfigError):
        return None


def print_findings(findings: Iterable["Finding"], out: IO[str]) -> None:
    """One line a finding, coloured on a terminal; its cure below."""
    colours = {"ok": "green", "warn": "yellow", "bad": "red"}
    found = list(findings)
    width = max((len(finding.name) for finding in found), default=0)
    lines: list[tuple[str, str, str]] = []
    for finding in found:
        lines.append((finding.status, f"{finding.status:<5}", f"{finding.name:<{width}}  {finding.detail}"))
        if finding.cure:
            lines.append(("", " " * 5, f"{'':<{width}}  -> {finding.cure}"))
    if not on_terminal(out):
        out.writelines(f"{status}{text}\n" for _, status, text in lines)
        return
    from rich.text import Text

    screen = rich_console(out)
    for kind, status, text in lines:
        screen.print(Text.assemble((status, colours.get(kind, "")), text))
