"""Frozen dataclasses to JSON and back, checked on reading: unknown keys and wrong types are refused by name."""

import contextlib
import dataclasses
import functools
import json
import os
import typing
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

from autotune.errors import ConfigError

T = TypeVar("T")


def to_json(record: Any) -> Any:
    """The record as dicts, lists, strings and numbers; field names are the types' own."""
    return _adapter(cast("Hashable", type(record))).dump_python(record, mode="json")


def from_json(kind: type[T], data: Any, *, where: str) -> T:
    """Read a record; `where` (a path, or path:line) stands in front of the ConfigError that bad data raises."""
    from pydantic import ValidationError

    # as text once more: only for JSON does pydantic take lists as tuples and names as enums, yet no "2" for 2;
    # a child's undecodable bytes become question marks
    text = json.dumps(data, ensure_ascii=False).encode(errors="replace")
    try:
        return cast("T", _adapter(cast("Hashable", kind)).validate_json(text, strict=True))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
        raise ConfigError(f"{where}: {place}{_fault(first['type'], first['msg'], first['input'])}") from None


def read_whole(kind: type[T], path: Path, *, schema: int, what: str, again: str) -> T:
    """What `write_whole` wrote, of that schema; ConfigError names the file and the first thing wrong. `again`: the cure."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what} ({error.strerror}); {again}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{path}: not a {what} file: truncated or not JSON; {again}") from None
    if not isinstance(document, dict) or document.get("schema") != schema:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ConfigError(f"{path}: {what} schema {found!r}; this version reads {schema}; {again}")
    return from_json(kind, document, where=str(path))


def append_line(path: Path, record: Any) -> None:
    """Add one line of JSON and sync it; a torn last line, left by a crash, is cut off first."""
    line = json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n"
    with path.open("a+b") as file:
        file.truncate(_whole_lines(path))
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_lines(kind: type[T], path: Path, *, cure: str) -> list[T]:
    """All whole lines of a file that may not be there; a torn last line is passed over. `cure`: what to do about a bad one."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes()[: _whole_lines(path)].splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON ({error.msg}); {cure}") from None
        found.append(from_json(kind, document, where=where))
    return found


def _whole_lines(path: Path) -> int:
    """Bytes up to and with the last newline."""
    return path.read_bytes().rfind(b"\n") + 1


def write_whole(path: Path, record: Any, *, what: str, cure: str = "name another file with -o") -> None:
    """The record as a file of JSON, whole or not at all; `what` is the file's to whoever named it: `plan`. ConfigError
    with the `cure` where it cannot be written.
    """
    text = json.dumps(to_json(record), indent=1) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the {what} ({error.strerror}); {cure}") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _fault(fault: str, message: str, found: object) -> str:
    match fault:
        case "unexpected_keyword_argument":
            return "unknown key"
        case "missing":
            return "missing"
        case _:
            return f"{message} (got {str(found)[:80]!r})"


@functools.cache
def _adapter(kind: Any) -> Any:
    # pydantic takes a quarter of a second to import: `autotune --help` must not pay for it
    from pydantic import TypeAdapter

    _forbid_unknown_keys(kind)
    return TypeAdapter(kind)


def _forbid_unknown_keys(kind: Any) -> None:
    """Tell pydantic, which reads its settings off the class, for a dataclass and all that it is made of."""
    if dataclasses.is_dataclass(kind) and not hasattr(kind, "__pydantic_config__"):
        setattr(kind, "__pydantic_config__", {"extra": "forbid"})  # noqa: B010 - mypy knows no such attribute
        for hint in typing.get_type_hints(kind).values():
            _forbid_unknown_keys(hint)
    for part in typing.get_args(kind):
        _forbid_unknown_keys(part)
