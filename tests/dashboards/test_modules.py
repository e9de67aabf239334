"""Imports of the modules of `dashboards/`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.system.test_architecture import imported

ROOT = Path(__file__).parents[2] / "dashboards"


def names_of(path: Path) -> Iterator[str]:
    """Everything that a file imports, as dotted names."""
    return (module.name for module in imported(ast.parse(path.read_text())))


def users(package: str) -> set[str]:
    """Modules that import it."""
    return {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.partition(".")[0] == package for name in names_of(path))
    }


def test_what_is_shown_is_made_without_streamlit_and_drawn_in_one_place() -> None:
    pages = {f"views/{path.name}" for path in (ROOT / "views").glob("*.py")}
    assert users("streamlit") == {"app.py", "page.py", *pages}
    assert users("altair") == {"charts.py"}


def test_nothing_in_the_package_imports_the_app() -> None:
    package = ROOT.parent / "autotune"
    assert not [path for path in package.rglob("*.py") if any(name.startswith("dashboards") for name in names_of(path))]
