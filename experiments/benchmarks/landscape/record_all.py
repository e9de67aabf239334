"""Record the landscapes of `landscapes.yaml` one after the other: one command for a quiet machine.

`python -m experiments.benchmarks.landscape.record_all`

Run it again to continue: landscapes with a file are skipped, and an interrupted study resumes in `runs/landscapes/NAME`.
`--fresh NAME` records one again. A landscape that fails is reported at the end, and the others are recorded.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.common.commands import run_to_end
from experiments.common.facts import ROOT

HERE = Path(__file__).parent
WORK = ROOT / "runs" / "landscapes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=HERE / "landscapes.yaml")
    parser.add_argument("--fresh", nargs="*", default=[], metavar="NAME", help="record these again")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the studies in progress")
    parser.add_argument("--list", action="store_true", help="only print what is left to record")
    options = parser.parse_args()
    document = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    names = [landscape["name"] for landscape in document["landscapes"]]
    if unknown := set(options.fresh) - set(names):
        parser.error(f"--fresh {' '.join(sorted(unknown))}: not in {options.config}; known: {', '.join(names)}")
    failed: list[str] = []
    for name, command in build_commands(document, options.out, options.work, options.fresh):
        print(f"{name}: {' '.join(command)}", flush=True)
        if options.list:
            continue
        if name in options.fresh:
            shutil.rmtree(options.work / name, ignore_errors=True)
        code = run_to_end([sys.executable, *command], cwd=ROOT).returncode
        if code > 128 or code < 0:  # a signal ends the command
            raise SystemExit(code if code > 128 else 128 - code)
        if code:
            failed.append(name)
    if failed:
        raise SystemExit(f"not recorded: {', '.join(failed)}; run the command again to continue")


def build_commands(
    document: dict[str, Any], out: Path, work: Path, fresh: Sequence[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Yield name and command of each landscape that has no file yet, or that is recorded again."""
    for landscape in document["landscapes"]:
        name, target = landscape["name"], out / f"{landscape['name']}.json"
        if target.exists() and name not in fresh:
            continue
        arguments = [f"{key}={json.dumps(value)}" for key, value in landscape.get("arguments", {}).items()]
        settings = {key: str(landscape.get(key, document.get(key))) for key in ("budget", "time", "trials", "samples")}
        options = [text for key, value in settings.items() for text in (f"--{key}", value)]
        yield (
            name,
            [
                "-m", "experiments.benchmarks.landscape", landscape["workload"], *options,
                "--stores", *landscape.get("stores", []), "--set", *arguments, "--out", str(target), "--work", str(work / name),
            ],
        )  # fmt: skip


if __name__ == "__main__":
    main()
