"""Search orders with recomputation: fit an order to a limit, make it cheaper, copy it."""

import random
from collections.abc import Sequence
from typing import Protocol

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners.recompute.compiled import CompiledSearch, load_search
from autotune.planners.recompute.editable_order import EditableOrder
from autotune.planners.recompute.eviction import Eviction, undo
from autotune.planners.recompute.local_moves import improve

WORK, WORK_PER_RUN, MORE_PER_RUN = 600_000, 600, 50
"""Number of edits to weigh for one plan: `WORK_PER_RUN` per run, and `MORE_PER_RUN` per run beyond `WORK`."""
ROUNDS, WORK_PER_ROUND = 80, 4000
"""Maximum number of rounds of local moves in Python, and the work that one round counts as."""
WORK_OF_A_FIT = 60
"""Work that a fit in Python counts as, per run of the order."""


class Search(Protocol):
    """Order under search. All moves are deterministic and exact in bytes and seconds."""

    @property
    def peak(self) -> int:
        """Peak in bytes."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds of all runs."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """Ops in the order in which they run."""
        ...

    def copy(self) -> "Search":
        """Return an independent copy."""
        ...

    def fit(self, limit: int, greed: float, perturbation: float = 0.0, seed: int = 0) -> int:
        """Evict until no position exceeds the limit, or no eviction helps, and return the number of edits weighed.

        Args:
            limit: Target of the peak in bytes.
            greed: Exponent of the freed bytes in an eviction's score.
            perturbation: Maximum random reduction of a score, as a share of it.
            seed: Seed of the perturbation.
        """
        ...

    def undo(self, limit: int) -> None:
        """Undo recomputations that the limit does not need, the most expensive first."""
        ...

    def improve(self, limit: int, greed: float, work: int, seed: int = 0) -> None:
        """Apply local moves until about `work` edits are weighed: minimize bytes over the limit, then seconds."""
        ...


def usual_work(size: int) -> int:
    """Return the number of edits to weigh for the plan of an order with `size` runs."""
    return min(WORK_PER_RUN * size, WORK + MORE_PER_RUN * size)


def start_search(graph: TrainGraph, order: Sequence[int], costs: Costs) -> Search:
    """Return the compiled search of an order; without a compiler the Python one, slower and with fewer moves."""
    runs = EditableOrder(graph, order, costs)
    library = load_search()
    return CompiledSearch(runs, library) if library is not None else PythonSearch(runs)


class PythonSearch:
    """Search in Python, used without a compiler."""

    def __init__(self, runs: EditableOrder) -> None:
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

    def copy(self) -> "PythonSearch":
        return PythonSearch(self._runs.copy())

    def fit(self, limit: int, greed: float, perturbation: float = 0.0, seed: int = 0) -> int:
        rng = random.Random(seed)
        factors = [rng.uniform(1.0 - perturbation, 1.0) for _ in self._runs.graph.ops] if perturbation else None
        Eviction(self._runs, greed, factors).fit(limit)
        return WORK_OF_A_FIT * len(self._runs.sequence)

    def undo(self, limit: int) -> None:
        undo(self._runs, limit)

    def improve(self, limit: int, greed: float, work: int, seed: int = 0) -> None:
        if self._runs.peak <= limit:
            self._runs = improve(self._runs, limit, greed, min(ROUNDS, work // WORK_PER_ROUND), seed)
