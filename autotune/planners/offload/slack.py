"""Memory that a plan leaves free is time for its transfers: save for longer and load earlier, where no peak rises."""

import itertools
from bisect import bisect_right
from dataclasses import replace

import numpy as np

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import Run, around, away, layer_runs, lower
from autotune.predict.simulate import simulate, timeline


def stretched(graph: TrainGraph, plan: Plan, limit_bytes: int, costs: Costs) -> Plan:
    """The plan with saves that last longer and loads that begin earlier, as far as transfers want it and the limit allows.

    As many layers as the store needs for the value and for those before it in its lane, had nothing to wait. The plan
    itself where the simulator sees no gain.
    """
    loads = _Lives(graph, plan, limit_bytes, costs)
    loads.load_earlier()
    both = _Lives(graph, plan, limit_bytes, costs)
    both.load_earlier()
    both.save_longer()
    tried = [plan, *(replace(plan, offload=tuple(lives.swaps)) for lives in (loads, both))]
    return min(tried, key=lambda made: simulate(graph, lower(graph, made), costs).seconds)


class _Lives:
    """A plan's swaps, and the bytes at every position of its order as they are stretched."""

    def __init__(self, graph: TrainGraph, plan: Plan, limit_bytes: int, costs: Costs) -> None:
        self.swaps: list[Swap] = list(plan.offload)
        self._graph, self._window, self._limit = graph, plan.window, limit_bytes
        self._store = costs.stores[plan.store]
        moments = timeline(graph, lower(graph, plan), costs)
        self._bytes = np.array([m.during_bytes for m in moments if isinstance(m.instruction, Run)], dtype=np.int64)
        self._layers, self._events = layer_runs(graph, plan.order), events(graph, plan.order)
        self._first = {layer: at for at, layer in reversed(list(enumerate(self._layers)))}
        self._last = {layer: at for at, layer in enumerate(self._layers)}
        self._clock = [0.0, *itertools.accumulate(costs.seconds[op] for op in plan.order)]

    def load_earlier(self) -> None:
        """Each load before its reader by as much as it takes, and before the loads that follow it."""
        in_turn = sorted(range(len(self.swaps)), key=lambda at: self._reader(self.swaps[at]))
        wanted, begin = {}, float("inf")
        for at in reversed(in_turn):
            begin = min(begin, self._clock[self._reader(self.swaps[at])])
            begin -= self._seconds(self.swaps[at], self._store.read_bytes_per_second)
            wanted[at] = self._layer_at(begin)
        # one that overtook another in the lane would make that one's reader wait
        earliest = 0
        for at in in_turn:
            swap = self.swaps[at]
            here, there = around(self._layers, self._events[swap.value], swap.gap)
            begins = there - self._window - swap.early
            while (
                begins > max(wanted[at], earliest)
                and away(here + swap.late, there - swap.early - 1, self._window)
                and self._fits(swap, begins - 1)
            ):
                begins -= 1
                self._fill(swap, begins)
                swap = replace(swap, early=swap.early + 1)
            self.swaps[at], earliest = swap, begins

    def save_longer(self) -> None:
        """Each save until it is written, after those before it."""
        written = 0.0
        for at in sorted(range(len(self.swaps)), key=lambda at: self._made(self.swaps[at])):
            swap = self.swaps[at]
            here, there = around(self._layers, self._events[swap.value], swap.gap)
            written = max(written, self._clock[self._made(swap) + 1])
            written += self._seconds(swap, self._store.write_bytes_per_second)
            ends = here + self._window + swap.late
            while (
                ends < self._layer_at(written)
                and away(here + swap.late + 1, there - swap.early, self._window)
                and self._fits(swap, ends + 1)
            ):
                ends += 1
                self._fill(swap, ends)
                swap = replace(swap, late=swap.late + 1)
            self.swaps[at] = swap

    def _seconds(self, swap: Swap, rate: float) -> float:
        """What a transfer takes beside computing."""
        return self._store.latency_seconds + self._graph.values[swap.value].nbytes * self._store.slowed / rate

    def _made(self, swap: Swap) -> int:
        """Position of the event before the gap; -1 is the step's beginning."""
        return self._events[swap.value][swap.gap][0] if swap.gap >= 0 else -1

    def _reader(self, swap: Swap) -> int:
        return self._events[swap.value][swap.gap + 1][0]

    def _layer_at(self, seconds: float) -> int:
        """Of what runs then, had nothing to wait."""
        return self._layers[min(max(0, bisect_right(self._clock, seconds) - 1), len(self._layers) - 1)]

    def _fits(self, swap: Swap, layer: int) -> bool:
        here = slice(self._first[layer], self._last[layer] + 1)
        return bool(self._bytes[here].max() + self._graph.values[swap.value].nbytes <= self._limit)

    def _fill(self, swap: Swap, layer: int) -> None:
        self._bytes[self._first[layer] : self._last[layer] + 1] += self._graph.values[swap.value].nbytes
