"""Planners of runs in place: outputs that overwrite an input's buffer. The first is the default.

In: a plan.
Out: the plan with runs that overwrite an input.
Read first: `greedy`.
"""

from autotune.planners.base import Planner
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.planners.inplace.never import NeverInPlace

INPLACES: dict[str, type[Planner]] = {"greedy": GreedyInPlace, "never": NeverInPlace}
