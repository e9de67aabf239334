"""The command line's entry point: it runs a command and turns every error into one line and an exit code."""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.cli import output
from autotune.cli.app import app
from autotune.errors import AutotuneError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_FILE_ERRORS = {
    errno.EACCES: "name another place, or change its permissions",
    errno.EPERM: "name another place, or change its permissions",
    errno.EROFS: "name another place",
    errno.ENOSPC: "free space there, or name another place",
    errno.EDQUOT: "free space there, or name another place",
    errno.ENOTDIR: "a part of the path is a file; name another place",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name a directory",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "name another place",
    errno.EIO: "check the disk, or name another place",
}
"""Next step by the number of an error of the file system, which is the user's to fix."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit the process with its code; an error is one line on standard error.

    With `--json` an error is also a JSON document on standard output, unless the command printed its own.
    `arguments` are those of the process by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # closed: print would fall back to standard output
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
    verbose, json = "-v" in arguments or "--verbose" in arguments, "--json" in arguments
    output.document_printed = False
    try:
        code = app(arguments or ["--help"], prog_name="autotune", standalone_mode=False)
        if code == INTERRUPTED:  # Ctrl-C, which typer turns into a return value
            code = _report_error("Interrupted", "interrupted", INTERRUPTED, verbose=False, json=json)
    except AutotuneError as error:
        code = _report_error(type(error).__name__, f"{error}", error.exit_code, verbose, json)
    except BrokenPipeError:
        code = 1
    except Exception as error:  # noqa: BLE001 - any other exception is a defect of autotune, or a usage error of typer's
        kind = type(error).__name__
        if (format_message := getattr(error, "format_message", None)) is not None:
            context = getattr(error, "ctx", None)
            command = "autotune" if context is None else context.command_path
            message = f"{_as_clause(format_message())}; try {command} --help"
            code = _report_error("UsageError", message, 2, verbose=False, json=json)
        elif isinstance(error, OSError) and error.errno in _FILE_ERRORS:
            message = f"{error.filename or 'standard output'}: {error.strerror}; {_FILE_ERRORS[error.errno]}"
            code = _report_error(kind, message, 2, verbose, json)
        else:
            reason = f"{kind}: {error}".splitlines()[0]
            hint = "" if verbose else "; run again with -v for the traceback"
            code = _report_error(kind, f"internal error: {reason}{hint}", 1, verbose, json)
    sys.exit(code)


def _report_error(kind: str, message: str, code: int, verbose: bool, json: bool) -> int:
    if verbose:
        import traceback

        with contextlib.suppress(OSError):
            traceback.print_exc()
    line = output.escape_controls(" ".join(message.split()))
    output.print_note(f"error: {line}")
    if json:
        output.print_error(output.ErrorDocument(line, kind, code))
    return code


def _as_clause(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")
