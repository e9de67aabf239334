"""Write the HTML report of a run: one page that opens from disk and loads nothing from the network."""

from collections import Counter
from pathlib import Path

from autotune.records.run_dir import RunDir, write_text
from autotune.report import tables
from autotune.report.page_rows import (
    decision_rows,
    error_notes,
    first_error_line,
    module_rows,
    prediction_rows,
    select_trials,
    summarize_accuracy,
)
from autotune.report.plan_quality import list_plan_quality
from autotune.report.run_charts import draw_charts
from autotune.report.summary import list_device_facts, list_run_facts, summarize_run
from autotune.study.batch.description import SIZE_COLUMNS, size_rows
from autotune.study.recorded_run import RecordedRun

VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Symbols in place of control characters: a terminal that prints the page must not obey a worker's error message."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    The write is atomic, and the same records produce the same bytes. Raises ConfigError where the directory holds no
    run.
    """
    path = RunDir(run_dir).report
    write_text(path, render_page(RecordedRun.load(run_dir)))
    return path


def write_charts(run_dir: Path, directory: Path) -> list[Path]:
    """Write the report's charts as standalone SVG files and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in draw_charts(RecordedRun.load(run_dir)).items():
        if svg:
            path = directory / f"{name}.svg"
            path.write_text(svg, encoding="utf-8")
            written.append(path)
    return written


def render_page(records: RecordedRun) -> str:
    """Return the HTML page of a run."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))
    headline, summary = summarize_run(records)
    trials = select_trials(records)
    page: str = template.render(
        name=records.name, headline=headline, summary=summary, facts=list_run_facts(records),
        **draw_charts(records),
        has_plan=records.chosen is not None, modules=module_rows(records), decisions=decision_rows(records),
        predictions=prediction_rows(records), accuracy=summarize_accuracy(records),
        plan_quality=list_plan_quality(records), device=list_device_facts(records),
        columns=tables.COLUMNS, numeric_columns=tables.NUMERIC_COLUMNS, rows=tables.trial_rows(trials, records.best),
        error_line=first_error_line,
        size_columns=SIZE_COLUMNS, sizes=_size_rows(records),
        confirmed_columns=tables.CONFIRMED_COLUMNS, confirmed=_confirmed_rows(records),
        front_columns=tables.FRONT_COLUMNS, front=tables.front_rows(records.front_plans, records.baseline),
        omitted=len(records.trials) - len(trials), notes=error_notes(records),
        outcomes=Counter(tables.trial_verdict(trial) for trial in records.trials).most_common(),
    )  # fmt: skip
    return page.translate(VISIBLE_CONTROLS)


def _size_rows(records: RecordedRun) -> list[tuple[str, ...]]:
    return [] if records.batch_search is None else size_rows(records.batch_search)


def _confirmed_rows(records: RecordedRun) -> list[tables.TrialRow]:
    """Return the re-measured plans beside the best one; empty for a front, whose own table has them."""
    if records.is_front:
        return []
    return tables.confirmed_rows(records.confirmed, records.baseline) if records.baseline is not None else []
