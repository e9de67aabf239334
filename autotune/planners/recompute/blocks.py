"""Solve one block of each kind for all that it can give, choose for every block of the chain, then refine the whole."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Float, Knob
from autotune.planners.recompute.block_options import Option, Piece, options, whole
from autotune.planners.recompute.chain import Choice, cheapest, lowest_limit
from autotune.planners.recompute.editable_order import Runs, refuse_offload
from autotune.planners.recompute.greedy import Greedy
from autotune.planners.recompute.repeats import Block, Places, find
from autotune.planners.recompute.search import Search, begin, usual_work

GROUPS = (2, 3, 4, 6, 8, 12, 16)
"""Blocks that are run again together from where the first begins."""
AIMS = (1.0, 1.02, 1.05)
"""Limits given to the chain, in those of the plan: what is over is evicted in the whole step, which sees more."""
FEW = 3
"""Blocks of a group that may be of any kind; a larger group repeats what was solved."""
LARGEST_GROUP = 1500
"""Ops of a group, at most."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Repeated blocks planned once and combined over their chain, and the greedy eviction of the whole: the better.

    Never above `greedy`'s peak where that is over the budget, never slower where it is not; the same without repeats.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"share": Float(0.0, 1.0), "greed": Float(0.5, 3.0)}
    share: float = 1.0
    """Part of the bytes over the budget that is removed here; what comes after (offload) is left the rest."""
    greed: float = 1.5
    """Exponent of the bytes in bytes per second: higher takes bigger, dearer results first."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The better of the two plans."""
        refuse_offload(plan)
        start = Runs(graph, plan.order, costs)
        limit = int(start.peak - self.share * (start.peak - budget_bytes))
        whole_step = Greedy(self.share, self.greed).plan(graph, plan, budget_bytes, costs)
        if start.peak <= limit or plan.recomputed:
            return whole_step
        by_blocks = by_chain(graph, plan, limit, costs, self.greed)
        made = [Runs(graph, one.order, costs) for one in (whole_step, by_blocks)]
        theirs, ours = ((max(runs.peak, limit), runs.seconds) for runs in made)
        return by_blocks if ours < theirs else whole_step


def by_chain(graph: TrainGraph, plan: Plan, limit: int, costs: Costs, greed: float) -> Plan:
    """The plan of the chain alone, refined; as given where no block repeats."""
    blocks = find(graph, plan.order)
    if len({block.kind for block in blocks}) == len(blocks):
        return plan
    chain = Chain(graph, plan.order, blocks, costs, greed)
    if chain.order(limit) is None:
        lowest = chain.lowest()
        return plan if lowest is None else _sunk(graph, replace(plan, order=lowest), limit, costs, greed)
    found: list[Search] = []
    for order in dict.fromkeys(chain.order(int(aim * limit)) for aim in AIMS):
        if order is not None:
            search = begin(graph, order, costs)
            search.fit(limit, greed)
            if search.peak <= limit:
                search.undo(limit)
                found.append(search)
    cheap = min(found, key=lambda search: search.seconds, default=None)
    return plan if cheap is None else _improved(plan, cheap, limit, greed)


def _sunk(graph: TrainGraph, plan: Plan, limit: int, costs: Costs, greed: float) -> Plan:
    """What the greedy reaches from where the chain ends, and not below the limit."""
    made = Greedy(greed=greed).plan(graph, plan, 0, costs)
    search = begin(graph, made.order, costs)
    if search.peak >= limit:
        return made
    search.undo(limit)
    return _improved(made, search, limit, greed)


