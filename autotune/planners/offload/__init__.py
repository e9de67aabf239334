"""Which values leave for a store. The first is the default.

In: a plan, a budget, and costs of stores.
Out: the plan with values that leave.
Read first: `window`.
"""

from autotune.planners.base import Planner
from autotune.planners.offload.keep import Keep
from autotune.planners.offload.window import Window

OFFLOADS: dict[str, type[Planner]] = {"keep": Keep, "window": Window}
