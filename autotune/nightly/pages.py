"""A night's results as a table, `nightly.md`, `nightly.json` and `junit.xml`: pure functions of its records."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from autotune.nightly.history import Night, Verdict
from autotune.nightly.results import Results, failure
from autotune.records.json_codec import to_json
from autotune.records.run_dir import write_json
from autotune.units import mib

COLUMNS = ("entry", "verdict", "time", "beside its record", "charged MiB", "cause", "detail")
SCHEMA = 1


def write_results(directory: Path, results: Results) -> None:
    """All three files, each whole or not at all; `nightly.json` last, so that it stands for all."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "junit.xml", junit(results))
    _write(directory / "nightly.md", markdown(results))
    write_json(directory / "nightly.json", document(results))


def document(results: Results) -> dict[str, Any]:
    """What `--json` prints."""
    error = failure(results)
    return {
        "schema": SCHEMA,
        "night": results.name,
        "config": results.config,
        "exit_code": 128 + results.interrupted if results.interrupted else error.exit_code if error else 0,
        "entries": [to_json(night) | {"ratio": night.ratio} for night in results.nights],
        "left": list(results.left),
        "interrupted": results.interrupted,
    }


def table(results: Results) -> list[tuple[str, ...]]:
    """Header and rows, the worst first; entries that are not done last."""
    rows = [row(night) for night in results.by_severity]
    return [COLUMNS, *rows, *((key, "not done", "-", "-", "-", "-", "") for key in results.left)]


def plain(results: Results) -> str:
    """For a screen."""
    cells = table(results)
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join((*lines, results.headline, ""))


def markdown(results: Results) -> str:
    """For a chat or an issue."""
    header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in table(results)]
    lines = [f"**{results.headline}**", "", _line(header), _line(["---"] * len(header)), *map(_line, rows), ""]
    return "\n".join(lines)


def junit(results: Results) -> str:
    """One case an entry: a regression is a failure, a fault an error, what is not to be told or not done is skipped."""
    suite = ElementTree.Element("testsuite", name=f"autotune nightly {results.name}")
    for night in results.nights:
        case = ElementTree.SubElement(suite, "testcase", classname="nightly", name=night.entry)
        case.set("time", f"{night.seconds:.1f}")
        word = {Verdict.REGRESSION: "failure", Verdict.FAILED: "error", Verdict.INCONCLUSIVE: "skipped"}
        if night.verdict in word:
            found = ElementTree.SubElement(case, word[night.verdict], message=_clean(night.detail))
            if night.causes:
                found.set("type", ", ".join(night.causes))
    for key in results.left:
        case = ElementTree.SubElement(suite, "testcase", classname="nightly", name=key)
        ElementTree.SubElement(case, "skipped", message="not done: the night ended before it")
    suite.set("tests", str(len(suite)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def row(night: Night) -> tuple[str, ...]:
    """Words under `COLUMNS`."""
    return (
        night.entry,
        night.verdict.value,
        "-" if night.ratio is None else f"{night.ratio:.3f}",
        str(night.change) if night.change else "-",
        mib(night.charged_bytes),
        ", ".join(night.causes) or "-",
        _short(night.detail),
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _clean(text: str) -> str:
    """Without what XML does not allow."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
