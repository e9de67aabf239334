"""Which module of `dashboards/` knows what."""

from pathlib import Path

from tests.test_floors import imported

ROOT = Path(__file__).parents[2] / "dashboards"


def users(package: str) -> set[str]:
    """Modules that import it."""
    return {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.partition(".")[0] == package for _, name in imported(path))
    }


def test_what_is_shown_is_made_without_streamlit_and_drawn_in_one_place() -> None:
    pages = {f"views/{path.name}" for path in (ROOT / "views").glob("*.py")}
    assert users("streamlit") == {"app.py", "page.py", *pages}
    assert users("altair") == {"pictures.py"}


def test_nothing_in_the_package_imports_the_app() -> None:
    package = ROOT.parent / "autotune"
    assert not [
        path for path in package.rglob("*.py") if any(name.startswith("dashboards") for _, name in imported(path))
    ]
