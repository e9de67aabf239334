"""Without the libraries, the folder imports, and each integration names the extra to install."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules[{name!r}] = None
import autotune.integrations
try:
    import autotune.integrations.{name}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_an_integration_without_its_library_names_the_extra(name: str):
    script = WITHOUT.format(name=name)
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == f"autotune.integrations.{name} needs {name}: pip install 'autotune-training[{name}]'"
