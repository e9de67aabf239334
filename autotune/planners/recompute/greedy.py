"""Throw away what frees most over the budget per second of computing it again, until the step fits."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.bounds import peak_lower_bound
from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.knobs import Float, Knob
from autotune.plan import Plan
from autotune.planners.recompute.evict import Eviction, undo
from autotune.planners.recompute.improve import improve
from autotune.planners.recompute.runs import Runs, refuse_offload

RESTARTS = 10_000
"""Runs of all restarts together, at most (but one restart at least, and twelve at most)."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Evict at the peak, at the exact price: chain to run again, inputs that live longer, temporaries of the chain.

    Any op may run several times. Where the budget cannot be reached, the lowest peak that was found.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"share": Float(0.0, 1.0), "greed": Float(0.5, 3.0)}
    share: float = 1.0
    """Part of the bytes over the budget that is removed here; what comes after (offload) is left the rest."""
    greed: float = 1.5
    """Exponent of the bytes in bytes per second: higher takes bigger, dearer results first."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with as little computed again as the budget allows."""
        refuse_offload(plan)
        start = Runs(graph, plan.order, costs)
        limit = int(start.peak - self.share * (start.peak - budget_bytes))
        if start.peak <= limit:
            return plan
        low, _ = peak_lower_bound(graph, costs)
        found = self._cheapest(start, limit) if limit >= low else None
        made = found or self._lowest(start, max(limit, low))
        return replace(plan, order=made.order) if made.peak < start.peak else plan

    def _cheapest(self, start: Runs, limit: int) -> Runs | None:
        """The cheapest order under the limit that a few restarts and local moves find; None if none fits."""
        best: Runs | None = None
        rng = random.Random(len(start.sequence))
        for turn in range(max(1, min(12, RESTARTS // max(1, len(start.sequence))))):
            runs = start.copy()
            taste = [rng.uniform(0.8, 1.0) for _ in runs.graph.ops] if turn >= 3 else None
            Eviction(runs, self.greed * (1.0, 0.67, 1.33)[turn % 3], taste).fit(limit)
            if runs.peak > limit:
                continue
            undo(runs, limit)
            if best is None or runs.seconds < best.seconds:
                best = runs
        return best and improve(best, limit, self.greed)

    def _lowest(self, start: Runs, limit: int) -> Runs:
        """The order with the lowest peak that sinking the limit step by step finds."""
        best, step = start, 0.1
        while step > 0.004 and best.peak > limit:
            above = best.peak - start.graph.static_bytes
            target = max(limit, int(best.peak - step * above))
            runs = best.copy()
            Eviction(runs, self.greed).fit(target)
            reached = runs.peak <= target
            if runs.peak < best.peak:
                undo(runs, runs.peak)
                best = runs
            if not reached:
                step /= 2
        return improve(best, best.peak, self.greed) if best is not start else best
