"""Standard output and standard error of a command: the answer on one, everything else on the other."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any


@contextlib.contextmanager
def answer_stream() -> Iterator[IO[str]]:
    """Open the process's standard output for the answer alone.

    Inside the `with` block, output of libraries and child processes goes to standard error.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(stdout), "w", encoding="utf-8") as out, contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def print_json(document: Any, out: IO[str]) -> None:
    """Print a document as one line of JSON."""
    out.write(json.dumps(document) + "\n")


def print_note(text: str) -> None:
    """Print one line for people on standard error."""
    print(text, file=sys.stderr, flush=True)
