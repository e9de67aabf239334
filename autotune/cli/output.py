"""Standard output and standard error of a command: the answer on one, everything else on the other."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

from autotune.errors import ConfigError
from autotune.records.json_codec import without_infinities

document_printed = False
"""True after a command printed its JSON document: a script reads one document, so an error then prints none."""


_ESCAPES = {
    number: f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
    # C0 and C1 control characters, and those that change the direction of a line
    for number in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(number) not in "\n\t"
}


def escape_controls(text: str) -> str:
    r"""Return a text with visible escapes in place of control characters, which could command a terminal.

    >>> escape_controls("\x1b[2Jname")
    '\\x1b[2Jname'
    """
    return text.translate(_ESCAPES)


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    """Document that `--json` prints for a command that fails before its answer.

    >>> ErrorDocument("x.yaml: no such file; give a YAML file", "ConfigError", 2).next_step
    'give a YAML file'
    """

    message: str
    """Error in one line, as on standard error."""
    kind: str
    """Class of the error, `UsageError` for wrong options, or `Interrupted` for Ctrl-C."""
    exit_code: int
    """Exit code of the process."""

    @property
    def next_step(self) -> str:
        """Part of the message after its first semicolon; the help page of the command where it has none."""
        return self.message.partition("; ")[2] or "see autotune --help"

    def to_json(self) -> dict[str, Any]:
        """Return the document. It has the key `error` alone, which no answer of a command has."""
        content = {"message": self.message, "class": self.kind, "exit_code": self.exit_code}
        return {"error": {**content, "next_step": self.next_step}}


class PrintableStream:
    """Text stream whose control characters, other than line ends and tabs, are written as visible escapes."""

    def __init__(self, stream: IO[str]) -> None:
        self.unescaped = stream

    def write(self, text: str) -> int:
        """Write text; return the number of characters of the argument."""
        self.unescaped.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


@contextlib.contextmanager
def answer_stream() -> Iterator[IO[str]]:
    """Open the process's standard output for the answer alone.

    Inside the `with` block, output of libraries and child processes goes to standard error. Raises ConfigError where
    standard output is closed.
    """
    if sys.stdout is None:
        raise ConfigError("standard output is closed; redirect it to a file or to /dev/null")
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with (
            # a path that is no UTF-8 is printed with its own bytes
            os.fdopen(os.dup(stdout), "w", encoding="utf-8", errors="surrogateescape") as out,
            contextlib.redirect_stdout(sys.stderr),
        ):
            yield cast("IO[str]", PrintableStream(out))
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def print_json(document: Any, out: IO[str]) -> None:
    """Print a document as one line of JSON; a number that JSON lacks, such as infinity, is null."""
    global document_printed  # noqa: PLW0603 - it is one process's standard output
    out.write(json.dumps(without_infinities(document), allow_nan=False) + "\n")
    document_printed = True


def print_error(document: ErrorDocument) -> None:
    """Print the document of an error on standard output, unless the command printed its answer there."""
    if document_printed or sys.stdout is None:
        return
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(document.to_json()) + "\n")
        sys.stdout.flush()


def print_note(text: str) -> None:
    """Print one line for people on standard error."""
    with contextlib.suppress(OSError):  # after a lost connection there is no terminal, and the records matter more
        print(escape_controls(text), file=sys.stderr, flush=True)
