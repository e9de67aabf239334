"""The whole story in a browser: a study is run, its report opened from disk, the dashboard's pages visited."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.run_dir import Records
from tests.browser import chromium, environment, serving, settled
from tests.dashboards import made

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here"),
]

MODEL = """
import torch
import autotune

def tiny(batch=4096, width=64, depth=6):
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return autotune.Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(batch, width))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a real study, beside nights that were and directories that a crash left."""
    here = tmp_path_factory.mktemp("story")
    (here / "mine.py").write_text(MODEL)
    tune = ["tune", "mine.py:tiny", "--budget", "80%", "--trials", "6", "--time", "30s", "--name", "story"]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *tune], cwd=here, env=environment(), capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made.nights(here / "runs")
    made.broken(here / "runs")
    return here / "runs"


@pytest.fixture(scope="module")
def told(runs: Path) -> Iterator[dict[str, str]]:
    """Addresses of the dashboard and the servers beside it."""
    with serving(runs) as found:
        yield found


def best(runs: Path) -> int:
    found = Records.load(runs / "story").best
    assert found is not None
    return found.number


def test_the_report_opens_from_disk_with_its_charts_asks_for_nothing_and_has_no_error(runs: Path) -> None:
    with chromium() as page:
        errors, asked = [], []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((runs / "story" / "report.html").as_uri())
        assert "fits in" in page.locator("h1").inner_text()
        assert page.locator("svg").count() >= 2
        assert all(box["width"] > 300 and box["height"] > 100 for box in boxes(page, "svg"))
        # nothing lies outside of the page, which would have to be scrolled sideways
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert errors == []
        assert asked == [(runs / "story" / "report.html").as_uri()]


PAGES = {
    "": ("Models and devices", ["mine.py:tiny()", "night chain", "other cannot be shown"], 0),
    "study?study=story": ("One study", ["ended after", "budget"], 1),
    "compare?first_study=story&second_study=story": ("Two plans", ["Memory over one step", "Alive at the peak"], 1),
    "nightly": ("Nights", ["cause: environment", "nightly/torn cannot be shown"], 1),
    "published": ("Published and ours", ["reproduced"], 1),
}
"""By address: the title, what is said, and how many charts are drawn."""


@pytest.mark.parametrize("address", PAGES)
def test_every_page_of_the_dashboard_shows_what_it_is_for_and_no_error(address: str, told: dict[str, str]) -> None:
    title, words, charts = PAGES[address]
    with chromium() as page:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        settled(page, f"{told['dashboard']}/{address}")
        assert page.locator("h1").inner_text() == title
        assert page.locator('[data-testid="stException"]').count() == 0
        assert page.locator('[data-testid="stVegaLiteChart"] :is(svg, canvas)').count() >= charts
        said = page.locator('[data-testid="stMain"]').inner_text() + cells(page)
        for word in words:
            assert word in said
        assert page.get_by_role("link", name="MLflow").get_attribute("href").startswith(told["mlflow"])
        assert page.get_by_role("link", name="optuna-dashboard").get_attribute("href") == told["optuna"]
        assert errors == []


def test_pages_are_reached_from_one_another(told: dict[str, str]) -> None:
    with chromium() as page:
        settled(page, told["dashboard"])
        for name in ("One study", "Two plans", "Nights", "Published and ours", "Models and devices"):
            page.get_by_role("link", name=name).click()
            page.get_by_role("heading", level=1, name=name).wait_for()
            assert page.locator('[data-testid="stException"]').count() == 0


def test_mlflow_shows_the_study_that_the_dashboard_links(runs: Path, told: dict[str, str]) -> None:
    from dashboards.logged import studies

    (found,) = studies(runs)
    with chromium() as page:
        page.goto(f"{told['mlflow']}/{found.page}")
        page.get_by_text("best_time_ratio").first.wait_for()
        assert "story" in page.locator("body").inner_text()


def test_optuna_dashboard_lists_the_study_by_its_run_s_name(told: dict[str, str]) -> None:
    with chromium() as page:
        page.goto(told["optuna"])
        page.get_by_text("story").first.wait_for()


def boxes(page: object, selector: str) -> list[dict[str, float]]:
    return [found.bounding_box() for found in page.locator(selector).all()]  # type: ignore[attr-defined]


def cells(page: object) -> str:
    """What stands in tables, which are drawn: their words lie in a table for those who cannot see."""
    return " ".join(page.locator('[data-testid="stDataFrame"] [role="gridcell"]').all_text_contents())  # type: ignore[attr-defined]
