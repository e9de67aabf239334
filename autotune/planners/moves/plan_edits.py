"""Edit a plan: drop, add and move runs, drop and add swaps, and carry the remaining decisions to the new positions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import InPlace, Plan, Swap, events
from autotune.ir.schedule import gap_layers, layer_numbers, leaves_memory
from autotune.planners.inplace.greedy import GreedyInPlace, last_reads


@dataclass(frozen=True, slots=True)
class PlanEdit:
    """Change of a plan. Positions are those of the plan's order before any edit, so edits of one plan can be joined.

    >>> from autotune.testing.graphs import chain
    >>> edit_plan(chain(3), Plan((0, 1, 0, 2)), [PlanEdit("drop op0", dropped=(2,))]).order
    (0, 1, 2)
    """

    text: str
    """Description of the change for people."""
    dropped: tuple[int, ...] = ()
    """Positions of the runs to drop."""
    added: tuple[tuple[int, int], ...] = ()
    """(op, position) of each run to add right before the run at that position."""
    moved: tuple[tuple[int, int], ...] = ()
    """(from, to) of each run that moves right before the run at position `to`; the order's length stands for its end."""
    kept: tuple[tuple[int, int], ...] = ()
    """(value, gap) of each swap to drop."""
    offloaded: tuple[tuple[int, int], ...] = ()
    """(value, position) of each swap to add, in the gap before that read."""
    store: str = ""
    """Store for the added swaps, where the plan has none."""


def edit_plan(graph: TrainGraph, plan: Plan, edits: Iterable[PlanEdit]) -> Plan | None:
    """Return the checked plan after these edits; None where they break a rule of the plan.

    Runs whose results no run reads any more are dropped, too. If the plan runs in place wherever that is possible, so does
    the edited plan. Otherwise runs stay in place where their input still dies. A swap stays if its value still leaves memory.
    """
    edits = list(edits)
    runs = _edit_runs(graph, plan, edits)
    order = tuple(plan.order[run] if run >= 0 else ~run for run in runs)
    positions = {run: position for position, run in enumerate(runs) if run >= 0}
    try:
        edited = replace(plan, order=order, offload=(), inplace=_carry_inplace(graph, plan, order, positions))
        edited = _carry_swaps(graph, plan, edited, edits, positions)
        check(graph, edited)
    except PlanError:
        return None
    return edited


def complete_edit(graph: TrainGraph, plan: Plan, edit: PlanEdit) -> PlanEdit | None:
    """Return the edit with every run that it drops; None where it breaks a rule or changes nothing."""
    runs = _edit_runs(graph, plan, [edit])
    if sum(run < 0 for run in runs) < len(edit.added):
        return None  # nobody would read an added run
    dropped = sorted(set(range(len(plan.order))).difference(runs))
    edited = edit_plan(graph, plan, [edit])
    return None if edited is None or edited == plan else replace(edit, dropped=tuple(dropped))


def list_recomputations(plan: Plan) -> list[int]:
    """Return the positions of all runs but the first of each op."""
    ran: set[int] = set()
    repeated = []
    for position, op in enumerate(plan.order):
        if op in ran:
            repeated.append(position)
        ran.add(op)
    return repeated


def count_changes(before: Plan, after: Plan) -> str:
    """Return the number of runs and swaps that differ between two plans of a graph, as text.

    >>> count_changes(Plan((0, 1, 0, 2)), Plan((0, 1, 2)))
    '1 recomputation dropped'
    """
    dropped = (Counter(before.order) - Counter(after.order)).total()
    added = (Counter(after.order) - Counter(before.order)).total()
    swaps, other = ({(swap.value, swap.gap) for swap in plan.offload} for plan in (before, after))
    fewer, more = len(before.offload) - len(after.offload), len(after.offload) - len(before.offload)
    parts = [
        f"{count} {noun}{'s' * (count > 1)} {verb}"
        for count, noun, verb in (
            (dropped, "recomputation", "dropped"),
            (added, "recomputation", "added"),
            (max(fewer, 0), "swap", "dropped"),
            (max(more, 0), "swap", "added"),
        )
        if count
    ]
    if not parts and swaps != other:
        parts = ["other swaps"]
    return ", ".join(parts) or "another order"


