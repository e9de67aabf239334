"""Solve one block of each kind, choose an option for every block of the chain, then refine the whole step."""

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
from autotune.planners.recompute.block_options import Option, Piece, recompute_whole, solve_options
from autotune.planners.recompute.chain import BlockChoice, choose_cheapest, find_lowest_limit
from autotune.planners.recompute.editable_order import EditableOrder, refuse_inplace_and_offload
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.planners.recompute.repeats import Block, Positions, find_blocks
from autotune.planners.recompute.search import Search, start_search, usual_work

GROUPS = (2, 3, 4, 6, 8, 12, 16)
"""Sizes of groups of blocks that are recomputed together from the first block's inputs."""
AIMS = (1.0, 1.02, 1.05)
"""Limits of the chain, as multiples of the plan's limit. The excess is evicted in the whole step, which is more exact."""
LONGEST_ORDER = 5000
"""Maximum length of an order that is planned by blocks; a longer one is planned by greedy eviction alone."""
MAX_MIXED_GROUP = 3
"""Maximum number of blocks in a group of any kinds; the blocks of a larger group must all be repeated kinds."""
MAX_GROUP_OPS = 1500
"""Maximum number of ops in a group."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Planner that solves repeated blocks once, combines them over their chain, and compares with greedy eviction.

    The result is never worse than that of `greedy`: no higher peak above the budget, no more seconds within it. Without
    repeated blocks, and for orders longer than `LONGEST_ORDER`, it is the same plan.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"share": Float(0.0, 1.0), "greed": Float(0.5, 3.0)}
    share: float = 1.0
    """Share of the bytes over the budget to remove here; the rest is left to offload."""
    greed: float = 1.5
    """Exponent of the freed bytes in a score; higher values evict large, expensive results first."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the better of the greedy plan and the plan by blocks."""
        refuse_inplace_and_offload(plan)
        start = EditableOrder(graph, plan.order, costs)
        limit = int(start.peak - self.share * (start.peak - budget_bytes))
        whole_step = GreedyEviction(self.share, self.greed).plan(graph, plan, budget_bytes, costs)
        if start.peak <= limit or plan.recomputed or len(plan.order) > LONGEST_ORDER:
            return whole_step
        by_blocks = plan_by_chain(graph, plan, limit, costs, self.greed)
        orders = [EditableOrder(graph, candidate.order, costs) for candidate in (whole_step, by_blocks)]
        greedy_rank, block_rank = ((max(order.peak, limit), order.seconds) for order in orders)
        return by_blocks if block_rank < greedy_rank else whole_step


def plan_by_chain(graph: TrainGraph, plan: Plan, limit: int, costs: Costs, greed: float) -> Plan:
    """Return the refined plan of the chain alone; the input plan if no block repeats."""
    blocks = find_blocks(graph, plan.order)
    if len({block.kind for block in blocks}) == len(blocks):
        return plan
    chain = Chain(graph, plan.order, blocks, costs, greed)
    if chain.order(limit) is None:
        lowest = chain.lowest()
        return plan if lowest is None else _lower_further(graph, replace(plan, order=lowest), limit, costs, greed)
    searches: list[Search] = []
    for order in dict.fromkeys(chain.order(int(aim * limit)) for aim in AIMS):
        if order is not None:
            search = start_search(graph, order, costs)
            search.fit(limit, greed)
            if search.peak <= limit:
                search.undo(limit)
                searches.append(search)
    cheap = min(searches, key=lambda search: search.seconds, default=None)
    return plan if cheap is None else _improve(plan, cheap, limit, greed)


def _lower_further(graph: TrainGraph, plan: Plan, limit: int, costs: Costs, greed: float) -> Plan:
    """Return the plan that greedy eviction reaches from the chain's lowest order, with its peak at least the limit."""
    lowest = GreedyEviction(greed=greed).plan(graph, plan, 0, costs)
    search = start_search(graph, lowest.order, costs)
    if search.peak >= limit:
        return lowest
    search.undo(limit)
    return _improve(lowest, search, limit, greed)


