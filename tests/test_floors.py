"""The floors of the package: a module imports its own floor or lower, and the lower two know no framework."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autotune"


def told() -> dict[str, int]:
    """Floor by module, from the table in CONTRIBUTING.md: a page that is wrong fails."""
    rows = re.findall(r"^\| (\d) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {module: int(floor) for floor, modules in rows for module in re.findall(r"`(\w+)/?`", modules)}


FLOOR = told()
FRAMEWORKS = {"torch", "optuna", "mlflow"}
HEAVY = FRAMEWORKS | {"pandas", "pydantic", "transformers", "matplotlib", "jinja2"}


def modules() -> Iterator[Path]:
    yield from sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    """The part that stands in the table: a module of the package, or a folder of it."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module, names, 0) if module == "autotune":
                yield from ((node.lineno, f"autotune.{name.name}") for name in names)
            case ast.ImportFrom(str(module), _, 0):
                yield node.lineno, module


def breaks(path: Path, floors: dict[str, int]) -> Iterator[str]:
    """Lines of a file that import from a higher floor, or a framework where there is to be none."""
    mine = floors[module_of(path)]
    where = path.relative_to(PACKAGE.parent)
    for line, name in imported(path):
        root, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if root == "autotune" and floors.get(other, mine) > mine:
            yield f"{where}:{line}: floor {mine} imports {name} of floor {floors[other]}"
        if mine <= 1 and root in FRAMEWORKS:
            yield f"{where}:{line}: floor {mine} imports {root}"


def test_every_module_has_a_floor_and_every_floor_its_modules():
    assert {module_of(path) for path in modules()} == set(FLOOR)


def test_no_module_imports_from_above_and_planning_needs_no_framework():
    found = [line for path in modules() if module_of(path) in FLOOR for line in breaks(path, FLOOR)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("from autotune.study import tune", "imports autotune.study of floor 4"),
        ("def f():\n    from autotune import study", "imports autotune.study of floor 4"),
        ("import autotune.harness.run", "imports autotune.harness.run of floor 3"),
        ("def f():\n    import torch.nn", "imports torch"),
        ("from optuna.samplers import TPESampler", "imports optuna"),
    ],
)
def test_a_break_is_found_at_any_depth_and_named_with_its_line(tmp_path: Path, text: str, word: str, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "autotune")
    path = tmp_path / "autotune" / "plan.py"
    path.parent.mkdir()
    path.write_text(text)
    (found,) = breaks(path, FLOOR)
    assert found == f"autotune/plan.py:{text.count(chr(10)) + 1}: floor 0 {word}"


@pytest.mark.parametrize(
    "module", ["autotune", "autotune.cli", "autotune.planners", "autotune.trial", "autotune.planfile"]
)
def test_importing_what_the_command_line_needs_loads_nothing_heavy(module: str):
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
