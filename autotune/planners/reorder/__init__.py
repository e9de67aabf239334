"""Planners that reorder the runs after recompute is decided. The first is the default.

In: a plan with recomputations.
Out: the plan with its runs in another order.
Read first: `again`.
"""

from autotune.planners.base import Planner
from autotune.planners.reorder.again import ReorderRuns
from autotune.planners.reorder.keep import KeepOrder

REORDERS: dict[str, type[Planner]] = {"keep": KeepOrder, "again": ReorderRuns}
