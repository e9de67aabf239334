"""Which results are thrown away and computed again. The first is the default."""

from autotune.planners.contract import Planner
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
