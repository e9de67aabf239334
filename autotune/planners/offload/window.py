"""Offload the values that are idle longest, and prefetch them before the layers that read them."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from autotune.errors import ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import Role, TrainGraph, Value
from autotune.ir.plan import OFFLOADABLE_ROLES, Plan, Swap, events
from autotune.ir.schedule import Run, gap_layers, layer_numbers, leaves_memory, lower
from autotune.planners.knobs import Choice, Float, Int, Knob
from autotune.planners.offload.keep import KeepResident
from autotune.planners.offload.slack import stretch_transfers
from autotune.predict.simulate import peak_bytes, timeline

Bytes = npt.NDArray[np.int64]
_SLACK = 1 / 500
"""Tolerance above the lowest possible peak: its last 0.2 % may need a hundred transfers."""


@dataclass(frozen=True, slots=True)
class _Gap:
    """Gap in which a value may be offloaded."""

    swap: Swap
    nbytes: int
    start: int
    """First position of the order at which the value is out of memory."""
    stop: int
    """Position at which it is loaded again."""
    seconds: float
    """Time from `start` to `stop`."""


@dataclass(frozen=True, slots=True)
class OffloadWindow:
    """Planner that keeps `window` layers around the running one resident and offloads other values as the budget needs.

    Values with the longest gaps leave first, since a byte costs the same transfer for any gap. Values too small for
    the store's bandwidth, whose transfer is mostly latency, leave last. A value that is read again within the window
    never leaves, so the last layers before the backward keep theirs. If the budget is out of reach, only transfers that
    lower the peak remain, to within 0.2 %. Memory below the limit is used to lengthen transfers (`slack`).
    """

    knobs: ClassVar[Mapping[str, Knob]] = {
        "window": Int(1, 8),
        "store": Choice(("ssd", "ramdisk", "host")),
        "share": Float(0.0, 1.0),
        "what": Choice(("activations", "all")),
        "least_bytes": Int(1, 2**23, log=True),
    }
    window: int = 1
    """Layers kept resident on either side of the running one."""
    store: str = "ssd"
    share: float = 1.0
    """Maximum share of the offloadable bytes to offload."""
    what: str = "activations"
    """Values to offload: `activations`, or `all` for weights and optimizer state too."""
    least_bytes: int = 1
    """Minimum size of an offloaded value in bytes."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with its offloads; raise ConfigError if the store is not open."""
        if self.store not in costs.stores:
            known = ", ".join(sorted(costs.stores)) or "none"
            raise ConfigError(
                f"offload needs the store {self.store!r}; open stores: {known}. Add --store {self.store}=DIR"
            )
        resident = KeepResident().plan(graph, plan, budget_bytes, costs)
        moments = timeline(graph, lower(graph, resident), costs)
        profile = [moment.during_bytes for moment in moments if isinstance(moment.instruction, Run)]
        store = costs.stores[self.store]
        if max(profile, default=0) <= budget_bytes:
            return resident
        # an open store's bounce buffers are resident during every op
        with_pool = np.array(profile, dtype=np.int64) + store.pool_bytes
        small = int(store.latency_seconds * store.write_bytes_per_second)
        swaps = _choose(self._gaps(graph, resident, costs), with_pool, budget_bytes, self.share, small)
        offloaded = replace(resident, offload=swaps, store=self.store, window=self.window) if swaps else resident
        best = min(resident, offloaded, key=lambda candidate: peak_bytes(graph, candidate, costs))
        limit = max(budget_bytes, peak_bytes(graph, best, costs))
        return stretch_transfers(graph, best, limit, costs) if best.offload else best

    def _gaps(self, graph: TrainGraph, plan: Plan, costs: Costs) -> list[_Gap]:
        """Return every gap in which a value may be offloaded, the longest first."""
        layers = layer_numbers(graph, plan.order)
        first = {layer: position for position, layer in reversed(list(enumerate(layers)))}
        clock = [0.0, *itertools.accumulate(costs.seconds[op] for op in plan.order)]
        gaps = []
        for value, value_events in zip(graph.values, events(graph, plan.order), strict=True):
            static = value.id in graph.static
            least = max(self.least_bytes, costs.stores[self.store].least_own_bytes if static else 0)
            if value.nbytes < least or not self._may_leave(value, static=static):
                continue
            for gap in range(-static, len(value_events) - 1):
                save_layer, load_layer = gap_layers(layers, value_events, gap)
                if value_events[gap + 1][1] or not leaves_memory(save_layer, load_layer, self.window):
                    continue
                # out of memory from the end of the window after its layer to the start of the window before its reader
                start, stop = first[save_layer + self.window + 1], first[load_layer - self.window]
                gaps.append(_Gap(Swap(value.id, gap), value.nbytes, start, stop, clock[stop] - clock[start]))
        return sorted(gaps, key=lambda gap: (-gap.seconds, -gap.nbytes, gap.swap.value, gap.swap.gap))

    def _may_leave(self, value: Value, *, static: bool) -> bool:
        if static:
            return self.what == "all" and value.role in OFFLOADABLE_ROLES
        return value.role in (Role.ACTIVATION, Role.GRAD)


def _choose(gaps: list[_Gap], profile: Bytes, budget_bytes: int, share: float, small: int) -> tuple[Swap, ...]:
    """Return the swaps that lower the bytes to the target: add gaps in turn, then drop those that prove needless.

    `profile` holds the bytes at each position of the order without offload. Values below `small` bytes are used only
    if the larger ones do not suffice.
    """
    lowest = int(_without(gaps, profile).max())
    target = budget_bytes if lowest <= budget_bytes else int(lowest * (1 + _SLACK))
    allowance = share * sum(gap.nbytes for gap in gaps)
    large = [gap for gap in gaps if gap.nbytes >= small]
    enough = _without(large, profile).max() <= target
    gaps = large if enough else [*large, *(gap for gap in gaps if gap.nbytes < small)]
    chosen: list[_Gap] = []
    left = profile.copy()
    for gap in gaps:
        if gap.nbytes <= allowance and left[gap.start : gap.stop].max() > target:
            allowance -= gap.nbytes
            chosen.append(gap)
            left[gap.start : gap.stop] -= gap.nbytes
    target = max(target, int(left.max()))
    needed = []
    for gap in reversed(chosen):
        if left[gap.start : gap.stop].max() + gap.nbytes > target:
            needed.append(gap)
        else:
            left[gap.start : gap.stop] += gap.nbytes
    return tuple(sorted((gap.swap for gap in needed), key=lambda swap: (swap.value, swap.gap)))


def _without(gaps: list[_Gap], profile: Bytes) -> Bytes:
    """Return the profile with the values of all these gaps offloaded."""
    left = profile.copy()
    for gap in gaps:
        left[gap.start : gap.stop] -= gap.nbytes
    return left
