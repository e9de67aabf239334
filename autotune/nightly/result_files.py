"""Format a night's results as a text table, `nightly.md`, `nightly.json` and `junit.xml`."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from autotune.nightly.history import NightRecord, NightVerdict
from autotune.nightly.results import NightResults, worst_error
from autotune.records.json_codec import to_json, without_infinities
from autotune.records.run_dir import write_json, write_text
from autotune.units import mib

COLUMNS = ("entry", "verdict", "time", "vs. record", "charged MiB", "cause", "detail")
JUNIT_TAGS = {
    NightVerdict.REGRESSION: "failure", NightVerdict.FAILED: "error", NightVerdict.INCONCLUSIVE: "skipped",
}  # fmt: skip
"""JUnit element of each verdict that is no success."""
SCHEMA = 1


def write_results(directory: Path, results: NightResults) -> None:
    """Write the three files, each atomically; `nightly.json` is last, so its presence means that all are there."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "junit.xml", format_junit(results))
    write_text(directory / "nightly.md", format_markdown(results))
    write_json(directory / "nightly.json", to_document(results))


def to_document(results: NightResults) -> dict[str, Any]:
    """Return the JSON document of `--json`."""
    error = worst_error(results)
    document = {
        "schema": SCHEMA,
        "night": results.name,
        "config": results.config,
        "exit_code": 128 + results.interrupted if results.interrupted else error.exit_code if error else 0,
        "entries": [to_json(night) | _name_time(night) for night in results.nights],
        "left": list(results.left),
        "interrupted": results.interrupted,
    }
    return {key: without_infinities(value) for key, value in document.items()}


def build_table(results: NightResults) -> list[tuple[str, ...]]:
    """Return header and rows, the worst entry first and missing entries last."""
    rows = [build_row(night) for night in results.by_severity]
    return [COLUMNS, *rows, *((key, "not done", "-", "-", "-", "-", "") for key in results.left)]


def format_text(results: NightResults) -> str:
    """Return the table as aligned text for a terminal, with the headline below it."""
    cells = build_table(results)
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join((*lines, results.headline, ""))


def format_markdown(results: NightResults) -> str:
    """Return headline and table as Markdown, for a chat or an issue."""
    header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in build_table(results)]
    lines = [
        f"**{results.headline}**", "", _markdown_line(header), _markdown_line(["---"] * len(header)),
        *map(_markdown_line, rows), "",
    ]  # fmt: skip
    return "\n".join(lines)


def format_junit(results: NightResults) -> str:
    """Return JUnit XML with one case per entry.

    A regression is a failure and an error of an entry is an error; inconclusive and missing entries are skipped.
    """
    suite = ElementTree.Element("testsuite", name=f"autotune nightly {results.name}")
    for night in results.nights:
        case = ElementTree.SubElement(suite, "testcase", classname="nightly", name=night.entry)
        case.set("time", f"{night.seconds:.1f}")
        if night.verdict in JUNIT_TAGS:
            element = ElementTree.SubElement(case, JUNIT_TAGS[night.verdict], message=_replace_invalid(night.detail))
            if night.causes:
                element.set("type", ", ".join(night.causes))
    for key in results.left:
        case = ElementTree.SubElement(suite, "testcase", classname="nightly", name=key)
        ElementTree.SubElement(case, "skipped", message="not done: the night ended before it")
    suite.set("tests", str(len(suite)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def build_row(night: NightRecord) -> tuple[str, ...]:
    """Return the cells of one entry under `COLUMNS`."""
    return (
        night.entry,
        night.verdict.value,
        _format_time(night),
        str(night.change) if night.change else "-",
        mib(night.charged_bytes),
        ", ".join(night.causes) or "-",
        _shorten(night.detail),
    )


def _name_time(night: NightRecord) -> dict[str, float | None]:
    """Return the time over eager's; where eager does not fit, the seconds of a step."""
    return {
        "ratio": night.ratio if night.has_eager else None,
        "seconds_per_step": None if night.has_eager else night.ratio,
    }


def _format_time(night: NightRecord) -> str:
    if night.ratio is None:
        return "-"
    unit = "" if night.has_eager else " s"
    interval = night.interval
    return f"{night.ratio:.3f}{unit}" + (f" ({interval.low:.3f} to {interval.high:.3f})" if interval else "")


def _markdown_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shorten(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _replace_invalid(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
