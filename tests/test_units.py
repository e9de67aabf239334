import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.units import fmt_bytes, fmt_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6GiB", 6 * 2**30),
        ("512MiB", 2**29),
        ("123456B", 123456),
        ("1.5KiB", 1536),
        (" 2 TiB ", 2**41),
        ("0B", 0),
        (f"{2**53 + 1}B", 2**53 + 1),
        ("6GB", 6 * 10**9),
        ("1.5MB", 1_500_000),
        ("10 kB", 10_000),
    ],
)
def test_bytes_are_read_in_binary_and_in_decimal_units(text: str, nbytes: int):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "12", "6gb", "6kb", "6 gib", "-1MiB", "1e3B", "MiB", "6iB", "1.MiB", "nanB"])
def test_bytes_without_a_known_unit_are_refused_with_examples(text: str):
    with pytest.raises(ConfigError, match="as bytes; write 6GiB, 512MiB or 123456B"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_plain_bytes_are_read_exactly(nbytes: int):
    assert parse_bytes(f"{nbytes}B") == nbytes


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("10min", 600), ("1.5h", 5400)])
def test_times_are_read_in_seconds(text: str, seconds: float):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["10", "10mins", "1 day", "", "-5s"])
def test_times_without_a_known_unit_are_refused_with_examples(text: str):
    with pytest.raises(ConfigError, match="write 90s, 10m or"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (102399, "102399 B"), (102400, "0.1 MiB"), (2**29, "512.0 MiB"), (-(2**20), "-1.0 MiB")],
)
def test_bytes_are_shown_in_mebibytes_above_100_kibibytes(nbytes: int, text: str):
    assert fmt_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (4.561, "4.56 s"), (119.5, "119.50 s"), (725, "12m05s"), (math.nan, "-"), (math.inf, "-")],
)
def test_seconds_are_shown_as_people_say_them(seconds: float, text: str):
    assert fmt_seconds(seconds) == text


def test_seconds_never_round_up_to_a_thousand_milliseconds():
    assert fmt_seconds(0.99996) == "1.00 s"