def _edit_runs(graph: TrainGraph, plan: Plan, edits: Sequence[PlanEdit]) -> list[int]:
    """Return the runs after the edits: positions of the plan's order, and `~op` for each new run of an op."""
    absent = {position for edit in edits for position in edit.dropped}
    before: dict[int, list[int]] = {}
    for edit in edits:
        for op, position in edit.added:
            before.setdefault(position, []).append(~op)
    moved = {start: end for edit in edits for start, end in edit.moved if start not in absent}
    for start, end in moved.items():
        before.setdefault(end, []).append(start)
    runs: list[int] = []
    for position in range(len(plan.order) + 1):
        runs += before.get(position, ())
        if position < len(plan.order) and position not in absent and position not in moved:
            runs.append(position)
    return _drop_unread(graph, plan, runs, _unread_runs(graph, plan))


@lru_cache(maxsize=8)
def _unread_runs(graph: TrainGraph, plan: Plan) -> frozenset[int]:
    """Return the positions of runs whose results no run of the unedited plan reads. They stay unless an edit names them."""
    every = range(len(plan.order))
    return frozenset(every).difference(_drop_unread(graph, plan, every, frozenset()))


def _drop_unread(graph: TrainGraph, plan: Plan, runs: Sequence[int], spared: frozenset[int]) -> list[int]:
    """Return the runs without those whose results no run reads; runs in `spared` stay, and so does an op's only run."""
    remaining = Counter(plan.order[run] if run >= 0 else ~run for run in runs)
    needed = set(graph.outputs)
    kept: list[int] = []
    for run in reversed(runs):
        op = graph.ops[plan.order[run] if run >= 0 else ~run]
        if run not in spared and remaining[op.id] > 1 and needed.isdisjoint(op.outputs):
            remaining[op.id] -= 1
            continue
        kept.append(run)
        needed.difference_update(op.outputs)
        needed.update(op.inputs)
    return kept[::-1]


def _carry_inplace(
    graph: TrainGraph, plan: Plan, order: tuple[int, ...], positions: dict[int, int]
) -> tuple[InPlace, ...]:
    if not plan.inplace:
        return ()
    if _is_greedy(graph, plan):
        return GreedyInPlace().plan(graph, Plan(order), 0, Costs.unit(graph)).inplace
    dying = last_reads(graph, order)
    carried = [InPlace(positions[reuse.position], reuse.value) for reuse in plan.inplace if reuse.position in positions]
    return tuple(reuse for reuse in carried if (reuse.position, reuse.value) in dying)


@lru_cache(maxsize=8)
def _is_greedy(graph: TrainGraph, plan: Plan) -> bool:
    """Return True if the plan runs in place wherever the greedy in-place planner would."""
    return GreedyInPlace().plan(graph, plan, 0, Costs.unit(graph)).inplace == plan.inplace


def _carry_swaps(
    graph: TrainGraph, plan: Plan, edited: Plan, edits: Sequence[PlanEdit], positions: dict[int, int]
) -> Plan:
    """Return the edited plan with the swaps that remain and those that are added.

    Raises PlanError for an added swap whose value would not leave memory.
    """
    if not plan.offload and not any(edit.offloaded for edit in edits):
        return edited
    before, after = events(graph, plan.order), events(graph, edited.order)
    layers = layer_numbers(graph, edited.order)
    kept = {gap for edit in edits for gap in edit.kept}
    swaps: dict[tuple[int, int], Swap] = {}
    for swap in plan.offload:
        if (swap.value, swap.gap) in kept:
            continue
        reads = takewhile(lambda event: not event[1], before[swap.value][swap.gap + 1 :])
        reader = next((positions[position] for position, _ in reads if position in positions), None)
        if reader is None:
            continue
        gap = _gap_before(after[swap.value], reader)
        for late, early in ((swap.late, swap.early), (0, 0)):
            save, load = gap_layers(layers, after[swap.value], gap)
            if leaves_memory(save + late, load - early, plan.window):
                swaps.setdefault((swap.value, gap), Swap(swap.value, gap, late, early))
                break
    for edit in edits:
        for value, position in edit.offloaded:
            if position not in positions:
                raise PlanError(f"the reader of {graph.values[value].name} is dropped, so its swap has no end")
            gap = _gap_before(after[value], positions[position])
            if not leaves_memory(*gap_layers(layers, after[value], gap), plan.window):
                raise PlanError(f"{graph.values[value].name} does not leave memory in gap {gap}")
            swaps.setdefault((value, gap), Swap(value, gap))
    store = plan.store or next((edit.store for edit in edits if edit.store), "")
    if not swaps:
        return replace(edited, store="", window=1) if plan.offload else edited
    return replace(edited, offload=tuple(swaps.values()), store=store)


def _gap_before(value_events: Sequence[tuple[int, bool]], reader: int) -> int:
    """Return the gap that ends with the read at a position; -1 for the value's first event."""
    return value_events.index((reader, False)) - 1
