"""One run of an integration in a fresh process: `python -m experiments.benchmarks.integrations.child NAME OUT [PLAN]`."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from autotune.records import plan_file as planfile
from autotune.runtime import malloc


def main() -> None:
    malloc.always_release()  # before torch allocates: eager would be charged for memory that malloc keeps
    name, out, *plans = sys.argv[1:]
    module = importlib.import_module(f"experiments.benchmarks.integrations.{name}")
    record = module.run(planfile.read(Path(plans[0])) if plans else None)
    Path(out).write_text(json.dumps(asdict(record)), encoding="utf-8")


if __name__ == "__main__":
    main()
