"""Use memory that a plan leaves free to lengthen its transfers: save later and load earlier where no peak rises."""

import itertools
from bisect import bisect_right
from dataclasses import replace

import numpy as np

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import Run, gap_layers, layer_numbers, leaves_memory, lower
from autotune.predict.simulate import simulate, timeline


def stretch_transfers(graph: TrainGraph, plan: Plan, limit_bytes: int, costs: Costs) -> Plan:
    """Return the plan with longer saves and earlier loads, as far as its transfers need them and `limit_bytes` allows.

    A transfer is stretched over the layers that run while the store moves the value and those before it in the same
    lane, computed as if no op waited. The plan is unchanged if the simulator predicts no gain.
    """
    loads = _TransferStretcher(graph, plan, limit_bytes, costs)
    loads.load_earlier()
    both = _TransferStretcher(graph, plan, limit_bytes, costs)
    both.load_earlier()
    both.save_longer()
    plans = [plan, *(replace(plan, offload=tuple(stretcher.swaps)) for stretcher in (loads, both))]
    return min(plans, key=lambda candidate: simulate(graph, lower(graph, candidate), costs).seconds)


class _TransferStretcher:
    """Swaps of a plan, and the bytes at every position of its order while they are stretched."""

    def __init__(self, graph: TrainGraph, plan: Plan, limit_bytes: int, costs: Costs) -> None:
        self.swaps: list[Swap] = list(plan.offload)
        self._graph, self._window, self._limit = graph, plan.window, limit_bytes
        self._store = costs.stores[plan.store]
        moments = timeline(graph, lower(graph, plan), costs)
        self._bytes = np.array([m.during_bytes for m in moments if isinstance(m.instruction, Run)], dtype=np.int64)
        self._layers, self._events = layer_numbers(graph, plan.order), events(graph, plan.order)
        self._first = {layer: position for position, layer in reversed(list(enumerate(self._layers)))}
        self._last = {layer: position for position, layer in enumerate(self._layers)}
        self._clock = [0.0, *itertools.accumulate(costs.seconds[op] for op in plan.order)]

    def load_earlier(self) -> None:
        """Start each load early enough to end before its reader and before the loads that follow it."""
        by_reader = sorted(range(len(self.swaps)), key=lambda index: self._reader(self.swaps[index]))
        targets, begin = {}, float("inf")
        for index in reversed(by_reader):
            begin = min(begin, self._clock[self._reader(self.swaps[index])])
            begin -= self._seconds(self.swaps[index], self._store.read_bytes_per_second)
            targets[index] = self._layer_at(begin)
        # a load that overtook another in the lane would delay the other's reader
        earliest = 0
        for index in by_reader:
            swap = self.swaps[index]
            save_layer, load_layer = gap_layers(self._layers, self._events[swap.value], swap.gap)
            begins = load_layer - self._window - swap.early
            while (
                begins > max(targets[index], earliest)
                and leaves_memory(save_layer + swap.late, load_layer - swap.early - 1, self._window)
                and self._fits(swap, begins - 1)
            ):
                begins -= 1
                self._fill(swap, begins)
                swap = replace(swap, early=swap.early + 1)
            self.swaps[index], earliest = swap, begins

    def save_longer(self) -> None:
        """Keep each saved value resident until it is written, after the writes before it."""
        written = 0.0
        for index in sorted(range(len(self.swaps)), key=lambda index: self._saved_after(self.swaps[index])):
            swap = self.swaps[index]
            save_layer, load_layer = gap_layers(self._layers, self._events[swap.value], swap.gap)
            written = max(written, self._clock[self._saved_after(swap) + 1])
            written += self._seconds(swap, self._store.write_bytes_per_second)
            ends = save_layer + self._window + swap.late
            while (
                ends < self._layer_at(written)
                and leaves_memory(save_layer + swap.late + 1, load_layer - swap.early, self._window)
                and self._fits(swap, ends + 1)
            ):
                ends += 1
                self._fill(swap, ends)
                swap = replace(swap, late=swap.late + 1)
            self.swaps[index] = swap

    def _seconds(self, swap: Swap, rate: float) -> float:
        """Return the seconds of a transfer beside running ops."""
        return self._store.latency_seconds + self._graph.values[swap.value].nbytes * self._store.slowed / rate

    def _saved_after(self, swap: Swap) -> int:
        """Return the position of the event before the gap; -1 is the start of the step."""
        return self._events[swap.value][swap.gap][0] if swap.gap >= 0 else -1

    def _reader(self, swap: Swap) -> int:
        return self._events[swap.value][swap.gap + 1][0]

    def _layer_at(self, seconds: float) -> int:
        """Return the layer that runs after so many seconds if no op waits."""
        return self._layers[min(max(0, bisect_right(self._clock, seconds) - 1), len(self._layers) - 1)]

    def _fits(self, swap: Swap, layer: int) -> bool:
        positions = slice(self._first[layer], self._last[layer] + 1)
        return bool(self._bytes[positions].max() + self._graph.values[swap.value].nbytes <= self._limit)

    def _fill(self, swap: Swap, layer: int) -> None:
        self._bytes[self._first[layer] : self._last[layer] + 1] += self._graph.values[swap.value].nbytes
