"""Find out which words of a batch a step reads, such as the names of its files.

Functions in C read the characters of a `str` without any call of its methods. So the step runs once with objects in place
of the words that such functions refuse, and that note each read by Python.
"""

from collections.abc import Callable
from typing import Any


class _Opaque:
    """Word of which C code cannot read the characters. Python's reads are noted, and answered as by the word."""

    __slots__ = ("is_read", "word")

    def __init__(self, word: str) -> None:
        object.__setattr__(self, "word", word)
        object.__setattr__(self, "is_read", False)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return str  # isinstance(word, str) stays true, and reads no character
        return getattr(_read(self), name)

    def __radd__(self, other: Any) -> Any:
        return other + _read(self)

    def __rmod__(self, other: Any) -> Any:
        return other % _read(self)

    def __int__(self) -> int:
        return int(_read(self))

    def __float__(self) -> float:
        return float(_read(self))

    def __bool__(self) -> bool:
        return bool(_read(self))


def _read(part: Any) -> Any:
    """Return the word of a part, and note that it is read; any other part as it is."""
    if type(part) is not _Opaque:
        return part
    object.__setattr__(part, "is_read", True)
    return object.__getattribute__(part, "word")


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def note(self: Any, *arguments: Any) -> Any:
        return method(_read(self), *map(_read, arguments))

    return note


for _name in (
    "__eq__", "__ne__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__contains__", "__getitem__",
    "__iter__", "__add__", "__mul__", "__rmul__", "__mod__", "__format__", "__str__", "__repr__",
):  # fmt: skip
    setattr(_Opaque, _name, _noting(_name))


class Words:
    """Words among the constants of a batch, and which of them the step reads. By default it reads them all."""

    def __init__(self, constants: list[Any]) -> None:
        self._constants = list(constants)
        self._unread: set[int] = set()
        self.passed: dict[int, tuple[int, int | None]] = {}
        """Leaves of the step's result that are unread words: constant of each, and position within it if it is a list."""

    def find_unread(self, run: Callable[[list[Any]], list[Any] | None]) -> None:
        """Find the constants whose words a step does not read.

        `run` runs it with other constants, and returns the leaves of its result, or None if it does not take its usual way. A
        run that fails may have failed because C code got an object in place of a word. The words that were read before are
        then given as they are, in another run. Where none was read before, each constant is tried alone.
        """
        positions = {position for position, part in enumerate(self._constants) if _words(part)}
        while positions:
            is_complete, read = self._run_without(positions, run)
            positions -= read
            if is_complete:
                self._unread = positions
            if is_complete or not read:
                break
        if not self._unread:
            alone = {position for position in positions if self._run_without({position}, run) == (True, set())}
            if alone and self._run_without(alone, run) == (True, set()):
                self._unread = alone

    def _run_without(self, positions: set[int], run: Callable[[list[Any]], list[Any] | None]) -> tuple[bool, set[int]]:
        """Run a step without the words at these positions; return whether it takes its usual way, and the positions it read."""
        parts = [_replace(part) if number in positions else part for number, part in enumerate(self._constants)]
        try:
            leaves = run(parts)
        except Exception:  # noqa: BLE001 - C code and the user's code raise anything on an object that is no word
            leaves = None
        read = {position for position in positions if any(map(_is_read, _words(parts[position])))}
        places: dict[int, tuple[int, int | None]] = {}
        for position in positions - read:
            part = parts[position]
            words = {id(part): None} if type(part) is _Opaque else {id(word): index for index, word in enumerate(part)}
            places |= {key: (position, index) for key, index in words.items()}
        # the last run that takes the usual way is the one that decides
        self.passed = {leaf: places[id(word)] for leaf, word in enumerate(leaves or ()) if id(word) in places}
        return leaves is not None, read

    def is_unread(self, position: int, part: Any) -> bool:
        """Return whether a part of another batch may differ, because the step reads none of its words."""
        if position not in self._unread:
            return False
        first = self._constants[position]
        if isinstance(part, str):
            return isinstance(first, str)
        return type(part) is type(first) and len(part) == len(first) and all(type(word) is str for word in part)


def _words(part: Any) -> list[Any]:
    """Return the words in a constant: a string, or a list or a tuple of strings. Any other constant has none."""
    if type(part) in (str, _Opaque):
        return [part]
    is_list = type(part) in (list, tuple) and all(type(word) in (str, _Opaque) for word in part)
    return list(part) if is_list else []


def _replace(part: Any) -> Any:
    return _Opaque(part) if type(part) is str else type(part)(map(_Opaque, part))


def _is_read(word: Any) -> bool:
    read: bool = object.__getattribute__(word, "is_read")
    return read
