"""Send away what is idle longest, and have it back before the layers that are about to run need it."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from autotune.errors import ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import Role, TrainGraph, Value
from autotune.ir.plan import MAY_LEAVE, Plan, Swap, events
from autotune.ir.schedule import Run, around, away, layer_runs, lower
from autotune.planners.knobs import Choice, Float, Int, Knob
from autotune.planners.offload.keep import Keep
from autotune.planners.offload.slack import stretched
from autotune.predict.simulate import peak_bytes, timeline

Bytes = npt.NDArray[np.int64]
_SLACK = 1 / 500
"""Above the lowest peak there is: the last part of a thousand may need a hundred transfers."""


@dataclass(frozen=True, slots=True)
class _Gap:
    """A value that may leave, the positions of the order at which it is then away, and for how long."""

    swap: Swap
    nbytes: int
    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """Keep the values of the running layer and the `window` before or after it; of the others send away what the budget needs.

    At most `share` of the bytes that may leave do, values of at least `least_bytes` each. Longest away first: a byte costs
    the same transfer however long it stays away; but values so small that the store takes longer to begin than to move
    them come after all others. When no budget can be met, as much leaves as lowers the peak, to a part in 500, and no more.
    What is read back within the window never leaves, so the last layers before backward keep theirs. Where memory is free
    below the budget, or below the peak that is left, values are saved for longer and loaded earlier (`slack`).
    """

    knobs: ClassVar[Mapping[str, Knob]] = {
        "window": Int(1, 8),
        "store": Choice(("ssd", "ramdisk", "host")),
        "share": Float(0.0, 1.0),
        "what": Choice(("activations", "all")),
        "least_bytes": Int(1, 2**23, log=True),
    }
    window: int = 1
    store: str = "ssd"
    share: float = 1.0
    what: str = "activations"
    """`all`: weights and optimizer state too, while their layers are far from running."""
    least_bytes: int = 1

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        if self.store not in costs.stores:
            known = ", ".join(sorted(costs.stores)) or "none"
            raise ConfigError(f"offload needs the store {self.store!r}; given: {known}. Add --store {self.store}=DIR")
        kept = Keep().plan(graph, plan, budget_bytes, costs)
        moments = timeline(graph, lower(graph, kept), costs)
        profile = [moment.during_bytes for moment in moments if isinstance(moment.instruction, Run)]
        store = costs.stores[self.store]
        if max(profile, default=0) <= budget_bytes:
            return kept
        # an open store's own buffers stand beside every op
        opened = np.array(profile, dtype=np.int64) + store.pool_bytes
        small = int(store.latency_seconds * store.write_bytes_per_second)
        swaps = _choose(self._gaps(graph, kept, costs), opened, budget_bytes, self.share, small)
        away_too = replace(kept, offload=swaps, store=self.store, window=self.window) if swaps else kept
        best = min(kept, away_too, key=lambda made: peak_bytes(graph, made, costs))
        limit = max(budget_bytes, peak_bytes(graph, best, costs))
        return stretched(graph, best, limit, costs) if best.offload else best

    def _gaps(self, graph: TrainGraph, plan: Plan, costs: Costs) -> list[_Gap]:
        """Every gap in which a value may leave and is then away, longest away first."""
        layers = layer_runs(graph, plan.order)
        first = {layer: position for position, layer in reversed(list(enumerate(layers)))}
        clock = [0.0, *itertools.accumulate(costs.seconds[op] for op in plan.order)]
        gaps = []
        for value, happened in zip(graph.values, events(graph, plan.order), strict=True):
            own = value.id in graph.static
            least = max(self.least_bytes, costs.stores[self.store].least_own_bytes if own else 0)
            if value.nbytes < least or not self._may_leave(value, own):
                continue
            for gap in range(-own, len(happened) - 1):
                here, there = around(layers, happened, gap)
                if happened[gap + 1][1] or not away(here, there, self.window):
                    continue
                # gone from the end of the window behind its layer until the window before its reader begins
                start, stop = first[here + self.window + 1], first[there - self.window]
                gaps.append(_Gap(Swap(value.id, gap), value.nbytes, start, stop, clock[stop] - clock[start]))
        return sorted(gaps, key=lambda gap: (-gap.seconds, -gap.nbytes, gap.swap.value, gap.swap.gap))

    def _may_leave(self, value: Value, own: bool) -> bool:
        if own:
            return self.what == "all" and value.role in MAY_LEAVE
        return value.role in (Role.ACTIVATION, Role.GRAD)


def _choose(gaps: list[_Gap], profile: Bytes, budget_bytes: int, share: float, small: int) -> tuple[Swap, ...]:
    """Take gaps in turn while they lower what stands above the target, then give back those that proved needless.

    `profile`: bytes at each position of the order with nothing away. Values of less than `small` bytes stay if others do.
    """
    target = max(budget_bytes, int(_without(gaps, profile).max() * (1 + _SLACK)))
    allowance = share * sum(gap.nbytes for gap in gaps)
    wide = [gap for gap in gaps if gap.nbytes >= small]
    enough = _without(wide, profile).max() <= target
    gaps = wide if enough else [*wide, *(gap for gap in gaps if gap.nbytes < small)]
    taken: list[_Gap] = []
    now = profile.copy()
    for gap in gaps:
        if gap.nbytes <= allowance and now[gap.start : gap.stop].max() > target:
            allowance -= gap.nbytes
            taken.append(gap)
            now[gap.start : gap.stop] -= gap.nbytes
    target = max(target, int(now.max()))
    needed = []
    for gap in reversed(taken):
        if now[gap.start : gap.stop].max() + gap.nbytes > target:
            needed.append(gap)
        else:
            now[gap.start : gap.stop] += gap.nbytes
    return tuple(sorted((gap.swap for gap in needed), key=lambda swap: (swap.value, swap.gap)))


def _without(gaps: list[_Gap], profile: Bytes) -> Bytes:
    """The profile with all of these away."""
    left = profile.copy()
    for gap in gaps:
        left[gap.start : gap.stop] -= gap.nbytes
    return left
