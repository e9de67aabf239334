"""Throw away what frees most over the budget per second of computing it again, until the step fits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.bounds import peak_lower_bound
from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.knobs import Float, Int, Knob
from autotune.plan import Plan
from autotune.planners.recompute.runs import refuse_offload
from autotune.planners.recompute.search import Search, begin
from autotune.planners.recompute.windows import refine

RESTARTS = 60_000
"""Runs of all restarts together, at most (but one restart at least, and twelve at most)."""
WORK_PER_RUN, WORK, MORE_PER_RUN = 300, 300_000, 50
"""Changes that local moves weigh in one plan: so many for each run, from `WORK` on fewer."""
OVERSHOOT = (0.1, 0.3, 1.0)
"""How far below the limit to aim where aiming at it gets stuck above, in parts of the bytes that were to be saved."""
HEAT = 0.05
FINEST_STEP = 0.003
"""Of the bytes above the static ones: the least by which the limit sinks in search of the lowest peak."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Evict at the peak, at the exact price: chain to run again, inputs that live longer, temporaries of the chain.

    Any op may run several times. Where the budget cannot be reached, the lowest peak that was found.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {
        "share": Float(0.0, 1.0),
        "greed": Float(0.5, 3.0),
        "effort": Float(0.1, 10.0, log=True),
        "windows": Int(0, 32),
    }
    share: float = 1.0
    """Part of the bytes over the budget that is removed here; what comes after (offload) is left the rest."""
    greed: float = 1.5
    """Exponent of the bytes in bytes per second: higher takes bigger, dearer results first."""
    effort: float = 1.0
    """How much longer than usual to look for local moves."""
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
        size = len(plan.order)
        work = int(self.effort * min(WORK_PER_RUN * size, WORK + MORE_PER_RUN * size))
        limit = max(limit, low)
        made = self._cheapest(start, limit, work) or self._lowest(start, limit, work)
        if made.peak >= before:
            return plan
        order = refine(graph, made.order, costs, max(limit, made.peak), self.windows) if self.windows else made.order
        return replace(plan, order=order)

    def _cheapest(self, start: Search, limit: int, work: int) -> Search | None:
        """The cheapest order under the limit that restarts and local moves find; None if none fits."""
        turns = max(1, min(12, RESTARTS // max(1, len(start.order))))
        static = 2 * limit - start.peak
        found = [
            self._fitted(start, limit, limit, (1.0, 0.67, 1.33)[turn % 3], 0.2 if turn >= 3 else 0.0, turn)
            for turn in range(turns)
        ]
        for part in OVERSHOOT:
            if min(search.peak for search in found) <= limit:
                break
            found.append(self._fitted(start, limit, int(limit - part * (limit - static))))
        found.sort(key=lambda search: (max(limit, search.peak), search.seconds))
        for turn, search in enumerate(found[:3]):
            search.improve(limit, self.greed, work // 6, turn, HEAT)
        best = min(found[:3], key=lambda search: (max(limit, search.peak), search.seconds))
        best.improve(limit, self.greed, work // 2, 3, HEAT)
        return best if best.peak <= limit else None

    def _fitted(
        self, start: Search, limit: int, target: int, greed: float = 1.0, taste: float = 0.0, seed: int = 0
    ) -> Search:
        """An order evicted down to a target, as far as it goes, with everything taken back that the limit does not ask for."""
        search = start.copy()
        search.fit(target, self.greed * greed, taste, seed)
        search.undo(max(limit, search.peak))
        return search

    def _lowest(self, start: Search, limit: int, work: int) -> Search:
        """The order with the lowest peak that sinking the limit step by step finds."""
        best, step, static = start, 0.1, limit - 1
        turn = 0
        while step > FINEST_STEP and best.peak > limit:
            target = max(limit, int(best.peak - step * (best.peak - static)))
            search = self._reach(best, start, target, work // 16, turn)
            if search.peak < best.peak:
                search.undo(search.peak)
                best = search
            if search.peak > target:
                step /= 2
            turn += 1
        if best is not start:
            best.improve(best.peak, self.greed, work // 4, turn, HEAT)
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
