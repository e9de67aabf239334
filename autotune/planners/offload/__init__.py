"""Which values leave for a store. The first is the default."""

from autotune.planners.contract import Planner
from autotune.planners.offload.keep import Keep
from autotune.planners.offload.window import Window

OFFLOADS: dict[str, type[Planner]] = {"keep": Keep, "window": Window}
