"""Pictures of the report and of the dashboard, made from a study that is run for them: `make screenshots`.

With `--runs DIR` of runs that are there already, and `--study NAME`, one of them.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import ROOT, chromium, environment, serving, settled

DOCS = Path(__file__).parent
STUDY = "mobilenet"
TUNE = (
    "tune", "mobilenet_v2", "--set", "batch=4", "--set", "size=160", "--budget", "55%", "--time", "110s", "--trials", "12",
    "--name", STUDY,
)  # fmt: skip


def main() -> None:
    """Into `docs/`, over the pictures that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--study", default=STUDY)
    given = parser.parse_args()
    if given.runs is not None:
        shoot(given.runs, given.study)
        return
    with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
        command = [sys.executable, "-m", "autotune", *TUNE]
        subprocess.run(command, cwd=directory, env=environment(), check=True)
        shoot(Path(directory) / "runs", STUDY)


def shoot(runs: Path, study: str) -> None:
    """The report's head, the study's page and two of its plans beside each other."""
    with chromium(height=830) as page:
        page.goto((runs / study / "report.html").resolve().as_uri())
        page.screenshot(path=DOCS / "report.png")
    with serving(runs) as told, chromium(height=830) as page:
        addresses = {"study": f"study?study={study}", "compare": f"compare?first_study={study}&second_study={study}"}
        for name, address in addresses.items():
            settled(page, f"{told['dashboard']}/{address}")
            page.screenshot(path=DOCS / f"dashboard-{name}.png")
    for path in sorted(DOCS.glob("*.png")):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
