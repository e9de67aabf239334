"""Planners of recomputation: results that are dropped and recomputed. The first is the default.

In: a graph, a plan and a budget.
Out: the plan with ops that run again.
Read first: `greedy`.
"""

from autotune.planners.base import Planner
from autotune.planners.recompute.blocks import Blocks
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.planners.recompute.keep import KeepResults
from autotune.planners.recompute.per_block import PerBlock
from autotune.planners.recompute.segments import Segments

RECOMPUTES: dict[str, type[Planner]] = {
    "keep": KeepResults,
    "segments": Segments,
    "per_block": PerBlock,
    "greedy": GreedyEviction,
    "blocks": Blocks,
}
