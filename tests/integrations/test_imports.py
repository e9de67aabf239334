"""Without the libraries, the folder imports, and each integration names the extra to install."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules[{name!r}] = None
import autotune.integrations
try:
    import autotune.integrations.{module}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "name"), [("lightning", "lightning"), ("accelerate", "accelerate"), ("hf", "transformers")]
)
def test_an_integration_without_its_library_names_the_extra(module: str, name: str):
    script = WITHOUT.format(module=module, name=name)
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == f"autotune.integrations.{module} needs {name}: pip install 'autotune-training[{module}]'"
