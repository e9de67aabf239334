"""A dashboard that runs, and Chromium to look at it; for the tests and for the pictures of the README."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.checkout import environment

if TYPE_CHECKING:
    from playwright.sync_api import Page


@contextlib.contextmanager
def serving(runs: Path) -> Iterator[dict[str, str]]:
    """Addresses of a dashboard over these runs and of the servers beside it, which end with the context."""
    command = [sys.executable, "-m", "autotune", "dashboard", "--runs", runs.name, "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True, cwd=runs.parent) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 900) -> "Iterator[Page]":
    """An empty page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # as root, which containers run as, it refuses to start in its sandbox
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()


def settled(page: "Page", address: str) -> None:
    """Go there, and wait until Streamlit has run the whole page and charts are drawn."""
    page.goto(address)
    page.wait_for_selector("h1")
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    page.wait_for_load_state("networkidle")
    page.wait_for_selector('[data-testid="stSkeleton"]', state="detached")
