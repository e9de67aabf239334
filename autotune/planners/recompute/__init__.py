"""Which results are thrown away and computed again. The first is the default.

In: a graph, a plan and a budget.
Out: the plan with ops that run again.
Read first: `greedy`.
"""

from autotune.planners.base import Planner
from autotune.planners.recompute.blocks import Blocks
from autotune.planners.recompute.greedy import Greedy
from autotune.planners.recompute.keep import Keep
from autotune.planners.recompute.per_block import PerBlock
from autotune.planners.recompute.segments import Segments

RECOMPUTES: dict[str, type[Planner]] = {
    "keep": Keep,
    "segments": Segments,
    "per_block": PerBlock,
    "greedy": Greedy,
    "blocks": Blocks,
}
