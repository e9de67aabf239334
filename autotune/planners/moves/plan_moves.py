"""Propose moves around a plan: single edits and combinations of them, ranked by the seconds that they may save.

Every move is a checked plan with its exact peak. A saving of 0.1 % is below the noise of a measurement,
so most moves join many edits.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import anticipate_inplace
from autotune.planners.inplace import INPLACES
from autotune.planners.moves.cost_belief import (
    CostBelief,
    MeasuredPlan,
    correct_costs,
    describe_costs,
    learn_costs,
)
from autotune.planners.moves.plan_edits import PlanEdit, count_changes, edit_plan
from autotune.planners.moves.single_edits import drop_swap, list_additions, list_drops, list_swaps, list_update_edits
from autotune.planners.recompute.search import start_search, usual_work
from autotune.planners.space import Space
from autotune.predict.simulate import Estimate, simulate

PASSIVE = {"order": "traced", "update": "at_end", "recompute": "keep", "reorder": "keep", "offload": "keep"}
"""Planner per kind that leaves the step as traced. Where a space allows only this one, moves do not change the kind either."""
GREED = 1.5
"""Exponent of the bytes in an eviction's score: the default of the greedy recompute planner."""
DRAWS = 2
"""Number of moves whose costs are drawn from the belief, beside the one with its mean."""
PAIRS = 8
"""Maximum number of drops for which an exchange is sought, and of additions that are tried for each."""
ADDITIONS = 24
"""Maximum number of added recomputations, and of added swaps, that are simulated."""
WORK, LEAST_EDITS, MOST_EDITS = 60_000, 10, 200
"""Limit of simulated runs (edits times runs of the plan) per kind of edit; lowest and highest limit of edits that it sets."""


@dataclass(frozen=True, slots=True)
class PlanMove:
    """Plan near another one, and the seconds that it may save."""

    text: str
    """Description of the change for people."""
    plan: Plan
    estimate: Estimate
    saved_seconds: float
    """Expected saving of a step, by the belief about costs."""
    uncertainty: float
    """Standard deviation of the saving, in seconds."""

    @property
    def possible_seconds(self) -> float:
        """Saving that is still likely: the expected one plus its standard deviation."""
        return self.saved_seconds + self.uncertainty


@dataclass(frozen=True, slots=True)
class _Edited:
    """Edits of the parent plan with the plan that they make."""

    edits: tuple[PlanEdit, ...]
    plan: Plan
    estimate: Estimate


