"""Command line of a benchmark that runs `autotune` on one config for a long time, and continues its results."""

import argparse
import shutil
from pathlib import Path

from autotune.records.run_dir import write_text
from experiments.common.facts import ROOT


def parse_paths(description: str, folder: Path, *, config: str, tiny: str, tiny_help: str) -> tuple[Path, Path, Path]:
    """Parse the command line; return the config, the directory of the runs, and that of the results.

    `--tiny` writes its config into the directory of the runs, and its results beside it. `--fresh` deletes the directory of the
    runs, and the benchmark's own files in that of the results: `NAME.json` and `summary.md`.

    Args:
        description: Text of `--help`.
        folder: Folder of the benchmark, which names the directories.
        config: Name of the default config below `configs/`.
        tiny: Text of the config of `--tiny`.
        tiny_help: Text of `--help` about `--tiny`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / config)
    parser.add_argument("--tiny", action="store_true", help=tiny_help)
    parser.add_argument("--fresh", action="store_true", help="delete earlier results and begin again")
    parser.add_argument("--out", type=Path, help="directory of the results")
    options = parser.parse_args()
    work = ROOT / "runs" / f"{folder.name}-{'tiny' if options.tiny else 'benchmark'}"
    out: Path = options.out or (work / "results" if options.tiny else folder / "results")
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
        # `--out` may name a directory with other files
        for name in (f"{folder.name}.json", "summary.md"):
            (out / name).unlink(missing_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if not options.tiny:
        return options.config.resolve(), work, out
    write_text(work / "tiny.yaml", tiny)
    return work / "tiny.yaml", work, out
