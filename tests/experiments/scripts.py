"""Load a script of `experiments/` as a module, the way that running it would."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(path: str) -> ModuleType:
    """`frontier/summary.py` as a module; what it imports from its own folder is not left behind."""
    file = EXPERIMENTS / path
    siblings = {one.stem for one in file.parent.glob("*.py")}
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
        for name in siblings:
            sys.modules.pop(name, None)
    return module
