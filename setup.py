"""Build the C++ libraries into the wheel where g++ exists, and give the package index a README with absolute links.

Libraries that cannot be built here are compiled at first use. The memory arena needs torch's headers: it is built into the
wheel only where torch can be imported, which build isolation prevents (`pip install --no-build-isolation .`).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

if TYPE_CHECKING:
    from autotune.native import Library

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/autotune-training/autotune"


def libraries() -> Iterator["Library"]:
    """Yield the libraries whose sources can be read in this environment."""
    sys.path.insert(0, str(ROOT))
    from autotune.layout import compiled as layout
    from autotune.planners.recompute import compiled as recompute

    yield layout.LIBRARY
    yield recompute.LIBRARY
    try:
        from autotune.runtime.arena.build import arena_library
    except ImportError as error:
        print(f"autotune: the arena is compiled at first use ({error})")
    else:
        yield arena_library()


class BuildWithLibraries(build_py):
    """Copy the modules, then compile the libraries beside them."""

    def run(self) -> None:
        """Build; a library that does not compile is left to its first use."""
        super().run()
        if self.editable_mode:
            return
        for library in libraries():
            try:
                print(f"autotune: built {library.compile(Path(self.build_lib, 'autotune', '_native'))}")
            except (OSError, subprocess.SubprocessError) as error:
                print(f"autotune: {library.name} is compiled at first use ({error})")


class BinaryDistribution(Distribution):
    """Distribution whose wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        """Return True: the wheel holds compiled libraries."""
        return True


class PlatformWheel(bdist_wheel):
    """Wheel for one platform and any Python: the libraries are loaded with ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, of its binary interface, and of the platform."""
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """Return the README with links that work outside of the repository."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({REPOSITORY}/{kind}/main/{match[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+://)([^)]+)\)", absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel},
    distclass=BinaryDistribution,
)
