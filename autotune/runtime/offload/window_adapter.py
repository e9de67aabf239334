"""Adapt the offload window while training: its width N, and the share of offloaded bytes, from measured stalls.

This is Design 2 of nntrainer issue #789. Every variant is lowered, checked and simulated beforehand, so that none
exceeds the budget. Changes happen between steps only.
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
from autotune.ir.schedule import gap_layers, layer_numbers, leaves_memory
from autotune.predict.simulate import peak_bytes
from autotune.records.measurement import Span, TransferTrace, total_seconds

_log = logging.getLogger(__name__)

WINDOWS = (1, 2, 3, 4, 6, 8)
"""Windows N to choose from."""
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares to choose from, of the bytes that the original plan offloads."""
UNSETTLED_STEPS, DECISION_STEPS = 2, 3
"""Steps ignored after a change, as an arena records them, and steps that a decision is based on."""
SIGNIFICANT_STALL, NEGLIGIBLE_STALL = 0.02, 0.002
"""Shares of a step's time: a stall worth a change, and a stall that counts as none."""
FULL_USE, IDLE_USE = 0.9, 0.5
"""Shares of busy time between a worker's first and last transfer: bandwidth-bound from the first on, idle below the second."""
TIGHT_MEMORY = 0.97
"""Share of the budget above which a smaller peak is worth a change."""
SETTLED_DECISIONS = 3
"""Consecutive decisions without a change after which only a drift starts another."""
DRIFT = 0.1
"""Relative change of the step's time that counts as a drift."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan with another window, and without some of its swaps."""

    plan: Plan
    share: float
    """Share of the original plan's offloaded bytes."""
    peak_bytes: int
    """Peak predicted by the simulator."""

    @property
    def window(self) -> int:
        """Window N of the plan."""
        return self.plan.window


