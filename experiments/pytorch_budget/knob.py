"""A ready workload whose forward and backward are compiled under one setting of `activation_memory_budget`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.workload import Workload
from autotune.zoo import ZOO

sys.path.insert(0, str(Path(__file__).parents[1] / "frontier"))
from peers import Compiled


def workload(setting: float, model: str, **arguments: Any) -> Workload:
    """On eager's kernels, so that gradients can be compared to the bit."""
    made = ZOO[model](**arguments)
    return replace(made, loss_fn=Compiled("aot_eager", setting).way(made).loss_fn)
