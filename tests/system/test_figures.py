"""A figure in README or docs is generated, comes from a result file that is named here, or is a rule."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate import HEADER
from tests.system.figures import MEASURED_ROW, RULES, TIED, WITHOUT_RESULT, Tied

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "experiments" / "benchmarks"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = r"(?:%|[KMGT]i?B(?:/s)?|kB|ms|µs|s|min|minutes|hours?|x|times|seconds)"
FIGURE = re.compile(rf"(?<![\w.,-])(?:{NUMBER} (?:to|and|or) )?{NUMBER} ?{UNIT}(?![\w-])")
"""One or two numbers with a unit; plain counts are no figures."""


def figures(text: str) -> Iterator[str]:
    """Yield the figures of a page's prose and tables, without its code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( {4,}\S.*)$", "", text, flags=re.MULTILINE)
    yield from (re.sub(r"\s+", " ", match[0]) for match in FIGURE.finditer(re.sub(r"`[^`\n]*`", "", text)))


def written_pages() -> dict[str, str]:
    """Return the text of every page that people write, by its path."""
    pages = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
    readme = ROOT / "README.md"
    pages[readme] = MEASURED_ROW.sub("", pages[readme])  # `test_docs` compares each row with its result
    return {str(path.relative_to(ROOT)): text for path, text in pages.items() if not text.startswith(HEADER.strip())}


def untied(page: str, text: str) -> set[str]:
    tied = {figure.text for figure in TIED if figure.page == page}
    return set(figures(text)) - tied - {*RULES.get(page, ()), *WITHOUT_RESULT.get(page, ())}


@pytest.mark.parametrize("page", written_pages())
def test_every_figure_of_a_page_is_of_a_result_or_a_rule(page: str):
    unknown = untied(page, written_pages()[page])
    assert unknown == set(), "measure it by a command under experiments/, and add it to TIED in tests/system/figures.py"


@pytest.mark.parametrize("figure", TIED, ids=lambda figure: f"{figure.page}-{figure.text}")
def test_a_figure_is_rounded_from_its_result(figure: Tied):
    result = (BENCHMARKS / figure.result).read_text()
    numbers = re.findall(NUMBER, figure.text)
    assert len(numbers) == len(figure.recorded)
    for number, recorded in zip(numbers, figure.recorded, strict=True):
        assert re.search(rf"(?<![\d.]){re.escape(recorded)}(?!\d)", result), f"{figure.result} has no {recorded}"
        decimals = len(number.partition(".")[2])
        value = abs(float(re.findall(NUMBER, recorded)[0]))
        assert abs(float(number) - value) <= 0.5 * 10**-decimals, f"{recorded} is not {number}"


def test_the_tables_name_only_figures_that_the_pages_have():
    pages = {page: set(figures(text)) for page, text in written_pages().items()}
    named = {(figure.page, figure.text) for figure in TIED}
    named |= {(page, text) for table in (RULES, WITHOUT_RESULT) for page, texts in table.items() for text in texts}
    assert {(page, text) for page, text in named if text not in pages.get(page, set())} == set()


def test_a_new_figure_is_found_and_code_is_not_prose():
    assert untied("README.md", "It is 37 % faster, in 1.5 to 2 s.") == {"37 %", "1.5 to 2 s"}
    assert untied("README.md", "`--budget 37%`\n```sh\nsleep 37 s\n```\n") == set()
