"""Find out which words of a batch a step reads, such as the names of its files."""

from typing import Any


class _Word(str):
    """Word that notes whether it is read."""

    __slots__ = ("is_read",)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("is_read", "__class__"):
            str.__setattr__(self, "is_read", True)
        return str.__getattribute__(self, name)


def _noting(name: str) -> Any:
    method = getattr(str, name)

    def note(self: Any, *arguments: Any) -> Any:
        str.__setattr__(self, "is_read", True)
        return method(self, *arguments)

    return note


for _name in (
    "__eq__", "__ne__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__contains__", "__getitem__",
    "__iter__", "__add__", "__mul__", "__mod__", "__format__", "__str__", "__repr__",
):  # fmt: skip
    setattr(_Word, _name, _noting(_name))


class Words:
    """Words among the constants of a batch, each in place of the user's while the step runs once."""

    def __init__(self, constants: list[Any]) -> None:
        self._words: dict[int, list[_Word]] = {}
        self._constants = constants

    def replaced(self) -> list[Any]:
        """Return the constants with words that note their reads; lists and tuples of words get them, too."""
        return [self._replace(position, part) for position, part in enumerate(self._constants)]

    def is_unread(self, position: int, part: Any) -> bool:
        """Return whether a part of another batch may differ, because the step read none of its words."""
        words = self._words.get(position)
        if words is None or any(getattr(word, "is_read", False) for word in words):
            return False
        if isinstance(part, str):
            return isinstance(self._constants[position], str)
        same = type(part) is type(self._constants[position]) and len(part) == len(words)
        return same and all(type(word) is str for word in part)

    def _replace(self, position: int, part: Any) -> Any:
        if type(part) is str:
            self._words[position] = [_Word(part)]
            return self._words[position][0]
        if type(part) in (list, tuple) and part and all(type(word) is str for word in part):
            self._words[position] = list(map(_Word, part))
            return type(part)(self._words[position])
        return part
