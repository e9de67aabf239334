"""Whether runs move once more after recompute was decided. The first is the default."""

from autotune.planners.contract import Planner
from autotune.planners.reorder.again import Again
from autotune.planners.reorder.keep import Keep

REORDERS: dict[str, type[Planner]] = {"keep": Keep, "again": Again}