class MoveSource:
    """Moves of plans of one graph. The last plan's moves are kept, so that new measurements only rank them again.

    >>> from autotune.testing.graphs import training_chain
    >>> graph = training_chain(3)
    >>> costs = Costs.unit(graph)
    >>> plan = Plan((0, 1, 2, 3, 4, 5, 6, 7, 0, 8, 9, 10, 11, 12))
    >>> [move.text for move in MoveSource(graph, costs).propose(plan, 10**6, [])][:1]
    ['fill the budget: 1 recomputation dropped']
    """

    def __init__(self, graph: TrainGraph, costs: Costs, space: Space | None = None) -> None:
        """Create the source. A kind whose only planner in `space` changes nothing is left unchanged by moves, too."""
        self.graph, self.costs = graph, costs
        fixed = {kind for kind, names in (space or {}).items() if set(names) <= {PASSIVE.get(kind)}}
        self._recomputes, self._offloads, self._updates, self._reorders = (
            "recompute" not in fixed, "offload" not in fixed, "update" not in fixed, not fixed >= {"order", "reorder"},
        )  # fmt: skip
        self._edited: dict[int, list[tuple[str, _Edited]]] = {}
        self._edited_of: Plan | None = None
        self._until = math.inf

    def propose(
        self, plan: Plan, target_bytes: int, measured: Sequence[MeasuredPlan], until: float = math.inf
    ) -> list[PlanMove]:
        """Return moves of a plan whose peak is at most `target_bytes`, the largest possible saving first.

        After `until`, a time of the monotonic clock, the search ends and there is no move: a part of all moves would
        depend on the machine's speed. Only one local search of the recomputation may end later.
        """
        self._until = until
        belief = learn_costs(self.graph, self.costs, measured)
        parent = self._estimate(plan)
        before = describe_costs(self.graph, self.costs, plan, parent)
        if self._edited_of != plan:
            self._edited, self._edited_of = {}, plan
        if target_bytes not in self._edited:
            combined = list(self._combine(plan, parent, target_bytes))
            if self._is_late:
                return []
            self._edited[target_bytes] = combined
        changed = [*self._edited[target_bytes], *self._refit(plan, target_bytes, belief, len(measured))]
        if self._is_late:
            return []
        moves: dict[Plan, PlanMove] = {}
        for text, edited in changed:
            if edited.plan != plan and edited.estimate.peak_bytes <= target_bytes:
                after = describe_costs(self.graph, self.costs, edited.plan, edited.estimate)
                moves.setdefault(
                    edited.plan, PlanMove(text, edited.plan, edited.estimate, *belief.predict(before, after))
                )
        return sorted(moves.values(), key=lambda move: -move.possible_seconds)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._until

    def _combine(self, plan: Plan, parent: Estimate, target_bytes: int) -> Iterator[tuple[str, _Edited]]:
        """Yield the moves that do not depend on measurements, with their texts."""
        graph, costs = self.graph, self.costs
        most = max(LEAST_EDITS, min(MOST_EDITS, WORK // max(1, len(plan.order))))
        additions = min(ADDITIONS, most)
        savers: list[_Edited] = []
        payers: list[_Edited] = []
        if self._recomputes:
            savers += self._weigh(plan, islice(list_drops(graph, plan), most))
            payers += self._weigh(plan, list_additions(graph, plan, additions))
        if self._offloads:
            savers += self._weigh(
                plan, (drop_swap(graph, plan, index) for index in range(min(most, len(plan.offload))))
            )
            payers += self._weigh(plan, list_swaps(graph, plan, costs, additions))
        filled = fill_target(self, plan, parent, savers, target_bytes)
        if filled is not None:
            yield f"fill the budget: {count_changes(plan, filled.plan)}", filled
        for single in savers:
            yield single.edits[0].text, single
        yield from self._exchange(plan, parent, savers, payers, target_bytes)
        if self._updates:
            yield from self._move_updates(plan, target_bytes)
        if self._reorders:
            joined = self.join(plan, list(islice(_approach_producers(graph, plan), most)), target_bytes)
            if joined is not None:
                yield f"run {_count(len(joined.edits), 'op')} right after the op that makes an input", joined

    def _move_updates(self, plan: Plan, target_bytes: int) -> Iterator[tuple[str, _Edited]]:
        """Yield the plan with all updates early, and with all at the end, as far as the target allows."""
        for early, place in ((True, "right after their gradients"), (False, "at the end of the step")):
            joined = self.join(plan, list(list_update_edits(self.graph, plan, early=early)), target_bytes)
            if joined is not None:
                yield f"run {_count(len(joined.edits), 'update')} {place}", joined

    def _exchange(
        self, plan: Plan, parent: Estimate, savers: list[_Edited], payers: list[_Edited], target_bytes: int
    ) -> Iterator[tuple[str, _Edited]]:
        """Yield exchanges of one dropped recomputation or swap for another one, and all that can be joined.

        Each of `savers` drops a recomputation or swap: fewer seconds, more bytes. Each of `payers` adds one. For each saver,
        payers that do not raise the peak are tried first, in order of seconds. Measurements decide between equal estimates.
        """
        pairs: list[_Edited] = []
        tight = [saver for saver in savers if saver.estimate.peak_bytes > target_bytes]
        for saver in sorted(tight, key=lambda each: each.estimate.seconds)[:PAIRS]:
            cheap = sorted(
                payers, key=lambda each: (each.estimate.peak_bytes > parent.peak_bytes, each.estimate.seconds)
            )
            joined = (self.apply(plan, (*saver.edits, *payer.edits)) for payer in cheap[:PAIRS])
            pair = next((each for each in joined if each and each.estimate.peak_bytes <= target_bytes), None)
            if pair is not None:
                pairs.append(pair)
                yield "; ".join(edit.text for edit in pair.edits), pair
        if len(pairs) > 1:
            several = self.join_all(plan, [pair.edits for pair in pairs], target_bytes)
            if several is not None and len(several.edits) > 2:
                yield (
                    f"exchange {_count(len(several.edits) // 2, 'pair')}: {count_changes(plan, several.plan)}",
                    several,
                )

    def _refit(self, plan: Plan, target_bytes: int, belief: CostBelief, seed: int) -> Iterator[tuple[str, _Edited]]:
        """Yield the plan with its recomputation improved for the measured costs, and for costs drawn from the belief."""
        if plan.offload or not self._recomputes:
            return  # swaps are recorded as gaps of the order, which would change
        for draw in range(DRAWS + 1):
            drawn = belief if draw == 0 else _draw(belief, seed * DRAWS + draw)
            refitted = self._improve(plan, target_bytes, correct_costs(self.graph, self.costs, drawn))
            if refitted is not None:
                source = "measured costs" if draw == 0 else f"drawn costs {draw}"
                yield f"improve for {source}: {count_changes(plan, refitted.plan)}", refitted

    def _improve(self, plan: Plan, target_bytes: int, seconds: tuple[float, ...]) -> _Edited | None:
        """Return the plan after local moves of its recomputation at these costs; None if its peak exceeds the target."""
        inplace = INPLACES["greedy" if plan.inplace else "never"]()
        once = Plan(tuple(dict.fromkeys(plan.order)))
        ahead = replace(anticipate_inplace("recompute", inplace, self.graph, once, self.costs), seconds=seconds)
        limit = target_bytes
        for _ in range(3):  # an op that was expected in place may not be, so the peak may exceed the limit
            if self._is_late:
                return None
            search = start_search(self.graph, plan.order, ahead)
            search.fit(limit, GREED)
            search.undo(max(limit, search.peak))
            search.improve(limit, GREED, usual_work(len(plan.order)) // 4)
            improved = inplace.plan(self.graph, replace(plan, order=search.order, inplace=()), limit, self.costs)
            try:
                check(self.graph, improved)
            except PlanError:
                return None
            estimate = self._estimate(improved)
            if estimate.peak_bytes <= target_bytes:
                return _Edited((), improved, estimate)
            limit -= estimate.peak_bytes - target_bytes
        return None

    def _weigh(self, plan: Plan, edits: Iterable[PlanEdit]) -> list[_Edited]:
        weighed = (self.apply(plan, (edit,)) for edit in takewhile(lambda _: not self._is_late, edits))
        return [edited for edited in weighed if edited is not None]

    def apply(self, plan: Plan, edits: tuple[PlanEdit, ...]) -> _Edited | None:
        """Return the plan after these edits with its estimate; None where they break a rule, or no time is left."""
        edited = None if self._is_late else edit_plan(self.graph, plan, edits)
        return None if edited is None else _Edited(edits, edited, self._estimate(edited))

    def join(self, plan: Plan, edits: Sequence[PlanEdit], target_bytes: int) -> _Edited | None:
        """Return the plan with most of these edits that can be joined within the target; None without any.

        Edits that do not fit are left out in groups of up to an eighth of all: a single one of these edits saves little.
        """
        return self.join_all(plan, [(edit,) for edit in edits], target_bytes, least=len(edits) // 8)

    def join_all(
        self,
        plan: Plan,
        groups: Sequence[tuple[PlanEdit, ...]],
        target_bytes: int,
        start: _Edited | None = None,
        *,
        least: int = 1,
    ) -> _Edited | None:
        """Join groups of edits: all at once where that fits, else each half in turn; fewer than `least` are left out."""
        if not groups:
            return start
        edits = (*(start.edits if start is not None else ()), *(edit for group in groups for edit in group))
        joined = self.apply(plan, edits)
        if joined is not None and joined.estimate.peak_bytes <= target_bytes:
            return joined
        if len(groups) <= max(1, least):
            return start
        middle = len(groups) // 2
        start = self.join_all(plan, groups[:middle], target_bytes, start, least=least)
        return self.join_all(plan, groups[middle:], target_bytes, start, least=least)

    def _estimate(self, plan: Plan) -> Estimate:
        return simulate(self.graph, lower(self.graph, plan), self.costs)


def fill_target(
    source: MoveSource, plan: Plan, parent: Estimate, savers: Sequence[_Edited], target_bytes: int
) -> _Edited | None:
    """Return the plan with the recomputations and swaps dropped that the target does not need; None without any.

    The edits are added one by one while the peak allows: the most seconds per byte of the peak first, and once more the
    most seconds first. The better result counts. This is the greedy rule for knapsacks.
    """

    def saved(edited: _Edited) -> float:
        return parent.seconds - edited.estimate.seconds

    def density(edited: _Edited) -> float:
        return saved(edited) / max(1, edited.estimate.peak_bytes - parent.peak_bytes)

    results = []
    rules: tuple[Callable[[_Edited], float], ...] = (density, saved)
    for rule in rules:
        ordered = sorted(savers, key=lambda edited: -rule(edited))
        alone = [saver.edits for saver in ordered if saver.estimate.peak_bytes <= target_bytes]
        best = source.join_all(plan, alone, target_bytes)
        if best is not None:  # a drop that did not fit alone may fit after these, which shorten the life of its inputs
            results.append(source.join_all(plan, _absent(ordered, best), target_bytes, best) or best)
    return min(results, key=lambda edited: edited.estimate.seconds, default=None)


def _absent(savers: Sequence[_Edited], joined: _Edited | None) -> list[tuple[PlanEdit, ...]]:
    present = joined.edits if joined is not None else ()
    return [saver.edits for saver in savers if saver.edits[0] not in present]


def _approach_producers(graph: TrainGraph, plan: Plan) -> Iterator[PlanEdit]:
    """Yield an edit for each run that could follow the run that makes its last input, the most distant bytes first."""
    latest: dict[int, int] = {}
    distant = []
    for position, op_id in enumerate(plan.order):
        op = graph.ops[op_id]
        ready = max((latest[value] for value in op.inputs if value in latest), default=position)
        if op.phase is not Phase.UPDATE and ready < position - 1:
            nbytes = sum(graph.values[value].nbytes for value in op.inputs if latest.get(value) == ready)
            distant.append((nbytes, position, ready + 1))
        latest.update(dict.fromkeys(op.outputs, position))
    for _, position, target in sorted(distant, key=lambda entry: (-entry[0], entry[1])):
        name = graph.ops[plan.order[position]].name
        yield PlanEdit(f"run {name} right after its input is made", moved=((position, target),))


def _draw(belief: CostBelief, seed: int) -> CostBelief:
    """Return a belief whose weights are one random draw from another's; one without measurements is returned as it is."""
    generator = np.random.default_rng(seed)
    if not belief.names:
        return belief
    mean = generator.multivariate_normal(belief.mean, belief.covariance, method="svd", check_valid="ignore")
    return replace(belief, mean=mean, covariance=np.zeros_like(belief.covariance))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
