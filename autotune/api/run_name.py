"""Choose the directory of a run from its name, or name it after time and workload."""

import re
import time
from pathlib import Path

from autotune.errors import ConfigError
from autotune.records.config import Config
from autotune.records.run_dir import RESERVED_NAMES

MAX_NAME_BYTES = 200
"""Maximum length of a run's name; a file name has 255 bytes, and drafts of a plan file add to the name."""


def choose_run_dir(config: Config, name: str | None) -> Path:
    """Return the directory of a new run; with the name of an existing run, that run's directory.

    Without a name the directory is made, so that no other run gets it.

    Raises ConfigError for a name that is empty, a path, not UTF-8, or too long for the files that are named after it.
    """
    if name is None:
        return _make_run_dir(config)
    if Path(name).name != name or name in ("", ".", ".."):
        raise ConfigError(
            f"name {name!r}: give a plain name, neither empty nor a path; it becomes a directory in {config.runs}"
        )
    if name in RESERVED_NAMES:
        raise ConfigError(f"name {name!r}: {config.runs}/{name} has records of another kind; give another name")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # plan files name the run's directory, and they are UTF-8
        raise ConfigError(f"name {name!r}: not valid UTF-8; give another name") from None
    if length > MAX_NAME_BYTES:
        raise ConfigError(f"name {name[:40]!r}...: {length} bytes; give at most {MAX_NAME_BYTES}")
    return Path(config.runs) / name


def _make_run_dir(config: Config) -> Path:
    """Make a directory named after time and workload; runs that begin in one second are numbered."""
    workload = re.sub(r"[^A-Za-z0-9]+", "-", config.workload.removesuffix(".py")).strip("-").lower()[-100:]
    name, number, runs = f"{time.strftime('%Y-%m-%d_%H%M%S')}_{workload}", 1, Path(config.runs)
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        run_dir = runs / (name if number == 1 else f"{name}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run_dir
