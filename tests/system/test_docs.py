"""README and guides: every code block runs, in the order of its page, and every name and link in them exists."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import autotune
from autotune.cli import main as cli
from autotune.report import charts
from autotune.study.verdicts.statistics import median_interval
from docs import generate
from experiments.benchmarks.frontier import summary as frontier
from experiments.benchmarks.frontier.records import ratios_by_round
from experiments.benchmarks.tuned import gains
from tests.support.checkout import BRIEF, SIMULATED
from tests.system.figures import MEASURED_ROW

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXECUTED = ("sh", "python", "yaml", "crontab", "ini")

SHORTER = [
    (r"--time \d+m", "--time 90s --trials 2"),
    (r"^( *)time: \d+m$", r"\1time: 40s"),
    (r"^make tune$", "make tune CONFIG=mlp.yaml ARGS=--dry-run"),
]
"""Replacements for a run in a test: the same commands, on less time. `make tune` tunes the page's own model."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    """As a test runs it: with shorter times."""


def blocks(page: Path) -> Iterator[Block]:
    for language, title, text in re.findall(
        r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', page.read_text(), re.DOTALL | re.MULTILINE
    ):
        for pattern, replacement in SHORTER:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)  # noqa: PLW2901
        yield Block(language, title, text)


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every shell command of a page, as it is written there."""
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from filter(None, (shlex.split(line, comments=True) for line in block.splitlines()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_of_a_language_that_tests_execute(page: Path):
    assert {block.language for block in blocks(page)} <= set(EXECUTED)
    assert len(re.findall(r"^```", page.read_text(), re.MULTILINE)) == 2 * len(list(blocks(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_exist_with_their_options(page: Path, capfd: pytest.CaptureFixture[str]):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for program, *words in commands(page):
        match program:
            case "autotune":
                with pytest.raises(SystemExit) as ended:
                    cli.main([words[0], *(words[1:2] if words[0] == "device" else ()), "--help"])
                helped = capfd.readouterr().out
                assert not ended.value.code, words
                assert {word for word in words if re.fullmatch("--?[a-z-]+", word)} <= set(
                    re.findall(r"(?<![\w-])--?[a-z][\w-]*", helped)
                )
            case "pip":
                assert words[0] == "install"
                named = set(re.findall(r"\[(.+?)\]", " ".join(words)))
                assert {extra for names in named for extra in names.split(",")} <= set(extras)
            case "python" | "python3":
                assert words[0] == "-m"
            case "make":
                subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, check=True)
            case _:
                pytest.fail(f"{page.name}: nobody checks {program}")


def test_every_file_that_is_named_exists():
    names = {
        (page, name.rstrip("."))
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for name in re.findall(r"(?<![\w/.])(?:configs|experiments|docs|autotune|tests)/[\w./-]+", page.read_text())
        if not re.search("NAME|KIND", name) and page.stem != "results"  # results keep the commands of their day
    }
    assert len(names) > 10
    assert [f"{page.name}: {name}" for page, name in sorted(names) if not (ROOT / name).exists()] == []


def test_every_fault_on_record_has_its_test():
    text = (ROOT / "tests" / "system" / "fixed_faults.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| .+ \| (tests/[\w/]+\.py)::(\w+) \| (?:command|Python|source) \|$", text, re.MULTILINE)
    assert len(named) == text.count("\n| ") - 1  # every row but the head's
    missing = [
        f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_links_of_the_readme_lead_to_files():
    links = re.findall(
        r"\]\(([^)#]+)[^)]*\)", "\n".join(page.read_text() for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"))
    )
    assert len(links) > 15
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", [name for name in generate.PAGES if name not in generate.WITH_ORIGIN])
def test_a_generated_page_is_up_to_date(name: str):
    assert (ROOT / "docs" / name).read_text() == generate.PAGES[name](), "run python -m docs.generate"


@pytest.mark.parametrize("name", generate.WITH_ORIGIN)
def test_a_page_of_figures_is_up_to_date_but_for_commits_and_dates(name: str):
    def figures(text: str) -> str:
        return re.sub(r"\| [\w ]+ \| (\d{4}-\d\d-\d\d|not recorded) \|$", "|", text, flags=re.MULTILINE)

    assert figures((ROOT / "docs" / name).read_text()) == figures(generate.PAGES[name]()), "run python -m docs.generate"


def test_every_file_that_an_example_of_the_api_names_is_shown_before_the_first_example():
    shown, _, _ = generate.api_page().partition("\n::: ")
    texts = [getattr(autotune, name).__doc__ or "" for name in autotune.__all__]
    named = {file for text in texts for file in re.findall(r'"(\w+\.py):\w+"', text)}
    assert named == set(re.findall(r'^```python title="(.+?)"$', shown, re.MULTILINE))
    assert named


def test_every_benchmark_on_the_page_of_results_has_a_table_or_names_its_files():
    _, *sections = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("\n## ")
    assert len(sections) > 10
    # title, table of the origins, tables of the results
    assert [section.partition("\n")[0] for section in sections if len(section.strip().split("\n\n")) < 3] == []


FRONTIER = ROOT / "experiments" / "benchmarks" / "frontier" / "results"
TUNED = ROOT / "experiments" / "benchmarks" / "tuned" / "results"
README_ROWS = (
    ("resnet18-kernels", "ResNet-18", "best"),
    ("resnet50-kernels", "ResNet-50", "best"),
    ("mobilenet_v2-kernels", "MobileNetV2", "best"),
    ("lstm-kernels", "LSTM", "best"),
    ("gpt2-kernels", "GPT-2", "best"),
    ("gpt2-ssd", "the same model, smallest plan", "smallest"),
)


@pytest.mark.parametrize(("name", "label", "side"), README_ROWS, ids=[name for name, _, _ in README_ROWS])
def test_a_row_of_the_readme_is_that_of_its_result(name: str, label: str, side: str):
    record = json.loads((TUNED / f"{name}.json").read_text())
    rows = MEASURED_ROW.findall((ROOT / "README.md").read_text())
    assert len(rows) == len(README_ROWS), "every row has a result"
    (row,) = (row for row in rows if row.startswith(f"| {label}"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    peak = f"{record['eager_peak_bytes'] / 2**20:.0f} MiB"
    if side == "smallest":
        small = record["smallest"]
        charged, time = f"{small['charged_bytes'] / 2**20:.0f} MiB", f"{small['time_ratio']:.2f}x"
        assert cells == [peak, "none", charged, time]
        return
    afresh = json.loads((TUNED / "gains" / f"{name}.json").read_text())
    interval = median_interval(list(ratios_by_round(afresh, gains.TUNED).values()))
    assert (interval.confidence or 0.0) >= 0.95
    time = f"{interval.middle:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
    budget = record["budget"].replace("%", " %")
    assert cells == [peak, budget, f"{record['best_charged_bytes'] / 2**20:.0f} MiB", time]


def test_the_readme_compares_with_pytorchs_methods_as_the_recorded_frontier_does():
    text = (ROOT / "README.md").read_text()
    assert (FRONTIER / "overview.png").relative_to(ROOT).as_posix() in text
    assert "\n".join(frontier.readme_rows(frontier.read_machines(FRONTIER))) in text


def test_the_picture_shows_two_plans_by_role_under_the_budget():
    picture = ROOT / "docs" / "images" / "memory.svg"
    words = {"".join(text.itertext()) for text in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert {"parameters", "optimizer state", "gradients", "activations", "MiB"} <= words
    assert any(word.startswith("plan ") for word in words)
    assert any(word.startswith("budget, ") for word in words)
    assert charts.BLUE.lower() in picture.read_text().lower()
    assert picture.stat().st_size < 60_000


@pytest.fixture
def workplace(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory in which the commands of a page run this checkout: the files that git lists, and programs on the PATH."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    place = tmp_path / "checkout"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    binaries = place / ".venv" / "bin"
    binaries.mkdir(parents=True)
    page: Path = request.getfixturevalue("page")
    command = BRIEF if page.name == "README.md" else SIMULATED  # each study that measures takes a minute
    # the packages of the copy come first, and the tests' own from here
    for name in ("python", "python3"):
        (binaries / name).write_text(f'#!/bin/sh\nPYTHONPATH="{place}:{ROOT}" exec "{sys.executable}" "$@"\n')
    (binaries / "autotune").write_text(f'#!/bin/sh\nexec "{binaries}/python" -c {shlex.quote(command)} "$@"\n')
    (binaries / "pip").write_text("#!/bin/sh\nexit 0\n")  # what it would install is what the tests run with
    for script in binaries.iterdir():
        script.chmod(0o755)
    for stamp in ("torch", "zoo"):
        (place / ".venv" / f"{stamp}.stamp").touch()
    return place


def execute(block: Block, place: Path, script: list[str]) -> None:
    """Run one block of a page. Python blocks without a title collect in `script`: they run as one program at the end."""
    match block.language:
        case "python" | "yaml" | "ini" if block.title:
            (place / block.title).write_text(block.text)
            if block.language == "ini":
                unit = configparser.ConfigParser(strict=False)
                unit.read_string(block.text)
                assert unit.sections()
        case "python":
            script.append(block.text)
        case "sh":
            run(["bash", "-euo", "pipefail", "-c", block.text], place)
        case "crontab":
            schedule, command = block.text.split(maxsplit=5)[:5], block.text.split(maxsplit=5)[5]
            assert all(re.fullmatch(r"\*|\d+", field) for field in schedule)
            assert "autotune nightly nightly.yaml" in command
            assert "--resume" not in command  # it would begin no new night


def run(command: list[str], place: Path) -> str:
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    alone["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait in a loop take the cores from other tests
    alone["PATH"] = f"{place / '.venv' / 'bin'}{os.pathsep}{alone['PATH']}"
    done = subprocess.run(command, cwd=place, env=alone, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, workplace: Path):
    if page.name == "README.md":  # its first command tunes before the page has written its model
        (workplace / "mlp.yaml").write_text("workload: mlp.py:factory\nbudget: 65%\ntime: 90s\ntrials: 2\n")
        (source,) = (block for block in blocks(page) if block.title == "mlp.py")
        (workplace / source.title).write_text(source.text)
    script: list[str] = []
    for block in blocks(page):
        execute(block, workplace, script)
    if script:
        (workplace / "page.py").write_text("\n\n".join(script))
        run(["python", "page.py"], workplace)
