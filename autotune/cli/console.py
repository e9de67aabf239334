"""Tables and colours: rich on a terminal, plain aligned lines elsewhere."""

import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from autotune.cli.output import escape_controls
from autotune.report.tables import COLUMNS, NUMERIC_COLUMNS, TrialRow

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cli.doctor import CheckResult

_STATUS_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def print_table(rows: Sequence[TrialRow], stream: IO[str] | None = None, columns: Sequence[str] = COLUMNS) -> None:
    """Print rows of trials as an aligned table; a terminal highlights the best one."""
    out = stream or sys.stdout
    if out.isatty():
        _print_rich_table(rows, out, columns)
        return
    numeric = [name in NUMERIC_COLUMNS for name in columns]
    _print_aligned([tuple(columns), *(row.cells for row in rows)], numeric, out)


def print_rows(rows: Sequence[Sequence[str]], columns: Sequence[str], out: IO[str]) -> None:
    """Print rows of text as an aligned table, with all columns but the last to the right."""
    numeric = [position < len(columns) - 1 for position in range(len(columns))]
    _print_aligned([tuple(columns), *rows], numeric, out)


def _print_aligned(lines: Sequence[Sequence[str]], numeric: Sequence[bool], out: IO[str]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(numeric))]
    for line in lines:
        cells = (
            cell.rjust(width) if is_numeric else cell.ljust(width)
            for is_numeric, cell, width in zip(numeric, line, widths, strict=True)
        )  # fmt: skip
        print("  ".join(cells).rstrip(), file=out)


def print_check_results(results: Iterable["CheckResult"], out: IO[str]) -> None:
    """Print one line for each check, with its fix below; a terminal colours the status."""
    results = list(results)
    width = max((len(result.name) for result in results), default=0)
    lines: list[tuple[str, str, str]] = []
    for result in results:
        lines.append((result.status, f"{result.status:<5}", f"{result.name:<{width}}  {result.detail}"))
        if result.fix:
            lines.append(("", " " * 5, f"{'':<{width}}  -> {result.fix}"))
    if not out.isatty():
        out.writelines(f"{status}{text}\n" for _, status, text in lines)
        return
    from rich.text import Text

    console = _rich_console(out)
    for kind, status, text in lines:
        console.print(Text.assemble((status, _STATUS_COLOURS.get(kind, "")), escape_controls(text)))


def _print_rich_table(rows: Sequence[TrialRow], out: IO[str], columns: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMERIC_COLUMNS else "left", no_wrap=name in NUMERIC_COLUMNS)
    for row in rows:
        style = "bold green" if row.best else "dim" if row.pale else ""
        table.add_row(*(Text(escape_controls(cell)) for cell in row.cells), style=style)
    _rich_console(out).print(table)


def _rich_console(stream: IO[str]) -> "Console":
    """Return a console that uses colours unless NO_COLOR is set."""
    from rich.console import Console

    # the texts were escaped one by one: the colours of the console itself must pass
    return Console(file=getattr(stream, "unescaped", stream), highlight=False)
