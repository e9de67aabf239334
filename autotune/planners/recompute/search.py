"""What every planner of recomputation works with: an order that can be made to fit, cheapened and copied."""

import random
from collections.abc import Sequence
from typing import Protocol

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners.recompute.compiled import Compiled, library
from autotune.planners.recompute.editable_order import Runs
from autotune.planners.recompute.eviction import Eviction, undo
from autotune.planners.recompute.local_moves import improve

WORK, WORK_PER_RUN, MORE_PER_RUN = 600_000, 600, 50
"""Changes that all moves of one plan weigh: so many for each run, from `WORK` on fewer."""
ROUNDS, WORK_PER_ROUND = 80, 4000
"""How local moves in Python are rationed."""
WORK_OF_A_FIT = 60
"""What a restart in Python is counted as, for each run."""


class Search(Protocol):
    """An order under change. All its moves are exact in bytes and seconds, and the same each time."""

    @property
    def peak(self) -> int:
        """Highest bytes."""
        ...

    @property
    def seconds(self) -> float:
        """Of all runs."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """Ops as they run."""
        ...

    def copy(self) -> "Search":
        """The same order, to be changed apart."""
        ...

    def fit(self, limit: int, greed: float, taste: float = 0.0, seed: int = 0) -> int:
        """Evict until nothing is over the limit, or nothing helps; scores shrink at random by up to `taste`.

        Gives the work that it took, counted in changes weighed.
        """
        ...

    def undo(self, limit: int) -> None:
        """Take back what is computed again without need, the dearest first."""
        ...

    def improve(self, limit: int, greed: float, work: int, seed: int = 0) -> None:
        """Local moves while about `work` changes are weighed: fewest bytes over the limit first, then fewest seconds."""
        ...


def usual_work(size: int) -> int:
    """Changes to weigh in the plan of an order so long."""
    return min(WORK_PER_RUN * size, WORK + MORE_PER_RUN * size)


def begin(graph: TrainGraph, order: Sequence[int], costs: Costs) -> Search:
    """The compiled search of an order; the same in Python, slower and with fewer moves, where there is no compiler."""
    runs = Runs(graph, order, costs)
    loaded = library()
    return Compiled(runs, loaded) if loaded is not None else Plain(runs)


class Plain:
    """The search in Python."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    @property
    def peak(self) -> int:
        return self._runs.peak

    @property
    def seconds(self) -> float:
        return self._runs.seconds

    @property
    def order(self) -> tuple[int, ...]:
        return self._runs.order

    def copy(self) -> "Plain":
        return Plain(self._runs.copy())

    def fit(self, limit: int, greed: float, taste: float = 0.0, seed: int = 0) -> int:
        rng = random.Random(seed)
        tastes = [rng.uniform(1.0 - taste, 1.0) for _ in self._runs.graph.ops] if taste else None
        Eviction(self._runs, greed, tastes).fit(limit)
        return WORK_OF_A_FIT * len(self._runs.sequence)

    def undo(self, limit: int) -> None:
        undo(self._runs, limit)

    def improve(self, limit: int, greed: float, work: int, seed: int = 0) -> None:
        if self._runs.peak <= limit:
            self._runs = improve(self._runs, limit, greed, min(ROUNDS, work // WORK_PER_ROUND), seed)
