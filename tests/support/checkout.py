"""What a child process of a test needs to import this checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Of a command that is to run this checkout, on its own records, from whatever directory."""
    own = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
