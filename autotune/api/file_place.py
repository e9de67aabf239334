"""Check the argument `out` of a function before the work whose result belongs there."""

from pathlib import Path

from autotune.errors import ConfigError
from autotune.records.run_dir import check_file_place


def check_out(out: str | Path | None) -> None:
    """Raise ConfigError where no file can be written at `out`; None is no file."""
    try:
        check_file_place(None if out is None else Path(out))
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot write there ({error.filename}: {error.strerror}); name another file by out="
        ) from None
