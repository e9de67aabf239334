"""Throw away what frees most over the budget per second of computing it again, until the step fits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Float, Int, Knob
from autotune.planners.recompute.cpsat import refine
from autotune.planners.recompute.editable_order import refuse_offload
from autotune.planners.recompute.per_block import checkpointed
from autotune.planners.recompute.search import Search, begin, usual_work
from autotune.predict.bounds import peak_lower_bound

RESTARTS = 12
SEEDED = 5000
"""Longest order that is also begun from checkpointed blocks."""
OVERSHOOT = (0.1, 0.3, 1.0)
"""How far below the limit to aim where aiming at it gets stuck above, in parts of the bytes that were to be saved."""
LEAST = 1e-4
"""Of the proved lower bound, that a plan for a budget below it may lie above."""
FINEST_STEP = 0.003
"""Of the bytes over the limit: the least by which it sinks in search of the lowest peak."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Evict at the peak, at the exact price: chain to run again, inputs that live longer, temporaries of the chain.

    Any op may run several times. Restarts begin with nothing computed again, and with all blocks. Where the budget
    cannot be reached, the lowest peak that was found.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {
        "share": Float(0.0, 1.0),
        "greed": Float(0.5, 3.0),
        "windows": Int(0, 32),
    }
    share: float = 1.0
    """Part of the bytes over the budget that is removed here; what comes after (offload) is left the rest."""
    greed: float = 1.5
    """Exponent of the bytes in bytes per second: higher takes bigger, dearer results first."""
    windows: int = 0
    """Stretches of the order that are solved anew by CP-SAT at the end; needs the extra `cpsat`."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with as little computed again as the budget allows."""
        refuse_offload(plan)
        start = begin(graph, plan.order, costs)
        before = start.peak
        limit = int(before - self.share * (before - budget_bytes))
        if before <= limit:
            return plan
        low, _ = peak_lower_bound(graph, costs)
        work = usual_work(len(plan.order))
        if limit < low:  # no plan reaches it: the lowest is wanted, whatever it takes
            limit, work = int(low * (1 + LEAST)), work // 4
        seeds = [begin(graph, order, costs) for order in _checkpointed(graph, plan)]
        made = self._cheapest([start, *seeds], limit, work)
        if made.peak > limit:
            made = self._lowest(start, made, limit, work)
        if made.peak >= before:
            return plan
        order = refine(graph, made.order, costs, max(limit, made.peak), self.windows) if self.windows else made.order
        return replace(plan, order=order)

    def _cheapest(self, starts: list[Search], limit: int, work: int) -> Search:
        """The cheapest order under the limit that restarts and local moves find; the lowest where none fits."""
        start, *seeds = starts

        def rank(search: Search) -> tuple[int, float]:
            return max(limit, search.peak), search.seconds

        found: list[Search] = []
        spent = 0
        for turn in range(RESTARTS):
            if spent <= work:
                search = start.copy()
                greed = self.greed * (1.0, 0.67, 1.33)[turn % 3]
                spent += search.fit(limit, greed, 0.2 if turn >= 3 else 0.0, turn)
                search.undo(max(limit, search.peak))
                found.append(search)
        for seed in seeds:
            seed.fit(limit, self.greed)
            seed.undo(max(limit, seed.peak))
            found.append(seed)
        for part in OVERSHOOT:
            if min(map(rank, found))[0] > limit:
                target = int(limit - part * (start.peak - limit))
                search = start.copy()
                search.fit(target, self.greed)
                search.undo(max(limit, search.peak))
                found.append(search)
        best = sorted(found, key=rank)[:3]
        if best[0].peak > limit:
            best[0].improve(limit, self.greed, work // 4)
            return best[0]
        for turn, search in enumerate(best):
            search.improve(limit, self.greed, work // 6, turn)
        cheapest = min(best, key=rank)
        cheapest.improve(limit, self.greed, work // 2, 3)
        return cheapest

    def _lowest(self, start: Search, best: Search, limit: int, work: int) -> Search:
        """The order with the lowest peak that sinking the limit step by step finds."""
        best = min(start, best, key=lambda search: search.peak)
        step, turn = 0.1, 0
        while step > FINEST_STEP and best.peak > limit:
            target = max(limit, int(best.peak - step * (start.peak - limit)))
            search = self._reach(best, start, target, work // 16, turn)
            if search.peak < best.peak:
                search.undo(search.peak)
                best = search
            if search.peak > target:
                step /= 2
            turn += 1
        if best is not start:
            best.improve(best.peak, self.greed, work // 4, turn)
        return best

    def _reach(self, best: Search, start: Search, target: int, work: int, turn: int) -> Search:
        """An order at or under the target if one is found, from the best so far or from the start; else the lowest."""
        tried: list[Search] = []
        for origin, greed in ((best, 1.0), (best, 0.67), (start, 1.0), (start, 1.33)):
            search = origin.copy()
            search.fit(target, self.greed * greed)
            if search.peak <= target:
                return search
            tried.append(search)
        lowest = min(tried, key=lambda search: search.peak)
        lowest.undo(lowest.peak)
        lowest.improve(target, self.greed, work, turn)
        return lowest


def _checkpointed(graph: TrainGraph, plan: Plan) -> list[tuple[int, ...]]:
    """Orders with all blocks computed again, one for each depth of their names."""
    if plan.recomputed or len(plan.order) > SEEDED:
        return []
    made = (checkpointed(graph, plan, depth).order for depth in (1, 2, 3))
    return [order for order in made if len(order) > len(plan.order)]
