"""Planners of the ops' order, each op once. The first is the default.

In: a graph and a plan.
Out: the plan with another order.
Read first: `traced`.
"""

from autotune.planners.base import Planner
from autotune.planners.order.beam import Beam
from autotune.planners.order.best import BestOrder
from autotune.planners.order.depth_first import DepthFirst
from autotune.planners.order.exact import ExactOrder
from autotune.planners.order.list_by_bytes import ListByBytes
from autotune.planners.order.longest_path import LongestPath
from autotune.planners.order.traced import TracedOrder

ORDERS: dict[str, type[Planner]] = {
    "traced": TracedOrder,
    "list_by_bytes": ListByBytes,
    "depth_first": DepthFirst,
    "longest_path": LongestPath,
    "beam": Beam,
    "exact": ExactOrder,
    "best": BestOrder,
}
