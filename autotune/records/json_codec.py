"""Convert frozen dataclasses to JSON and back; unknown keys and wrong types raise an error that names them."""

import dataclasses
import functools
import json
import math
import os
import typing
from collections.abc import Hashable
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from autotune.errors import ConfigError
from autotune.records.run_dir import named_errors, write_text

T = TypeVar("T")

BLOCK_BYTES = 65_536
"""Bytes to read at once, from the end of a file backward, in the search for its last newline."""


def to_json(record: Any) -> Any:
    """Return a record as dicts, lists, strings and numbers; keys are field names, or `metadata["key"]`."""
    return _adapter(cast("Hashable", type(record))).dump_python(record, mode="json", by_alias=True)


def from_json(kind: type[T], data: Any, *, where: str) -> T:
    """Return a record of type `kind` from JSON data.

    Raises ConfigError for bad data; its message starts with `where`, a path or path:line.
    """
    from pydantic import ValidationError

    # validate as text: only for JSON does pydantic convert lists to tuples and names to enums, but not "2" to 2;
    # bytes of a child process that are not UTF-8 become question marks
    text = json.dumps(data, ensure_ascii=False).encode(errors="replace")
    try:
        return cast("T", _adapter(cast("Hashable", kind)).validate_json(text, strict=True))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
        raise ConfigError(f"{where}: {place}{_describe_error(first['type'], first['msg'], first['input'])}") from None


def parse_json(data: bytes) -> Any:
    """Return a JSON document in UTF-8; ValueError for anything else, whatever in it the parser stumbles over."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_whole(kind: type[T], path: Path, *, schema: int, what: str, again: str) -> T:
    """Read a file that `write_whole` wrote with this schema.

    Raises ConfigError that names the file, the first error in it and the remedy `again`; `what` names the kind of file.
    """
    try:
        document = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what} ({error.strerror}); {again}") from None
    except ValueError:
        raise ConfigError(f"{path}: not a {what} file: truncated or not JSON; {again}") from None
    if not isinstance(document, dict) or document.get("schema") != schema:
        version = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ConfigError(f"{path}: {what} schema {version!r}; this version reads {schema}; {again}")
    return from_json(kind, document, where=str(path))


def append_line(path: Path, record: Any) -> None:
    """Append a record as one line of JSON and sync it; an incomplete last line, left by a crash, is removed first."""
    line = json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n"
    with named_errors(path), path.open("a+b") as file:
        file.truncate(_complete_bytes(file))
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def without_infinities(document: Any) -> Any:
    """Return a JSON document in which numbers that JSON lacks are null: infinities and NaN.

    >>> without_infinities({"high": math.inf, "low": [0.5]})
    {'high': None, 'low': [0.5]}
    """
    match document:
        case dict():
            return {key: without_infinities(value) for key, value in document.items()}
        case list() | tuple():
            return [without_infinities(value) for value in document]
        case float() if not math.isfinite(document):
            return None
    return document


def read_lines(kind: type[T], path: Path, *, remedy: str) -> list[T]:
    """Read all complete lines; a missing file has none, and an incomplete last line is skipped.

    Raises ConfigError with the text `remedy` for a line that is no such record.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            document = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({_describe_parse_error(error)}); {remedy}") from None
        records.append(from_json(kind, document, where=where))
    return records


def _complete_bytes(file: IO[bytes]) -> int:
    """Return the number of bytes of an open file up to and including the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def write_whole(path: Path, record: Any, *, what: str, remedy: str = "name another file with -o") -> None:
    """Write a record as a JSON file, in one step.

    Raises ConfigError with the text `remedy` where the file cannot be written; `what` names the kind of file.
    """
    text = json.dumps(to_json(record), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the {what} ({error.strerror}); {remedy}") from None


def _describe_parse_error(error: ValueError) -> str:
    match error:
        case json.JSONDecodeError():
            return error.msg
        case UnicodeDecodeError():
            return "not UTF-8"
        case _:
            return str(error)


def read_optional(kind: type[T], path: Path, *, remedy: str) -> T | None:
    """Read a JSON file; None for a missing or empty one, ConfigError with the text `remedy` for one that is damaged."""
    data = path.read_bytes() if path.exists() else b""
    if not data:
        return None
    try:
        return from_json(kind, parse_json(data), where=str(path))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({_describe_parse_error(error)}); {remedy}") from None


def _describe_error(kind: str, message: str, value: object) -> str:
    match kind:
        case "unexpected_keyword_argument":
            return "unknown key; if a newer autotune wrote it, upgrade autotune, or else correct or remove the key"
        case "missing":
            return "missing"
        case _:
            return f"{message} (got {str(value)[:80]!r})"


@functools.cache
def _adapter(kind: Any) -> Any:
    # importing pydantic takes a quarter of a second, which `autotune --help` must not wait for
    from pydantic import TypeAdapter

    _forbid_unknown_keys(kind)
    return TypeAdapter(kind)


def _forbid_unknown_keys(kind: Any) -> None:
    """Make pydantic refuse unknown keys for a dataclass and all types of its fields; it reads this from the class."""
    if dataclasses.is_dataclass(kind) and not hasattr(kind, "__pydantic_config__"):
        # a field renamed in Python keeps its key in files: field(metadata={"key": "old_name"})
        keys = {field.name: field.metadata["key"] for field in dataclasses.fields(kind) if "key" in field.metadata}
        config = {"extra": "forbid", "alias_generator": lambda name: keys.get(name, name)}
        setattr(kind, "__pydantic_config__", config)  # noqa: B010 - mypy refuses an unknown attribute
        for hint in typing.get_type_hints(kind).values():
            _forbid_unknown_keys(hint)
    for part in typing.get_args(kind):
        _forbid_unknown_keys(part)
