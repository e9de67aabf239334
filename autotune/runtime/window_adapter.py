"""Change the window while training: N, and the share of what leaves, by what the last steps waited for.

nntrainer #789 calls it Design 2. Every window to choose from was lowered, checked and found to keep the budget beforehand;
a change happens between steps only.
"""

import itertools
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import around, away, layer_runs
from autotune.predict.simulate import peak_bytes
from autotune.records.measurement import Lanes, Span, busy

_log = logging.getLogger(__name__)

WINDOWS = (1, 2, 3, 4, 6, 8)
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the bytes that leave in the plan as it was made."""
UNSETTLED, STEPS = 2, 3
"""Steps after a change that are not looked at (an arena records them), and steps that a decision looks at."""
MUCH, LITTLE = 0.02, 0.002
"""Of a step: waiting worth a change, and as good as none."""
FULL, IDLE = 0.9, 0.5
"""Of the time from its first transfer to its last, that a lane is busy: short of bandwidth from here on, idle below."""
TIGHT = 0.97
"""Of the budget: above it less memory is worth having."""
QUIET = 3
"""Decisions in a row without a change, after which only a drift is looked for."""
DRIFT = 0.1
"""Of the step's seconds."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The plan with another window, and some of its swaps left out."""

    plan: Plan
    share: float
    peak_bytes: int
    """As the simulator predicts it."""

    @property
    def window(self) -> int:
        """N."""
        return self.plan.window


