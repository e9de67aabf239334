"""Planners of the step's allocator. The first is the default.

In: a plan.
Out: the plan with its allocator.
Read first: `arena`.
"""

from collections.abc import Mapping

from autotune.planners.allocator.arena import ArenaAllocator
from autotune.planners.allocator.system import SystemAllocator
from autotune.planners.base import Planner

ALLOCATORS: Mapping[str, type[Planner]] = {"system": SystemAllocator, "arena": ArenaAllocator}
