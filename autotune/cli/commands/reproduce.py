"""`autotune reproduce`: reproduce published claims, every experiment in its own process."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import autotune
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import ConfigError, ExperimentError, nearest
from autotune.records.json_codec import to_json
from autotune.report.claims import (
    HEAD,
    RESULT,
    Claim,
    ClaimVerdict,
    claim_rows,
    count_verdicts,
    find_experiments,
    read,
    source_lines,
)

MEASURED = "measured"
"""Kind of a claim whose experiment must run alone on the machine."""
REPRODUCED = (ClaimVerdict.REPRODUCED, ClaimVerdict.RATIOS, ClaimVerdict.BOUND)
"""Verdicts of a claim that holds."""


def run(names: Sequence[str], *, every: bool, listed: bool, root: Path | None, json: bool) -> None:
    """Run experiments and print their claims beside the published ones.

    Raises ExperimentError where an experiment fails, or a claim that was reproduced before is not any more.
    """
    if [bool(names), every, listed].count(True) != 1:
        raise ConfigError("name experiments, or one of --all and --list; --list shows the names")
    root = _find_root(root)
    folders = find_experiments(root)
    for name in names:
        if name not in folders:
            raise ConfigError(f"{root / name} contains no {RESULT}: no experiment of claims{nearest(name, folders)}")
    chosen = {name: folders[name] for name in (names or folders)}
    before, damaged = _read_all(chosen)
    results, failures = (before, list(damaged.values())) if listed else _run_all(chosen, before)
    with answer_stream() as out:
        if json:
            document = {
                name: [to_json(claim) | {"verdict": claim.verdict.value} for claim in claims]
                for name, claims in results.items()
            }
            print_json(document, out)
        else:
            out.write("\n".join(_align([HEAD, *claim_rows(results)])))
            out.write("\n\nSources\n" + "\n".join(source_lines(results)) + f"\n\n{count_verdicts(results)}\n")
    lost = [
        f"{name}: {text}" for name, claims in results.items() for text in _lost_claims(before.get(name, ()), claims)
    ]
    if lost:
        failures.append(f"reproduced before and not any more: {'; '.join(lost)}")
    if failures:
        raise ExperimentError("; ".join(failures))


def _find_root(folder: Path | None) -> Path:
    """Return the folder of experiments: `folder`, or by default that of this checkout."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--experiments {folder}: no such folder; name the one that has the experiments")
    root = folder or Path(autotune.__file__).parents[1] / "experiments" / "claims"
    if not root.is_dir():
        raise ConfigError(
            "an installed package has no experiments; run from a checkout of the project, or name its folder with "
            "--experiments DIR"
        )
    return root.resolve()


def _read_all(folders: Mapping[str, Path]) -> tuple[dict[str, tuple[Claim, ...]], dict[str, str]]:
    """Return the claims on record, and the reason for each result file that is damaged."""
    claims, damaged = {}, {}
    for name, folder in folders.items():
        try:
            claims[name] = read(folder)
        except ConfigError as error:
            damaged[name] = str(error)
    return claims, damaged


def _run_all(
    folders: Mapping[str, Path], before: Mapping[str, Sequence[Claim]]
) -> tuple[dict[str, tuple[Claim, ...]], list[str]]:
    """Return the claims of all experiments that succeeded, and the failures of the others.

    Simulated parts run first, one on each core; then each measured part runs alone. So does an experiment whose result
    file is damaged and names no parts. `before` are the claims on record.
    """
    kinds = {name: {claim.kind for claim in before.get(name, ())} for name in folders}
    whole = {name for name in folders if kinds[name] <= {MEASURED}}
    measured = {name for name in folders if MEASURED in kinds[name]} | whole
    failures: dict[str, str] = {}

    def run_part(name: str, *arguments: str) -> None:
        try:
            _run_experiment(folders[name], *arguments)
        except ExperimentError as error:
            failures[name] = str(error)
            print_note(f"{name}: {error}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [
            pool.submit(run_part, name, *(("--parts", "simulated") if name in measured else ()))
            for name in folders
            if name not in whole
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C ends the running experiments; no other may start
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for name in folders:
        if name in measured and name not in failures:
            run_part(name, *(() if name in whole else ("--parts", MEASURED)))
    claims, damaged = _read_all({name: folder for name, folder in folders.items() if name not in failures})
    return claims, list((failures | damaged).values())


def _run_experiment(folder: Path, *arguments: str) -> None:
    """Run one experiment; its output goes to standard error."""
    label = " ".join((folder.name, *arguments))
    print_note(f"{label}: running {folder}")
    start = time.monotonic()
    modified = (folder / RESULT).stat().st_mtime_ns
    module, directory = _find_module(folder)
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.run(command, cwd=directory, stdout=sys.stderr, check=False)
    if process.returncode:
        raise ExperimentError(f"{folder} ended with {process.returncode}; see its output above")
    if (folder / RESULT).stat().st_mtime_ns == modified:
        raise ExperimentError(f"{folder} wrote no {RESULT}: the file is of an earlier run")
    print_note(f"{label}: took {time.monotonic() - start:.0f} s")


def _find_module(folder: Path) -> tuple[str, Path]:
    """Return the dotted name of an experiment, and the directory in which `python -m` finds it."""
    parts, directory = [folder.name], folder.parent
    while (directory / "__init__.py").exists():
        parts.insert(0, directory.name)
        directory = directory.parent
    return ".".join(parts), directory


def _lost_claims(before: Sequence[Claim], now: Sequence[Claim]) -> Iterator[str]:
    """Return the texts of claims that were reproduced before and are not any more.

    A measurement that decides nothing refutes nothing.
    """
    reproduced = {claim.text for claim in before if claim.verdict in REPRODUCED}
    holds = {*REPRODUCED, ClaimVerdict.UNDECIDED}
    return (claim.text for claim in now if claim.text in reproduced and claim.verdict not in holds)


def _align(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
