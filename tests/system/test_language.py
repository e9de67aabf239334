"""Names and docstrings stay plain: the shares of private words and of docstrings that do not begin with a verb or a noun only fall."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRIVATE_NAMES = frozenset(
    [
        "found",
        "made",
        "seen",
        "one",
        "own",
        "known",
        "mine",
        "told",
        "given",
        "taken",
        "asked",
        "wanted",
        "said",
        "held",
        "at",
        "has",
        "here",
        "there",
        "others",
    ]
)
"""Words that name nothing: the noun of the thing is the better name."""

OPENERS = re.compile(r"(What|Which|Whether|How|Of|Where|As|By|So|The same)\b")
"""Words with which no docstring begins: a function's begins with a verb, all others with a noun."""

LONGEST_SENTENCE = 25
"""Words."""

LIMITS = {"private names": 0.002, "openers": 0.006, "long sentences": 0.004}
"""Largest share of each, for `autotune` and `dashboards` together. Lower it when a change lowers the share."""


def bound_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(name, ast.Store()) | ast.arg(name):
            yield name
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name


def docstring(node: ast.AST) -> str:
    """Return the text of a docstring, or of a string that documents the assignment before it."""
    match node:
        case ast.Module() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return ast.get_docstring(node) or ""
        case ast.Expr(ast.Constant(str(text))):
            return text
    return ""


def shares(trees: Iterator[ast.Module]) -> dict[str, float]:
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [name.strip("_") for node in nodes for name in bound_names(node)]
    texts = [text.strip() for node in nodes if (text := docstring(node))]
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.:;])\s", text)]
    return {
        "private names": sum(name in PRIVATE_NAMES for name in names) / max(len(names), 1),
        "openers": sum(bool(OPENERS.match(text)) for text in texts) / max(len(texts), 1),
        "long sentences": sum(len(text.split()) > LONGEST_SENTENCE for text in sentences) / max(len(sentences), 1),
    }


def sources() -> Iterator[ast.Module]:
    for folder in ("autotune", "dashboards"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text())


def test_private_names_openers_and_long_sentences_only_become_fewer():
    for kind, share in shares(sources()).items():
        assert share <= LIMITS[kind], f"{100 * share:.2f} % {kind}; at most {100 * LIMITS[kind]:.2f} %"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("made = 1", "private names"),
        ("def f(own): ...", "private names"),
        ('"""What a plan decides."""', "openers"),
        ('X = 1\n"""Of all plans the best."""', "openers"),
        (f'"""Return {"very " * 25}much."""', "long sentences"),
    ],
)
def test_each_kind_is_counted(text: str, kind: str):
    assert shares(iter([ast.parse(text)]))[kind] > 0
    assert not any(shares(iter([ast.parse('def lower(plan):\n    """Lower a plan to its schedule."""')])).values())
