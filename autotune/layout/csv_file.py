"""Read and write layout problems as minimalloc's CSV: one row per buffer with id, half-open life, size and offset."""

import csv
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import ConfigError
from autotune.layout.buffers import Buffers, Layout

MAX_BYTES = 2**62
"""Maximum sum of the sizes, in bytes; and the maximum of every number of a row."""
COLUMNS = ("id", "lower", "upper", "size")


def read(path: Path, *, alignment: int = 1) -> tuple[tuple[str, ...], Buffers]:
    """Return the ids and the buffers of a CSV file, with sizes rounded up to the alignment. Other columns are ignored.

    Raises:
        ConfigError: The file or a row cannot be read; the message names the line.
    """
    try:
        # spreadsheets may begin a file with a byte-order mark
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: no column {missing[0]!r}; its first line must be {','.join(COLUMNS)}")
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a CSV of {','.join(COLUMNS)}") from error
    ids: set[str | None] = set()
    for line, row in rows:
        if row["id"] in ids:
            raise ConfigError(f"{path}:{line}: id is {row['id']!r} again; give each buffer an id of its own")
        ids.add(row["id"])
    numbers = [[_number(path, line, name, row[name]) for name in COLUMNS[1:]] for line, row in rows]
    for (line, _), (lower, upper, size) in zip(rows, numbers, strict=True):
        if upper <= lower or size < 0:
            raise ConfigError(f"{path}:{line}: {size} bytes from {lower} to {upper}; a life ends after it begins")
    # offsets are 64-bit numbers
    if sum(size + alignment for _, _, size in numbers) > MAX_BYTES:
        raise ConfigError(f"{path}: the buffers have more than {MAX_BYTES} bytes together; give sizes in bytes")
    born, died, sizes = ([row[column] for row in numbers] for column in range(3))
    return tuple(row["id"] for _, row in rows), Buffers.from_lives(
        sizes, born, died, alignment=alignment, wide_alignment=alignment
    )


def write(path: Path, ids: Sequence[str], buffers: Buffers, layout: Layout | None = None) -> None:
    """Write the buffers, with their offsets if there is a layout."""
    columns = [ids, buffers.born.tolist(), buffers.died.tolist(), buffers.sizes.tolist()]
    columns += [layout.offsets] if layout else []
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*COLUMNS, *(["offset"] if layout else [])])
            writer.writerows(zip(*columns, strict=True))
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the layout ({error.strerror}); name another file with -o") from None


def _number(path: Path, line: int, name: str, text: str | None) -> int:
    try:
        number = int(text or "")
    except ValueError:
        raise ConfigError(f"{path}:{line}: {name} is {text!r}; it must be a whole number") from None
    if abs(number) > MAX_BYTES:
        raise ConfigError(f"{path}:{line}: {name} is {text!r}; it must be at most {MAX_BYTES}")
    return number
