"""`autotune reproduce`: published claims beside our numbers, every experiment in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import autotune
from autotune.cli.commands.session import answering, print_json, say
from autotune.errors import ConfigError, ExperimentError, nearest
from autotune.records.json_codec import to_json
from autotune.report.claims import HEAD, RESULT, Claim, Verdict, counted, experiments, into_page, read, rows

MEASURED = "measured"
"""Kind of a claim whose experiment must have the machine to itself."""
HELD = (Verdict.REPRODUCED, Verdict.RATIOS)


def run(names: Sequence[str], *, every: bool, listed: bool, table: bool, root: Path | None, json: bool) -> None:
    """Run the experiments named and print their claims; ExperimentError where one fails, or a claim that held no longer does."""
    if [bool(names), every, listed, table].count(True) != 1:
        raise ConfigError("name experiments, or one of --all, --list and --table; --list shows the names")
    root = _root(root)
    known = experiments(root)
    for name in names:
        if name not in known:
            raise ConfigError(f"{root / name} holds no {RESULT}: no experiment of claims{nearest(name, known)}")
    before = {name: read(folder) for name, folder in known.items()}
    if table:
        _write_table(root.parent / "README.md", before)
        return
    found, failed = (before, []) if listed else _run_all({name: known[name] for name in (names or known)})
    with answering() as out:
        if json:
            document = {
                name: [to_json(claim) | {"verdict": claim.verdict.value} for claim in claims]
                for name, claims in found.items()
            }
            print_json(document, out)
        else:
            out.write("\n".join(_aligned([HEAD, *rows(found)])) + f"\n\n{counted(found)}\n")
    fallen = [f"{name}: {text}" for name, claims in found.items() for text in _fallen(before[name], claims)]
    if fallen:
        failed.append(f"held before and does no longer: {'; '.join(fallen)}")
    if failed:
        raise ExperimentError("; ".join(failed))


def _root(given: Path | None) -> Path:
    """The folder of experiments: the one named, or that of the checkout which this package is run from."""
    if given is not None and not given.is_dir():
        raise ConfigError(f"--experiments {given}: no such folder")
    root = given or Path(autotune.__file__).parents[1] / "experiments"
    if not root.is_dir():
        raise ConfigError(
            "an installed package has no experiments: run from a checkout of the project, or name its folder with "
            "--experiments DIR"
        )
    return root.resolve()


def _run_all(folders: Mapping[str, Path]) -> tuple[dict[str, tuple[Claim, ...]], list[str]]:
    """Claims of all that ran, and what is to be said of those that did not: one that fails keeps no other from its turn.

    What is simulated runs beside each other, as many at once as there are cores; then what is measured, alone.
    """
    kinds = {name: {claim.kind for claim in read(folder)} for name, folder in folders.items()}
    measuring = {name for name in folders if MEASURED in kinds[name]}
    failed: dict[str, str] = {}

    def part(name: str, *arguments: str) -> None:
        try:
            _run(folders[name], *arguments)
        except ExperimentError as error:
            failed[name] = str(error)
            say(f"{name}: {error}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = [
            pool.submit(part, name, *(("--parts", "simulated") if name in measuring else ()))
            for name in folders
            if kinds[name] != {MEASURED}
        ]
        try:
            for one in begun:
                one.result()
        except BaseException:  # Ctrl-C ends those that run; no further one is begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for name in folders:
        if name in measuring and name not in failed:
            part(name, *(("--parts", MEASURED) if kinds[name] != {MEASURED} else ()))
    found = {}
    for name, folder in folders.items():
        try:
            if name not in failed:
                found[name] = read(folder)
        except ConfigError as error:
            failed[name] = str(error)
    return found, list(failed.values())


def _run(folder: Path, *arguments: str) -> None:
    """Run one; what it prints goes to standard error."""
    what = " ".join((folder.name, *arguments))
    say(f"{what}: running {folder / 'run.py'}")
    began = time.monotonic()
    written = (folder / RESULT).stat().st_mtime_ns
    command = [sys.executable, str(folder / "run.py"), *arguments]
    done = subprocess.run(command, cwd=folder.parent.parent, stdout=sys.stderr, check=False)
    if done.returncode:
        raise ExperimentError(f"{folder / 'run.py'} ended with {done.returncode}; what it printed stands above")
    if (folder / RESULT).stat().st_mtime_ns == written:
        raise ExperimentError(f"{folder / 'run.py'} wrote no {RESULT}: what stands there is of an earlier run")
    say(f"{what}: took {time.monotonic() - began:.0f} s")


def _fallen(before: Sequence[Claim], now: Sequence[Claim]) -> Iterator[str]:
    """Claims that held and hold no longer."""
    held = {claim.text for claim in before if claim.verdict in HELD}
    return (claim.text for claim in now if claim.text in held and claim.verdict not in HELD)


def _write_table(page: Path, results: Mapping[str, Sequence[Claim]]) -> None:
    if not page.is_file():
        raise ConfigError(f"{page}: no such page to write the table into")
    page.write_text(into_page(page.read_text(), results))
    say(f"{page}: {sum(map(len, results.values()))} claims")


def _aligned(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    wide = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, wide, strict=True)).rstrip()
