"""Which runs make their output in the buffer of an input. The first is the default.

In: a plan.
Out: the plan with runs that overwrite an input.
Read first: `greedy`.
"""

from autotune.planners.base import Planner
from autotune.planners.inplace.greedy import Greedy
from autotune.planners.inplace.never import Never

INPLACES: dict[str, type[Planner]] = {"greedy": Greedy, "never": Never}
