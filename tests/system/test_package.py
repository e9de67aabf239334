import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_holds_every_file_that_the_package_reads():
    """An install from this folder would not notice: it reads the sources themselves."""
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = [path for path in (ROOT / "autotune").rglob("*.*") if path.is_file() and "__pycache__" not in path.parts]
    left_out = [path for path in files if path.suffix != ".py" and not any(path.match(glob) for glob in globs)]
    assert not left_out
    assert {path.name for path in files} >= {"arena.cpp", "search.cpp", "order.hpp", "timeline.hpp"}
