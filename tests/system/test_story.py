"""The whole story in a browser: a study is run, its report opened from disk, the dashboard's pages visited."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from dashboards.mlflow_studies import load_studies
from tests.dashboards import sample_runs
from tests.support.browser import chromium, serving, settled
from tests.support.checkout import SIMULATED, environment

if TYPE_CHECKING:
    from playwright.sync_api import Page

MODEL = """
import torch
import autotune

def tiny(batch=16384, width=64, depth=12):
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return autotune.Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(batch, width))
"""
TUNE = ("tune", "mine.py:tiny", "--budget", "65%", "--trials", "4", "--time", "90s", "--name", "story")

PAGES = {
    "study?study=story": ("Study", ["ended after", "baseline", "BEST"], 1),
    "compare?first_study=story&second_study=story": ("Compare plans", ["Memory during one step", "recompute"], 1),
    "nightly": ("Nights", ["cause: environment", "regression", "nightly/torn cannot be shown"], 1),
    "published": ("Published claims", ["ratios reproduced", "dtr"], 1),
    "": ("Models and devices", ["mine.py:tiny()", "night chain", "other cannot be shown"], 0),
}
"""By address: the title, what is said, and how many charts are drawn. The first is visited before the app's own."""


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_study_is_run_its_report_opens_from_disk_and_every_page_shows_it_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = tuned(tmp_path)
    sample_runs.nights(runs)
    sample_runs.broken(runs)
    with chromium() as page:
        the_report_opens(page, runs / "story" / "report.html")
    with serving(runs) as told:
        assert told["notes"] == []
        with chromium() as page:
            for address in PAGES:
                the_page_shows(page, told, address)
            each_page_is_reached_from_another(page)
            the_servers_beside_have_the_study(page, told, runs)


def tuned(here: Path) -> Path:
    """The runs of a small study, on a harness that simulates."""
    (here / "mine.py").write_text(MODEL)
    command = [sys.executable, "-c", SIMULATED, *TUNE]
    done = subprocess.run(command, cwd=here, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "not logged" not in done.stderr
    return here / "runs"


def the_report_opens(page: "Page", report: Path) -> None:
    """From disk, whole, asking for nothing else."""
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    assert "fits in" in page.locator("h1").inner_text()
    drawn = [chart.bounding_box() for chart in page.locator("svg").all()]
    assert len(drawn) >= 2
    assert all(box is not None and box["width"] > 300 and box["height"] > 100 for box in drawn)
    # nothing lies outside of the page, which would have to be scrolled sideways
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert errors == []
    assert asked == [report.as_uri()]


def the_page_shows(page: "Page", told: dict[str, str], address: str) -> None:
    """Its title, its words, its charts, and links to the servers beside."""
    title, words, charts = PAGES[address]
    errors: list[str] = []
    hosts: set[str | None] = set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    settled(page, f"{told['dashboard']}/{address}")
    assert page.locator("h1").inner_text() == title
    assert page.locator('[data-testid="stException"]').count() == 0, title
    assert page.locator('[data-testid="stVegaLiteChart"] :is(svg, canvas)').count() >= charts, title
    # tables are drawn, a moment after the page; for those who cannot see, their words stand in it, once they are scrolled to
    for table in page.locator('[data-testid="stDataFrame"]').all():
        table.scroll_into_view_if_needed()
        table.locator('[role="gridcell"]').first.wait_for(state="attached")
    cells = page.locator('[data-testid="stDataFrame"] [role="gridcell"]').all_text_contents()
    said = " ".join((page.locator('[data-testid="stMain"]').inner_text(), *cells))
    assert [word for word in words if word not in said] == [], title
    links = [link.get_attribute("href") for link in page.locator('[data-testid="stSidebar"] a').all()]
    assert told["optuna"] in links
    assert any(link and link.startswith(f"{told['mlflow']}/#/") for link in links)
    assert errors == []
    assert hosts <= {"127.0.0.1", None}, title  # None: data in the address itself


def each_page_is_reached_from_another(page: "Page") -> None:
    """By the links at the side."""
    for title, _, _ in PAGES.values():
        page.locator('[data-testid="stSidebar"]').get_by_role("link", name=title).click()
        page.get_by_role("heading", level=1, name=title).wait_for()
        assert page.locator('[data-testid="stException"]').count() == 0, title


def the_servers_beside_have_the_study(page: "Page", told: dict[str, str], runs: Path) -> None:
    """MLflow on the page that the dashboard links, optuna-dashboard by the run's name."""
    (found,) = load_studies(runs)
    page.goto(f"{told['mlflow']}/{found.page}")
    page.get_by_text("best_time_ratio").first.wait_for()
    page.goto(told["optuna"])
    page.get_by_text("story").first.wait_for()
