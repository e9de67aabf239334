"""Take the screenshots of the report and the dashboard for the documentation: `make screenshots`.

Runs a study first. With `--runs DIR --study NAME` an existing study is used instead.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.browser import chromium, serving, settled
from tests.support.checkout import ROOT, environment

PICTURES = Path(__file__).parent / "images"
STUDY = "mobilenet"
TUNE = (
    "tune", "mobilenet_v2", "--set", "batch=4", "--set", "size=160", "--budget", "55%", "--time", "6m", "--trials", "12",
    "--name", STUDY,
)  # fmt: skip


def main() -> None:
    """Write the screenshots to `docs/`, replacing the old ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--study", default=STUDY)
    arguments = parser.parse_args()
    if arguments.runs is not None:
        take_screenshots(arguments.runs, arguments.study)
        return
    with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
        command = [sys.executable, "-m", "autotune", *TUNE]
        subprocess.run(command, cwd=directory, env=environment(), check=True)
        take_screenshots(Path(directory) / "runs", STUDY)


def take_screenshots(runs: Path, study: str) -> None:
    """Take screenshots of the report, and of the comparison of two of its plans."""
    with chromium(height=830) as page:
        page.goto((runs / study / "report.html").resolve().as_uri())
        page.screenshot(path=PICTURES / "report.png")
    with serving(runs) as addresses, chromium(height=830) as page:
        settled(page, f"{addresses['dashboard']}/compare?first_study={study}&second_study={study}")
        page.screenshot(path=PICTURES / "dashboard-compare.png")
    for path in sorted(PICTURES.glob("*.png")):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
