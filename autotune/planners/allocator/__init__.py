"""Planners that decide who hands out the step's memory."""

from collections.abc import Mapping

from autotune.planners.allocator.arena import Arena
from autotune.planners.allocator.system import System
from autotune.planners.contract import Planner

ALLOCATORS: Mapping[str, type[Planner]] = {"arena": Arena, "system": System}
