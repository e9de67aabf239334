"""Committed summaries are what their commands make of the committed results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.fleet import __main__ as fleet
from experiments.benchmarks.kernels import __main__ as kernels
from experiments.benchmarks.pareto import __main__ as pareto
from experiments.benchmarks.repeated_tunes import __main__ as repeated_tunes
from tests.experiments.paths import BENCHMARKS

PAGES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "fleet/results": ("overhead.json", fleet.summarize),
    "kernels/results/usual": ("results.json", kernels.summary),
    "repeated_tunes/results": ("results.json", repeated_tunes.summary),
    "repeated_tunes/results/quiet": ("results.json", repeated_tunes.summary),
}
"""Result file of a folder, and the function that formats its page."""


@pytest.mark.parametrize("folder", PAGES)
def test_a_page_is_formatted_from_its_result_file(folder: str):
    name, format_page = PAGES[folder]
    document = json.loads((BENCHMARKS / folder / name).read_text(encoding="utf-8"))
    assert (BENCHMARKS / folder / "summary.md").read_text(encoding="utf-8") == format_page(document)


@pytest.mark.parametrize(
    "folder", sorted((BENCHMARKS / "pareto" / "results").glob("cpu-*")), ids=lambda path: path.name
)
def test_a_page_of_fronts_is_formatted_from_their_results_and_those_of_the_peers(folder: Path):
    page = (folder / "summary.md").read_text(encoding="utf-8")
    assert page == pareto.summarize(folder, pareto.FRONTIER / folder.name)
