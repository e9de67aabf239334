"""Without the libraries, the folder imports, and each integration names the extra to install."""

import subprocess
import sys

LIBRARIES = {"lightning": "lightning", "accelerate": "accelerate", "hf": "transformers"}
"""Library of each integration; its extra has the name of the integration."""

SCRIPT = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({list(LIBRARIES.values())}))
import autotune.integrations
for name in {list(LIBRARIES)}:
    try:
        importlib.import_module(f"autotune.integrations.{{name}}")
    except ImportError as error:
        print(error)
"""


def test_an_integration_without_its_library_names_the_extra():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"autotune.integrations.{name} needs {library}; pip install 'autotune-training[{name}]', or in a checkout: pip install '.[{name}]'"
        for name, library in LIBRARIES.items()
    ]
