"""Predict the bytes that a GPU's meters read, by running a plan's allocations through the model of its allocator."""

from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lives, lower
from autotune.predict.caching_allocator import CachingAllocator, MemoryBlock
from autotune.predict.simulate import resident_bytes

REPLAYED_STEPS = 4
"""Number of steps from an empty cache, as many as a measured block has."""


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """Highest bytes of a step beyond the floor, the bytes of a process without the step's static values."""

    allocated_bytes: int
    """Bytes of the blocks in use, static ones included; compares with `Measurement.step_peak_bytes`."""
    reserved_bytes: int
    """Bytes that the device is charged for; compares with `Measurement.step_charged_bytes`."""


def replay_allocations(graph: TrainGraph, plan: Plan, costs: Costs) -> AllocatorPeaks:
    """Return the peaks of a plan's steps in the caching allocator, with expandable segments if its allocator is `arena`.

    Static values are allocated first, in the graph's order, each as one block; then every instruction's buffers in turn.
    An op's scratch bytes are one block. Where a real process allocates differently, its reserved bytes differ by whole
    segments.
    """
    allocator = CachingAllocator(expandable=plan.allocator == "arena")
    schedule = lower(graph, plan)
    blocks: dict[int, MemoryBlock | None] = {
        value: allocator.allocate(graph.values[value].nbytes) for value in graph.inputs
    }
    # meters define the floor as allocated bytes less rounded static values, so waste beyond the rounding is part of the floor
    floor_bytes = allocator.allocated_bytes - resident_bytes(graph, schedule, costs)
    allocator.reset_peaks()
    for _ in range(REPLAYED_STEPS):
        for instruction, begins, ends in lives(graph, schedule):
            is_run = isinstance(instruction, Run)
            reused = blocks.pop(ends[0]) if is_run and ends else None
            size = graph.values[ends[0]].nbytes if is_run and ends else -1
            for value in begins:
                nbytes = graph.values[value].nbytes
                if nbytes == size:  # this output takes over the buffer that dies
                    blocks[value], size = reused, -1
                else:
                    blocks[value] = allocator.allocate(nbytes)
            if isinstance(instruction, Run):
                allocator.free(allocator.allocate(max(0, costs.scratch_bytes[instruction.op])))
                if size >= 0:
                    allocator.free(reused)
            else:
                for value in ends:
                    allocator.free(blocks.pop(value))
        for value in sorted(blocks.keys() - graph.static):  # results of the step, which its caller drops
            allocator.free(blocks.pop(value))
    return AllocatorPeaks(
        allocator.peak_allocated_bytes - floor_bytes,
        allocator.peak_reserved_bytes - floor_bytes,
    )