def make_variants(graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> tuple[Variant, ...]:
    """Return the plan itself first, then each variant that fits the budget or peaks no higher than the plan."""
    original = Variant(plan, 1.0, peak_bytes(graph, plan, costs))
    limit = max(budget_bytes, original.peak_bytes)
    variants = [original]
    for window, share in itertools.product(WINDOWS, SHARES):
        offload = _select_swaps(graph, replace(plan, window=window), costs, share)
        candidate = replace(plan, window=window, offload=offload)
        if candidate == plan or not candidate.offload or any(candidate == variant.plan for variant in variants):
            continue
        peak = peak_bytes(graph, candidate, costs)
        if peak <= limit:
            check(graph, candidate)
            variants.append(Variant(candidate, share, peak))
    return tuple(variants)


def _select_swaps(graph: TrainGraph, plan: Plan, costs: Costs, share: float) -> tuple[Swap, ...]:
    """Select the swaps with the longest time outside of memory, up to a share of all bytes that the plan offloads."""
    layers, accesses = layer_numbers(graph, plan.order), events(graph, plan.order)
    clock = [0.0, *itertools.accumulate(costs.seconds[op] for op in plan.order)]
    # shifts that fit the original window may not fit another one
    unshifted = [Swap(swap.value, swap.gap) for swap in plan.offload]
    possible = [
        swap for swap in unshifted if leaves_memory(*gap_layers(layers, accesses[swap.value], swap.gap), plan.window)
    ]

    def seconds_away(swap: Swap) -> float:
        positions = accesses[swap.value]
        return clock[positions[swap.gap + 1][0]] - (clock[positions[swap.gap][0]] if swap.gap >= 0 else 0.0)

    room = share * sum(graph.values[swap.value].nbytes for swap in plan.offload)
    selected = []
    for swap in sorted(possible, key=lambda swap: (-seconds_away(swap), swap.value, swap.gap)):
        if graph.values[swap.value].nbytes <= room:
            room -= graph.values[swap.value].nbytes
            selected.append(swap)
    return tuple(sorted(selected, key=lambda swap: (swap.value, swap.gap)))


@dataclass
class WindowAdapter:
    """Choice of the variant for the next step, `current`, from the transfers of the steps so far.

    Stalls raise N, which starts reads earlier and gives writes more time. If the worker is busy all the time, a wider
    window helps little: then fewer bytes are offloaded, as far as the budget allows. Without stalls and with idle workers
    a smaller N saves memory if the budget is tight. A change that made steps slower is undone, and not tried again
    until the step time drifts.
    """

    variants: Sequence[Variant]
    budget_bytes: int
    current: Variant = field(init=False)
    changes: list[str] = field(default_factory=list)
    """One line per change, with its reason."""
    _steps_since_change: int = 0
    _traces: list[TransferTrace] = field(default_factory=list)
    _previous: tuple[Variant, float] | None = None
    """Variant before the last change, and its seconds per step."""
    _refused: set[Variant] = field(default_factory=set)
    _unchanged_decisions: int = 0
    _settled_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.current = self.variants[0]

    def record(self, trace: TransferTrace) -> None:
        """Add the transfers of a step with `current`, and decide on a change after enough steps."""
        self._steps_since_change += 1
        if self._steps_since_change <= UNSETTLED_STEPS:
            return
        self._traces.append(trace)
        if len(self._traces) == DECISION_STEPS:
            self._decide(self._traces)
            self._traces = []

    @property
    def is_settled(self) -> bool:
        """True if the last few decisions made no change."""
        return self._unchanged_decisions >= SETTLED_DECISIONS

    def _decide(self, traces: list[TransferTrace]) -> None:
        seconds = statistics.median(trace.seconds for trace in traces)
        if self.is_settled:
            if abs(seconds - self._settled_seconds) > DRIFT * self._settled_seconds:
                self._unchanged_decisions, self._previous = 0, None
                self._refused.clear()
            return
        if self._previous is not None and seconds > (1 + SIGNIFICANT_STALL) * self._previous[1]:
            self._undo(self._previous[0])
            return
        better = self._better_variant(traces)
        if better is None:
            self._unchanged_decisions += 1
            self._settled_seconds = seconds
            return
        self._change(*better, (self.current, seconds))

    def _undo(self, earlier: Variant) -> None:
        slower = self.current
        direction = slower.window - earlier.window
        # variants further in the same direction are no faster either
        self._refused.update(
            variant
            for variant in self.variants
            if variant.share == slower.share and direction * (variant.window - slower.window) >= 0
        )
        self._change(earlier, "the step became slower", None)

    def _better_variant(self, traces: list[TransferTrace]) -> tuple[Variant, str] | None:
        """Return another variant to try with its reason, or None."""
        read_stall = statistics.median(total_seconds(trace.load_stalls) / trace.seconds for trace in traces)
        write_stall = statistics.median(total_seconds(trace.save_stalls) / trace.seconds for trace in traces)
        read_use = statistics.median(_use(trace.loads) for trace in traces)
        write_use = statistics.median(_use(trace.saves) for trace in traces)
        if read_stall > SIGNIFICANT_STALL or write_stall > SIGNIFICANT_STALL:
            is_full = (read_stall > SIGNIFICANT_STALL and read_use >= FULL_USE) or (
                write_stall > SIGNIFICANT_STALL and write_use >= FULL_USE
            )
            options = (self._less_offload, self._wider) if is_full else (self._wider, self._less_offload)
            variant = next((variant for option in options if (variant := option()) is not None), None)
            reason = (
                f"stalled {read_stall + write_stall:.1%} of the step, the reader was busy {read_use:.0%} and the writer "
                f"{write_use:.0%} of their time"
            )
            return None if variant is None else (variant, reason)
        is_idle = max(read_stall, write_stall) < NEGLIGIBLE_STALL and max(read_use, write_use) < IDLE_USE
        is_tight = self.current.peak_bytes > TIGHT_MEMORY * self.budget_bytes
        if is_idle and is_tight and (variant := self._narrower()):
            return variant, "no stalls, both workers are idle, and memory is tight"
        return None

    def _wider(self) -> Variant | None:
        """Return the variant of the same share nearest to twice the window; stalls cost time, so steps are large."""
        wider = [
            variant
            for variant in self._allowed()
            if variant.share == self.current.share and variant.window > self.current.window
        ]
        return min(wider, key=lambda variant: abs(variant.window - 2 * self.current.window), default=None)

    def _narrower(self) -> Variant | None:
        """Return the variant of the same share with the next smaller window."""
        narrower = [
            variant
            for variant in self._allowed()
            if variant.share == self.current.share and variant.window < self.current.window
        ]
        return max(narrower, key=lambda variant: variant.window, default=None)

    def _less_offload(self) -> Variant | None:
        """Return the variant of the next smaller share with the widest window."""
        smaller = [variant for variant in self._allowed() if variant.share < self.current.share]
        return max(smaller, key=lambda variant: (variant.share, variant.window), default=None)

    def _allowed(self) -> list[Variant]:
        return [variant for variant in self.variants if variant not in self._refused]

    def _change(self, to: Variant, reason: str, previous: tuple[Variant, float] | None) -> None:
        line = (
            f"window {self.current.window} -> {to.window}, share {self.current.share:.2f} -> {to.share:.2f}: {reason}"
        )
        _log.info("offload: %s", line)
        self.changes.append(line)
        self.current, self._previous = to, previous
        self._steps_since_change = self._unchanged_decisions = 0


def _use(transfers: Sequence[Span]) -> float:
    """Return the busy share of the time from a worker's first transfer to its last."""
    if not transfers:
        return 0.0
    span = max(end for _, end in transfers) - min(start for start, _ in transfers)
    return total_seconds(transfers) / span if span else 0.0
