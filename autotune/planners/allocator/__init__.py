"""Who hands out the step's memory. The first is the default.

In: a plan.
Out: the plan with its allocator named.
Read first: `arena`.
"""

from collections.abc import Mapping

from autotune.planners.allocator.arena import Arena
from autotune.planners.allocator.system import System
from autotune.planners.base import Planner

ALLOCATORS: Mapping[str, type[Planner]] = {"system": System, "arena": Arena}
