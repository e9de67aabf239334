"""Whether runs move once more after recompute was decided. The first is the default.

In: a plan that computes again.
Out: the plan with its runs in another order.
Read first: `again`.
"""

from autotune.planners.base import Planner
from autotune.planners.reorder.again import Again
from autotune.planners.reorder.keep import Keep

REORDERS: dict[str, type[Planner]] = {"keep": Keep, "again": Again}
