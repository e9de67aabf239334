"""Planners of offload: values that leave for a store. The first is the default.

In: a plan, a budget, and the costs of the open stores.
Out: the plan with its offloaded values.
Read first: `window`.
"""

from autotune.planners.base import Planner
from autotune.planners.offload.keep import KeepResident
from autotune.planners.offload.window import OffloadWindow

OFFLOADS: dict[str, type[Planner]] = {"keep": KeepResident, "window": OffloadWindow}
