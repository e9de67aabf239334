"""YAML with the line of every key, so that an error can say where."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import ConfigError, nearest

KeyPath = tuple[int | str, ...]
"""Keys and list positions, from the outermost to the innermost."""


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping, and on which line of which file each part of it stands."""

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """`configs/gpt.yaml:7`: the line of the part, else of the innermost part around it that has one."""
        around = (path[:length] for length in range(len(path), 0, -1))
        line = next((self.lines[part] for part in around if part in self.lines), None)
        return self.name if line is None else f"{self.name}:{line}"


def read(path: Path) -> Document:
    """Read a file that holds one mapping; a key that stands twice is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [str(other) for other in sorted(path.parent.glob("*.y*ml"))]
        raise ConfigError(f"{path}: no such file{nearest(str(path), beside)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it ({error}); give a YAML file") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: holds no mapping; write at least `workload: NAME`")
        lines: dict[KeyPath, int] = {}
        _mark(node, (), lines, path)
        return Document(str(path), loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem}") from None
    finally:
        loader.dispose()


def scalar(text: str, where: str) -> Any:
    """A value as typed on a command line: `8`, `1e-3`, `true`, `[1, 2]`; anything else is a string."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{where}: {text!r} is a mapping; write it into a YAML file")
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError:
        raise ConfigError(f"{where}: cannot read {text!r} as a YAML value; put it in double quotes") from None
    finally:
        loader.dispose()


def text(data: Mapping[str, Any]) -> str:
    """YAML that `read` reads back equal."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Takes `1e-3` for a number, as YAML 1.2 does."""


class _Dumper(yaml.SafeDumper):
    """Quotes the string `1e-3`, since `_Loader` would take it for a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def _mark(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> None:
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                inner = (*path, key.value)
                line = key.start_mark.line + 1
                if inner in lines:
                    raise ConfigError(f"{file}:{line}: {key.value!r} stands twice; the first is on line {lines[inner]}")
                lines[inner] = line
                _mark(value, inner, lines, file)
        case yaml.SequenceNode():
            for position, value in enumerate(node.value):
                lines[*path, position] = value.start_mark.line + 1
                _mark(value, (*path, position), lines, file)
