"""What the commands share: the answer's stream, the harness of a config, the directory of a run."""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from autotune.errors import AutotuneError, ConfigError, StoreError

if TYPE_CHECKING:
    from autotune.measure.harness import Harness
    from autotune.records.config import Config


class Interrupted(AutotuneError):
    """A signal ended the command; what was recorded stays, and can be gone on with."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


@contextlib.contextmanager
def answering() -> Iterator[IO[str]]:
    """The real standard output, for the answer alone: whatever libraries and children print goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out, contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_json(document: Any, out: IO[str]) -> None:
    """One document, one line."""
    out.write(json.dumps(document) + "\n")


def say(text: str) -> None:
    """One plain line for people, beside the answer."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def harness(config: "Config", log_dir: Path | None = None) -> Iterator["Harness"]:
    """The harness of a config; without `log_dir` its files vanish with it."""
    from autotune.measure.harness import Harness

    stores = {str(name): Path(directory) for name, directory in config.stores.items()}
    check_stores(stores)
    with contextlib.ExitStack() as stack:
        logs = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-")))
        yield stack.enter_context(
            Harness(
                config.ref,
                log_dir=logs,
                stores=stores,
                device_kind=config.device,
                limit_bytes=config.limit_bytes,
                samples=config.samples,
                seed=config.seed,
                profile_cache=Path(config.runs) / "profile.json",
                memory_format=config.memory_format,
            )
        )


def check_stores(stores: dict[str, Path]) -> None:
    """Refuse a directory that no store could use, before anything slow begins."""
    for name, directory in stores.items():
        move = f"name another directory with --store {name}=DIR"
        if not directory.exists():
            raise StoreError(f"{name} store: no directory {directory}; create it, or {move}")
        if not directory.is_dir():
            raise StoreError(f"{name} store: {directory} is no directory; {move}")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise StoreError(f"{name} store: {directory} is read-only; {move}")


def run_dir(config: "Config", name: str | None) -> Path:
    """Of a new run; a name may be one that exists, then that run is gone on with."""
    if name is None:
        word = re.sub(r"[^A-Za-z0-9]+", "-", config.workload.removesuffix(".py")).strip("-").lower()
        name = f"{time.strftime('%Y-%m-%d_%H%M%S')}_{word}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"--name {name!r}: a plain name, no path; it becomes a directory in {config.runs}")
    return Path(config.runs) / name


def latest_run(runs: Path) -> Path:
    """The run that was worked on last."""
    found = [path.parent for path in runs.glob("*/trials.jsonl")]
    if not found:
        raise ConfigError(f"no run in {runs}/; make one with autotune tune, or name its directory")
    return max(found, key=lambda path: (path / "trials.jsonl").stat().st_mtime)