def _improve(plan: Plan, search: Search, limit: int, greed: float) -> Plan:
    search.improve(limit, greed, usual_work(len(plan.order)) // 2)
    return replace(plan, order=search.order)


class Chain:
    """Chain of the blocks of one order, with the options of each block and each group."""

    def __init__(
        self, graph: TrainGraph, order: Sequence[int], blocks: Sequence[Block], costs: Costs, greed: float
    ) -> None:
        self.graph, self.blocks, self.costs, self.greed = graph, blocks, costs, greed
        self.bytes = EditableOrder(graph, order, costs).bytes
        self.positions = Positions.from_order(graph, order)
        self.kinds = tuple(block.kind for block in blocks)
        self.repeated = {kind for kind, count in Counter(self.kinds).items() if count > 1}
        self.solved: dict[tuple[int, ...], _Solved] = {}

    def order(self, limit: int) -> tuple[int, ...] | None:
        """Return the cheapest order within a limit; None if none fits or it would be no valid plan."""
        chosen = choose_cheapest(len(self.blocks), [choice for choice, _ in self.choices], limit)
        return None if chosen is None else self._join(chosen)

    def lowest(self) -> tuple[int, ...] | None:
        """Return the order with the lowest peak; None if it would be no valid plan."""
        choices = [choice for choice, _ in self.choices]
        low = find_lowest_limit(len(self.blocks), choices, int(self.bytes.max()), self.graph.static_bytes)
        return self.order(low)

    def _join(self, chosen: Sequence[int]) -> tuple[int, ...] | None:
        """Return all forwards in turn, then all backwards from the last; None if that is no valid plan."""
        ahead: list[int] = []
        behind: list[list[int]] = []
        for choice, option in map(self.choices.__getitem__, chosen):
            ops = self._renaming(choice)
            ahead += map(ops, option.forward)
            behind.append([ops(op) for op in option.backward])
        order = (*ahead, *(op for part in reversed(behind) for op in part))
        try:
            check(self.graph, Plan(order))
        except PlanError:
            return None  # blocks of one kind may differ in when a value outside of them is overwritten
        return order

    @cached_property
    def choices(self) -> tuple[tuple[BlockChoice, Option], ...]:
        """Options of every block and group. Ops are those of the first block or group of the same kind."""
        return tuple(self._choices())

    def _choices(self) -> Iterator[tuple[BlockChoice, Option]]:
        for first in range(len(self.blocks)):
            for count in (1, *GROUPS):
                if first + count > len(self.blocks) or not self._is_promising(first, count):
                    break
                solved = self._solve(first, count)
                forward, backward = self._ops(first, count)
                beside = self._beside(solved, forward, backward)
                for option in solved.options:
                    peak = max(option.forward_bytes + beside[0], option.backward_bytes + beside[1])
                    saved = solved.kept_bytes - option.kept_bytes
                    yield BlockChoice(first, count, saved, peak, option.seconds), option

    def _is_promising(self, first: int, count: int) -> bool:
        """Return true for a group to solve: few enough ops, and few blocks or only repeated kinds."""
        group = self.blocks[first : first + count]
        size = sum(len(block.forward) + len(block.backward) for block in group)
        alike = self.repeated.issuperset(self.kinds[first : first + count])
        return count == 1 or (size <= MAX_GROUP_OPS and (count <= MAX_MIXED_GROUP or alike))

    def _ops(self, first: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        group = self.blocks[first : first + count]
        backward = tuple(op for block in reversed(group) for op in block.backward)
        return tuple(op for block in group for op in block.forward), backward

    def _beside(self, solved: "_Solved", forward: Sequence[int], backward: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that are live beside a piece in the input order, during its forward and its backward."""
        positions = self.positions.by_op
        ahead = int(self.bytes[positions[forward[0]]]) - solved.bytes[0]
        behind = int(self.bytes[positions[backward[0]]]) - solved.bytes[1] if backward else 0
        return ahead, behind

    def _solve(self, first: int, count: int) -> "_Solved":
        key = self.kinds[first : first + count]
        if key not in self.solved:
            forward, backward = self._ops(first, count)
            plain = Piece.from_block(self.graph, self.positions, self.costs, (forward, backward))
            bare = plain.edit().bytes
            last = plain.gap + 2
            inner = (int(bare[1]), int(bare[last]) if backward else 0)
            blank = _Solved(first, (), plain.unchanged.kept_bytes, inner)
            beside = self._beside(blank, forward, backward)
            piece = Piece.from_block(self.graph, self.positions, self.costs, (forward, backward), beside)
            options = solve_options(piece, self.greed) if count == 1 else self._group_options(piece, first, count)
            self.solved[key] = replace(blank, options=options)
        return self.solved[key]

    def _group_options(self, piece: Piece, first: int, count: int) -> tuple[Option, ...]:
        """Return options that recompute the group from its inputs, with most, half or least bytes kept within each block."""
        may_repeat = EditableOrder(piece.graph, (), piece.costs).repeatable
        number = {op: index for index, op in enumerate(piece.forward, 1)}
        group_options = []
        for rank in (0.0, 0.5, 1.0):
            inside = []
            for block in range(first, first + count):
                block_options = sorted(self._solve(block, 1).options, key=lambda option: -option.kept_bytes)
                option = block_options[int(rank * (len(block_options) - 1))]
                ops = self._renaming(BlockChoice(block, 1, 0, 0, 0.0))
                inside.append(([ops(op) for op in option.forward], [ops(op) for op in option.backward]))
            group_options.append(recompute_whole(piece, inside, lambda op: may_repeat[number[op]]))
        return tuple(group_options)

    def _renaming(self, choice: BlockChoice) -> Callable[[int], int]:
        """Return the map from the ops of the solved blocks to those of the choice's blocks."""
        key = self.kinds[choice.first : choice.first + choice.count]
        forward, backward = self._ops(self.solved[key].first, choice.count)
        target_forward, target_backward = self._ops(choice.first, choice.count)
        target = (*target_forward, *target_backward)
        return dict(zip((*forward, *backward), target, strict=True)).__getitem__


@dataclass(frozen=True, slots=True)
class _Solved:
    """Options of a kind of block or group, with the ops of its first occurrence."""

    first: int
    options: tuple[Option, ...]
    kept_bytes: int
    """Bytes kept across the gap by the input order."""
    bytes: tuple[int, int]
    """Bytes of the piece alone at the first op of its forward and of its backward."""
