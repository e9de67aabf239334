"""Planners of the parameter updates' positions. The first is the default.

In: a graph and a plan.
Out: the plan with its updates placed.
Read first: `at_end`.
"""

from autotune.planners.base import Planner
from autotune.planners.update.at_end import AtEnd
from autotune.planners.update.with_gradient import WithGradient

UPDATES: dict[str, type[Planner]] = {"at_end": AtEnd, "with_gradient": WithGradient}
