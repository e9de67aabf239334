"""The command line's entry point: it runs a command and turns every error into one line and an exit code."""

import sys
from collections.abc import Sequence

from autotune.cli.app import app
from autotune.errors import AutotuneError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit the process with its code; an error is one line on standard error.

    `arguments` are those of the process by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "-v" in arguments or "--verbose" in arguments
    try:
        code = app(arguments or ["--help"], prog_name="autotune", standalone_mode=False)
        if code == INTERRUPTED:  # Ctrl-C, which typer turns into a return value
            code = _report_error("interrupted", INTERRUPTED, verbose=False)
    except AutotuneError as error:
        code = _report_error(f"{error}", error.exit_code, verbose)
    except BrokenPipeError:
        code = 1
    except Exception as error:  # noqa: BLE001 - any other exception is a defect of autotune, or a usage error of typer's
        if (format_message := getattr(error, "format_message", None)) is not None:
            code = _report_error(f"{_as_clause(format_message())}; try autotune --help", 2, verbose=False)
        else:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            hint = "" if verbose else "; run again with -v for the traceback"
            code = _report_error(f"internal error: {reason}{hint}", 1, verbose)
    sys.exit(code)


def _report_error(message: str, code: int, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _as_clause(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")