def _improved(plan: Plan, search: Search, limit: int, greed: float) -> Plan:
    search.improve(limit, greed, usual_work(len(plan.order)) // 2)
    return replace(plan, order=search.order)


class Chain:
    """Blocks of one order with what each of them, and each group of them, can give."""

    def __init__(
        self, graph: TrainGraph, order: Sequence[int], blocks: Sequence[Block], costs: Costs, greed: float
    ) -> None:
        self.graph, self.given, self.blocks, self.costs, self.greed = graph, order, blocks, costs, greed
        self.bytes = Runs(graph, order, costs).bytes
        self.places = Places.make(graph, order)
        self.kinds = tuple(block.kind for block in blocks)
        self.repeated = {kind for kind, count in Counter(self.kinds).items() if count > 1}
        self.solved: dict[tuple[int, ...], _Solved] = {}

    def order(self, limit: int) -> tuple[int, ...] | None:
        """The cheapest order under a limit; None where there is none, or where it would be no valid plan."""
        chosen = cheapest(len(self.blocks), [choice for choice, _ in self.choices], limit)
        return None if chosen is None else self._flat(chosen)

    def lowest(self) -> tuple[int, ...] | None:
        """The order with the lowest peak."""
        choices = [choice for choice, _ in self.choices]
        low = lowest_limit(len(self.blocks), choices, int(self.bytes.max()), self.graph.static_bytes)
        return self.order(low)

    def _flat(self, chosen: Sequence[int]) -> tuple[int, ...] | None:
        """All forwards as they follow, then all backwards from the last."""
        ahead: list[int] = []
        behind: list[list[int]] = []
        for choice, option in map(self.choices.__getitem__, chosen):
            ops = self._renamed(choice)
            ahead += map(ops, option.forward)
            behind.append([ops(op) for op in option.backward])
        order = (*ahead, *(op for part in reversed(behind) for op in part))
        try:
            check(self.graph, Plan(order))
        except PlanError:
            return None  # blocks of one kind differ in when something outside of them is written
        return order

    @cached_property
    def choices(self) -> tuple[tuple[Choice, Option], ...]:
        """Every option of every block and group; ops are those of the first that is alike."""
        return tuple(self._choices())

    def _choices(self) -> Iterator[tuple[Choice, Option]]:
        for first in range(len(self.blocks)):
            for count in (1, *GROUPS):
                if first + count > len(self.blocks) or not self._worth(first, count):
                    break
                solved = self._solve(first, count)
                forward, backward = self._ops(first, count)
                beside = self._beside(solved, forward, backward)
                for option in solved.options:
                    peak = max(option.forward_bytes + beside[0], option.backward_bytes + beside[1])
                    saved = solved.kept_bytes - option.kept_bytes
                    yield Choice(first, count, saved, peak, option.seconds), option

    def _worth(self, first: int, count: int) -> bool:
        """Whether a group is looked at: small enough, and few or all of kinds that repeat."""
        group = self.blocks[first : first + count]
        size = sum(len(block.forward) + len(block.backward) for block in group)
        alike = self.repeated.issuperset(self.kinds[first : first + count])
        return count == 1 or (size <= LARGEST_GROUP and (count <= FEW or alike))

    def _ops(self, first: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        group = self.blocks[first : first + count]
        backward = tuple(op for block in reversed(group) for op in block.backward)
        return tuple(op for block in group for op in block.forward), backward

    def _beside(self, solved: "_Solved", forward: Sequence[int], backward: Sequence[int]) -> tuple[int, int]:
        """Bytes that stand beside a piece in the given order, during its forward and during its backward."""
        at = self.places.of
        ahead = int(self.bytes[at[forward[0]]]) - solved.bytes[0]
        behind = int(self.bytes[at[backward[0]]]) - solved.bytes[1] if backward else 0
        return ahead, behind

    def _solve(self, first: int, count: int) -> "_Solved":
        key = self.kinds[first : first + count]
        if key not in self.solved:
            forward, backward = self._ops(first, count)
            plain = Piece.cut(self.graph, self.places, self.costs, (forward, backward))
            bare = plain.start().bytes
            last = plain.gap + 2
            inner = (int(bare[1]), int(bare[last]) if backward else 0)
            blank = _Solved(first, (), plain.given.kept_bytes, inner)
            beside = self._beside(blank, forward, backward)
            piece = Piece.cut(self.graph, self.places, self.costs, (forward, backward), beside)
            found = options(piece, self.greed) if count == 1 else self._groups(piece, first, count)
            self.solved[key] = replace(blank, options=found)
        return self.solved[key]

    def _groups(self, piece: Piece, first: int, count: int) -> tuple[Option, ...]:
        """All run again from where they begin, each then kept whole, halfway, or as little as can be."""
        may_repeat = Runs(piece.graph, (), piece.costs).repeatable
        number = {op: at for at, op in enumerate(piece.forward, 1)}
        made = []
        for rank in (0.0, 0.5, 1.0):
            inside = []
            for at in range(first, first + count):
                found = self._solve(at, 1).options
                option = sorted(found, key=lambda one: -one.kept_bytes)[int(rank * (len(found) - 1))]
                ops = self._renamed(Choice(at, 1, 0, 0, 0.0))
                inside.append(([ops(op) for op in option.forward], [ops(op) for op in option.backward]))
            made.append(whole(piece, inside, lambda op: may_repeat[number[op]]))
        return tuple(made)

    def _renamed(self, choice: Choice) -> Callable[[int], int]:
        """From the ops of the blocks that were solved to those of the blocks that the choice is for."""
        key = self.kinds[choice.first : choice.first + choice.count]
        forward, backward = self._ops(self.solved[key].first, choice.count)
        mine, back = self._ops(choice.first, choice.count)
        return dict(zip((*forward, *backward), (*mine, *back), strict=True)).__getitem__


@dataclass(frozen=True, slots=True)
class _Solved:
    """The options of a kind, as ops of its first block."""

    first: int
    options: tuple[Option, ...]
    kept_bytes: int
    """As given."""
    bytes: tuple[int, int]
    """Of the piece alone at the first op of its forward and of its backward."""
