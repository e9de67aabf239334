"""Words of a batch that a step does not read may differ from batch to batch; those that C code reads may not."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.capture.python.words import Words

MODEL = SimpleNamespace(seg=1)
PARTS = ["seg", ["a.png", "b.png"], 3]
OTHERS = ["cls", ["c.png", "d.png"], 4]


def nothing(parts: list[Any]) -> None:
    del parts


def attribute(parts: list[Any]) -> None:
    getattr(MODEL, parts[0])


def pattern(parts: list[Any]) -> None:
    re.match("s", parts[0])


def number(parts: list[Any]) -> None:
    parts[0].upper()


def joined(parts: list[Any]) -> None:
    ",".join(parts[1])


@pytest.mark.parametrize(
    ("step", "unread"),
    [(nothing, [0, 1]), (attribute, [1]), (pattern, [1]), (number, [1]), (joined, [0])],
)
def test_a_word_that_c_code_reads_leaves_the_others_free(step: Any, unread: list[int]):
    def run(parts: list[Any]) -> list[Any]:
        step(parts)
        return [1, parts[0], parts[1][1]]

    words = Words(PARTS)
    words.find_unread(run)
    assert [at for at, part in enumerate(OTHERS) if words.is_unread(at, part)] == unread
    returned = {1: (0, None), 2: (1, 1)}
    assert words.passed == {leaf: place for leaf, place in returned.items() if place[0] in unread}


def test_a_step_that_takes_another_way_without_the_words_reads_them_all():
    words = Words(PARTS)
    words.find_unread(lambda _: None)
    assert not any(words.is_unread(at, part) for at, part in enumerate(OTHERS))
    assert not words.passed
