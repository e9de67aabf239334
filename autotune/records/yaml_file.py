"""Read YAML with the line of every key, so that an error names the line."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError, nearest

KeyPath = tuple[int | str, ...]
"""Path of a value: keys and list positions, outermost first."""


MAX_NODES = 100_000
"""Maximum number of values of a document, every alias counted as what it stands for."""
# of constructors, for values such as `2020-13-45` and `!!int abc`, and of nesting
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, KeyError)


@dataclass(frozen=True, slots=True)
class Document:
    """Mapping of a YAML file, with the line of each part."""

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Return `configs/gpt.yaml:7`, the line of a part or else of the innermost part around it that has one."""
        enclosing = (path[:length] for length in range(len(path), 0, -1))
        line = next((self.lines[part] for part in enclosing if part in self.lines), None)
        return self.name if line is None else f"{self.name}:{line}"


def read(path: Path) -> Document:
    """Read a file with one mapping.

    Raises ConfigError for a missing file, for other YAML, and for a repeated key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [str(other) for other in sorted(path.parent.glob("*.y*ml"))]
        hint = (
            nearest(str(path), siblings) if siblings else f"; {path.parent.absolute()} has no YAML file; give the path"
        )
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it ({error}); give a YAML file") from None
    try:
        loader, node = _compose(text)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: contains no mapping; write at least `workload: NAME`")
        lines: dict[KeyPath, int] = {}
        _record_lines(node, (), lines, path)
        return Document(str(path), loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, int(error.position)) + 1}"
        raise ConfigError(f"{path}{line}: not YAML: a control character; remove it") from None
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: not a usable YAML value: {error}; put text in double quotes") from None


def scalar(text: str, where: str) -> Any:
    """Parse a value from a command line: `8`, `1e-3`, `true`, `[1, 2]`; anything else is a string.

    >>> scalar("1e-3", "--set lr")
    0.001
    """
    try:
        loader, node = _compose(text)
        if isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{where}: {text!r} is a mapping; write it into a YAML file")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, *_UNREADABLE):
        raise ConfigError(f"{where}: cannot read {text[:80]!r} as a YAML value; put it in double quotes") from None


def text(data: Mapping[str, Any]) -> str:
    """Return YAML that `read` converts back to equal data."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False)


def _compose(text: str) -> "tuple[_Loader, yaml.Node | None]":
    """Return the loader and the root node of a text; ValueError where its aliases make it endless or too large."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is not None:
        _count_nodes(node, {})
    return loader, node


def _count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values below a node, aliases expanded; a node that is being counted has the count 0."""
    if id(node) in counts:
        if counts[id(node)] == 0:
            raise ValueError("an alias contains itself")
        return counts[id(node)]
    counts[id(node)] = 0
    match node:
        case yaml.MappingNode():
            parts = [part for pair in node.value for part in pair]
        case yaml.SequenceNode():
            parts = node.value
        case _:
            parts = []
    total = 1 + sum(_count_nodes(part, counts) for part in parts)
    if total > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} values, aliases expanded")
    counts[id(node)] = total
    return total


class _Loader(yaml.SafeLoader):
    """Loader that reads `1e-3` as a number, as YAML 1.2 does."""


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes the string `1e-3`, which `_Loader` would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def _record_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> None:
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(f"{file}:{key.start_mark.line + 1}: a key is a list or a mapping; write a name")
                if key.tag == "tag:yaml.org,2002:bool":  # YAML 1.1 takes the name `on` for a truth value
                    key.tag = "tag:yaml.org,2002:str"
                inner = (*path, key.value)
                line = key.start_mark.line + 1
                if inner in lines:
                    raise ConfigError(
                        f"{file}:{line}: {key.value!r} is repeated; the first one is on line {lines[inner]}"
                    )
                lines[inner] = line
                _record_lines(value, inner, lines, file)
        case yaml.SequenceNode():
            for position, value in enumerate(node.value):
                lines[*path, position] = value.start_mark.line + 1
                _record_lines(value, (*path, position), lines, file)