def variants(graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> tuple[Variant, ...]:
    """The plan itself first, and what keeps the budget, or peaks no higher than the plan itself."""
    start = Variant(plan, 1.0, peak_bytes(graph, plan, costs))
    most = max(budget_bytes, start.peak_bytes)
    found = [start]
    for window, share in itertools.product(WINDOWS, SHARES):
        made = replace(plan, window=window, offload=_longest_away(graph, replace(plan, window=window), costs, share))
        if made == plan or not made.offload or any(made == known.plan for known in found):
            continue
        peak = peak_bytes(graph, made, costs)
        if peak <= most:
            check(graph, made)
            found.append(Variant(made, share, peak))
    return tuple(found)


def _longest_away(graph: TrainGraph, plan: Plan, costs: Costs, share: float) -> tuple[Swap, ...]:
    """Of what still leaves with the plan's window those that are away longest, up to a share of all bytes that left."""
    layers, happened = layer_runs(graph, plan.order), events(graph, plan.order)
    clock = [0.0, *itertools.accumulate(costs.seconds[op] for op in plan.order)]
    # what the plan's own window left room for, another may not
    bare = [Swap(swap.value, swap.gap) for swap in plan.offload]
    leaving = [swap for swap in bare if away(*around(layers, happened[swap.value], swap.gap), plan.window)]

    def seconds(swap: Swap) -> float:
        own = happened[swap.value]
        return clock[own[swap.gap + 1][0]] - (clock[own[swap.gap][0]] if swap.gap >= 0 else 0.0)

    room = share * sum(graph.values[swap.value].nbytes for swap in plan.offload)
    kept = []
    for swap in sorted(leaving, key=lambda swap: (-seconds(swap), swap.value, swap.gap)):
        if graph.values[swap.value].nbytes <= room:
            room -= graph.values[swap.value].nbytes
            kept.append(swap)
    return tuple(sorted(kept, key=lambda swap: (swap.value, swap.gap)))


@dataclass
class Adapter:
    """Which variant the next step runs: `now`. Told of every step by `saw`.

    Waiting raises N, which begins loads earlier and gives saves longer. Where the lane is busy all its time that helps
    little: then less leaves, as far as the budget allows. With no waiting and idle lanes a lower N saves memory where the
    budget is tight. What made steps slower is taken back, and not tried again until they drift.
    """

    known: Sequence[Variant]
    budget_bytes: int
    now: Variant = field(init=False)
    changes: list[str] = field(default_factory=list)
    """One line for each, with its reason."""
    _since: int = 0
    _lanes: list[Lanes] = field(default_factory=list)
    _before: tuple[Variant, float] | None = None
    """What the last change came from, and its seconds."""
    _refused: set[Variant] = field(default_factory=set)
    _quiet: int = 0
    _usual: float = 0.0

    def __post_init__(self) -> None:
        self.now = self.known[0]

    def saw(self, lanes: Lanes) -> None:
        """A step of `now` went so."""
        self._since += 1
        if self._since <= UNSETTLED:
            return
        self._lanes.append(lanes)
        if len(self._lanes) == STEPS:
            self._decide(self._lanes)
            self._lanes = []

    @property
    def settled(self) -> bool:
        """Whether nothing was worth a change for a while."""
        return self._quiet >= QUIET

    def _decide(self, seen: list[Lanes]) -> None:
        seconds = statistics.median(lanes.seconds for lanes in seen)
        if self.settled:
            if abs(seconds - self._usual) > DRIFT * self._usual:
                self._quiet, self._before = 0, None
                self._refused.clear()
            return
        if self._before is not None and seconds > (1 + MUCH) * self._before[1]:
            slower, (earlier, _) = self.now, self._before
            way = slower.window - earlier.window
            # what lies further that way is no faster either
            self._refused.update(
                one for one in self.known if one.share == slower.share and way * (one.window - slower.window) >= 0
            )
            self._change(earlier, "the step got slower", None)
            return
        wanted = self._wanted(seen)
        if wanted is None:
            self._quiet += 1
            self._usual = seconds
            return
        self._change(*wanted, (self.now, seconds))

    def _wanted(self, seen: list[Lanes]) -> tuple[Variant, str] | None:
        """Another variant and why, from the steps of this one."""
        loading = statistics.median(busy(lanes.load_stalls) / lanes.seconds for lanes in seen)
        saving = statistics.median(busy(lanes.save_stalls) / lanes.seconds for lanes in seen)
        load_use = statistics.median(_use(lanes.loads) for lanes in seen)
        save_use = statistics.median(_use(lanes.saves) for lanes in seen)
        if loading > MUCH or saving > MUCH:
            full = (loading > MUCH and load_use >= FULL) or (saving > MUCH and save_use >= FULL)
            ways = (self._with_less, self._wider) if full else (self._wider, self._with_less)
            other = next((found for way in ways if (found := way()) is not None), None)
            why = f"waited {loading + saving:.1%} of the step, the lanes were busy {load_use:.0%} and {save_use:.0%} of their time"
            return None if other is None else (other, why)
        idle = max(loading, saving) < LITTLE and max(load_use, save_use) < IDLE
        if idle and self.now.peak_bytes > TIGHT * self.budget_bytes and (less := self._narrower()):
            return less, "nothing waited, both lanes are idle, and memory is short"
        return None

    def _wider(self) -> Variant | None:
        """About twice the window, with the same share: a step that waits costs time at once."""
        known = [one for one in self._allowed() if one.share == self.now.share and one.window > self.now.window]
        return min(known, key=lambda one: abs(one.window - 2 * self.now.window), default=None)

    def _narrower(self) -> Variant | None:
        """The next narrower window, with the same share."""
        known = [one for one in self._allowed() if one.share == self.now.share and one.window < self.now.window]
        return max(known, key=lambda one: one.window, default=None)

    def _with_less(self) -> Variant | None:
        """The next smaller share, with the widest window that allows it."""
        known = [one for one in self._allowed() if one.share < self.now.share]
        return max(known, key=lambda one: (one.share, one.window), default=None)

    def _allowed(self) -> list[Variant]:
        return [one for one in self.known if one not in self._refused]

    def _change(self, to: Variant, why: str, before: tuple[Variant, float] | None) -> None:
        line = f"window {self.now.window} -> {to.window}, share {self.now.share:.2f} -> {to.share:.2f}: {why}"
        _log.info("offload: %s", line)
        self.changes.append(line)
        self.now, self._before, self._since, self._quiet = to, before, 0, 0


def _use(lane: Sequence[Span]) -> float:
    """Part of the time from a lane's first transfer to its last that it was busy."""
    if not lane:
        return 0.0
    span = max(end for _, end in lane) - min(start for start, _ in lane)
    return busy(lane) / span if span else 0.0
