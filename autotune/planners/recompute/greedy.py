"""Evict the results that free the most bytes over the budget per second of recomputation, until the step fits."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Float, Int, Knob
from autotune.planners.recompute.cpsat import refine
from autotune.planners.recompute.editable_order import refuse_inplace_and_offload
from autotune.planners.recompute.per_block import checkpoint_blocks
from autotune.planners.recompute.search import Search, start_search, usual_work
from autotune.predict.bounds import peak_lower_bound

RESTARTS = 12
"""Maximum number of restarts from the order without recomputation."""
MAX_SEEDED = 5000
"""Maximum length of an order that is also searched from checkpointed blocks."""
OVERSHOOT = (0.1, 0.3, 1.0)
"""Lower targets to try if the search gets stuck above the limit, as shares of the bytes to save below the limit."""
BOUND_TOLERANCE = 1e-4
"""Share of the proved lower bound that the target lies above it, for budgets below the bound."""
FINEST_STEP = 0.003
"""Smallest step of the target in the search for the lowest peak, as a share of the bytes over the limit."""
LOWEST_WORK = 2.5
"""Maximum number of edits to weigh in evictions for the lowest peak, in multiples of the local moves' number."""
SHARED_RESULTS = 4
"""Number of latest results that planners of one budget share."""


@dataclass(frozen=True, slots=True)
class GreedyEviction:
    """Planner that drops results that are live at the peak, the best ratio of bytes to cost first, and recomputes them.

    The cost of a drop is exact: the chain to recompute, longer lives of its inputs, temporaries. An op may run several times. Searches start from the order without recomputation and from checkpointed blocks. If
    the budget is out of reach, the result is the lowest peak of the search.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {
        "share": Float(0.0, 1.0),
        "greed": Float(0.5, 3.0),
        "windows": Int(0, 32),
    }
    share: float = 1.0
    """Share of the bytes over the budget to remove here; the rest is left to offload."""
    greed: float = 1.5
    """Exponent of the freed bytes in a score; higher values evict large, expensive results first."""
    windows: int = 0
    """Number of windows of the order that CP-SAT solves again at the end; needs the extra `cpsat`."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the cheapest recomputation that meets the budget."""
        results = _shared_results.get()
        for planner, earlier, *inputs, result in results or ():
            if earlier is graph and planner == self and inputs == [plan, budget_bytes, costs]:
                return result
        result = self._plan(graph, plan, budget_bytes, costs)
        if results is not None:
            results.append((self, graph, plan, budget_bytes, costs, result))
        return result

    def _plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_inplace_and_offload(plan)
        start = start_search(graph, plan.order, costs)
        before = start.peak
        limit = int(before - self.share * (before - budget_bytes))
        if before <= limit:
            return plan
        low, _ = peak_lower_bound(graph, costs)
        work = usual_work(len(plan.order))
        if limit < low:  # no plan reaches the budget: search for the lowest peak at any cost in time
            limit, work = int(low * (1 + BOUND_TOLERANCE)), work // 4
        seeds = [start_search(graph, order, costs) for order in _checkpointed_orders(graph, plan)]
        best = self._cheapest([start, *seeds], limit, work)
        if best.peak > limit:
            best = self._lowest(start, best, limit, work)
        if best.peak >= before:
            return plan
        order = refine(graph, best.order, costs, max(limit, best.peak), self.windows) if self.windows else best.order
        return replace(plan, order=order)

    def _cheapest(self, starts: list[Search], limit: int, work: int) -> Search:
        """Return the cheapest order within the limit after restarts and local moves; the lowest order if none fits."""
        start, *seeds = starts

        def rank(search: Search) -> tuple[int, float]:
            return max(limit, search.peak), search.seconds

        results: list[Search] = []
        spent = 0
        for turn in range(RESTARTS):
            if spent <= work:
                search = start.copy()
                greed = self.greed * (1.0, 0.67, 1.33)[turn % 3]
                spent += search.fit(limit, greed, 0.2 if turn >= 3 else 0.0, turn)
                search.undo(max(limit, search.peak))
                results.append(search)
        for seed in seeds:
            seed.fit(limit, self.greed)
            seed.undo(max(limit, seed.peak))
            results.append(seed)
        for part in OVERSHOOT:
            if min(map(rank, results))[0] > limit:
                target = int(limit - part * (start.peak - limit))
                search = start.copy()
                search.fit(target, self.greed)
                search.undo(max(limit, search.peak))
                results.append(search)
        best = sorted(results, key=rank)[:3]
        if best[0].peak > limit:
            best[0].improve(limit, self.greed, work // 4)
            return best[0]
        for turn, search in enumerate(best):
            search.improve(limit, self.greed, work // 6, turn)
        cheapest = min(best, key=rank)
        cheapest.improve(limit, self.greed, work // 2, 3)
        return cheapest

    def _lowest(self, start: Search, best: Search, limit: int, work: int) -> Search:
        """Return the order with the lowest peak, by lowering the target step by step."""
        best = min(start, best, key=lambda search: search.peak)
        step, turn, spent = 0.1, 0, 0
        while step > FINEST_STEP and best.peak > limit and spent <= LOWEST_WORK * work:
            target = max(limit, int(best.peak - step * (start.peak - limit)))
            search, weighed = self._reach(best, start, target, work // 16, turn)
            spent += weighed
            if search.peak < best.peak:
                search.undo(search.peak)
                best = search
            if search.peak > target:
                step /= 2
            turn += 1
        if best is not start:
            best.improve(best.peak, self.greed, work // 4, turn)
        return best

    def _reach(self, best: Search, start: Search, target: int, work: int, turn: int) -> tuple[Search, int]:
        """Return an order within the target, or the lowest one, and the number of edits that evictions weighed.

        Evictions begin from the best order so far and from the start.
        """
        results: list[Search] = []
        spent = 0
        for origin, greed in ((best, 1.0), (best, 0.67), (start, 1.0), (start, 1.33)):
            search = origin.copy()
            spent += search.fit(target, self.greed * greed)
            if search.peak <= target:
                return search, spent
            results.append(search)
        lowest = min(results, key=lambda search: search.peak)
        lowest.undo(lowest.peak)
        lowest.improve(target, self.greed, work, turn)
        return lowest, spent


Results = deque[tuple[GreedyEviction, TrainGraph, Plan, int, Costs, Plan]]
"""Latest results of greedy eviction, each after the planner and the inputs that made it."""
_shared_results: ContextVar[Results | None] = ContextVar("shared_results", default=None)


def new_results() -> Results:
    """Return an empty store of results for `share_results`."""
    return deque(maxlen=SHARED_RESULTS)


@contextmanager
def share_results(results: Results) -> Iterator[None]:
    """Reuse greedy results of equal inputs within the block: `blocks` asks for the result that `greedy` had before."""
    token = _shared_results.set(results)
    try:
        yield
    finally:
        _shared_results.reset(token)


def _checkpointed_orders(graph: TrainGraph, plan: Plan) -> list[tuple[int, ...]]:
    """Return the orders with all blocks recomputed, one for each depth of their names."""
    if plan.recomputed or len(plan.order) > MAX_SEEDED:
        return []
    orders = (checkpoint_blocks(graph, plan, depth).order for depth in (1, 2, 3))
    return [order for order in orders if len(order) > len(plan.order)]
