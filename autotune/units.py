"""Convert bytes and seconds between text for people and numbers. Code and files hold bytes and seconds."""

import math
import re
from fractions import Fraction

from autotune.errors import ConfigError

MAX_DIGITS = 30
"""Maximum length of a number of bytes."""
_BYTE_UNITS = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SECOND_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def fmt_bytes(nbytes: float) -> str:
    """Return bytes as text: mebibytes with one decimal, or plain bytes below 100 KiB.

    >>> fmt_bytes(2**29)
    '512.0 MiB'
    """
    return f"{nbytes:.0f} B" if abs(nbytes) < 100 * 2**10 else f"{nbytes / 2**20:.1f} MiB"


def fmt_seconds(seconds: float) -> str:
    """Return seconds as text: `12.3 ms` below one second, `4.56 s` below two minutes, `12m05s` above.

    Infinity and NaN become `-`.
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.99995:  # above, one decimal would round up to 1000.0 ms
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as `6GiB`, `512MB` or `123456B`; `GiB` is 1024 cubed, `GB` is 1000 cubed.

    Raises:
        ConfigError: The text is no number with a unit.

    >>> parse_bytes("1.5KiB")
    1536
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?i?B)", text.strip())
    if match is None or match[2] not in _BYTE_UNITS:
        raise ConfigError(f"cannot read {text[:60]!r} as bytes; write 6GiB, 512MiB or 123456B")
    if len(match[1]) > MAX_DIGITS:
        raise ConfigError(
            f"{match[1][:20]}... has {len(match[1])} digits, too many as bytes; write 6GiB, 512MiB or 123456B"
        )
    return int(Fraction(match[1]) * _BYTE_UNITS[match[2]])


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as `90s`, `10m`, `10min` or `1.5h`.

    Raises:
        ConfigError: The text is no number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h)", text.strip())
    if match is None:
        raise ConfigError(f"cannot read {text!r} as a time; write 90s, 10m or 1.5h")
    return float(match[1]) * _SECOND_UNITS[match[2]]


def mib(nbytes: float | None) -> str:
    """Return mebibytes with one decimal and without the unit; `-` for None."""
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f}"
