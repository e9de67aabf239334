"""In which order ops run, each once. The first is the default."""

from autotune.planners.contract import Planner
from autotune.planners.order.list_by_bytes import ListByBytes
from autotune.planners.order.traced import Traced

ORDERS: dict[str, type[Planner]] = {"traced": Traced, "list_by_bytes": ListByBytes}
