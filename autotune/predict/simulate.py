"""Predict bytes and seconds of a schedule: bytes exactly, seconds from the measured times of its ops."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.ir.costs import PAGE_BYTES, Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Instruction, Offload, Prefetch, Run, Schedule, lives, lower
from autotune.predict.bounds import peak_lower_bound, seconds_lower_bound
from autotune.predict.clock import Transfer, TransferClock


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted bytes and seconds of one step. Bytes compare with `Measurement.step_peak_bytes`."""

    peak_bytes: int
    """Peak bytes of the step."""
    peak_op: str
    """Name of the op during which the peak occurs."""
    mean_bytes: int
    """Mean live bytes over time."""
    seconds: float
    """Duration of the step."""
    recompute_seconds: float
    """Time of all recomputed ops."""
    transfer_bytes: int
    """Bytes written to the store plus bytes read from it."""
    stall_seconds: float
    """Time during which the step waits for the store."""
    lower_bound_bytes: int
    """Proven lower bound of the peak over all plans of this graph."""
    lower_bound_seconds: float
    """Proven lower bound of the seconds over all plans within the budget; every op once without a budget or with a store."""
    lower_bound_op: str = ""
    """Name of the op that requires the lower bound's bytes."""
    layout_bytes: int = 0
    """Size of the block that holds the step's buffers in an arena; 0 without a layout."""
    layout_live_bytes: int = 0
    """Highest sum of buffers that are live at once, a lower bound of `layout_bytes`."""
    reserved_bytes: int = 0
    """Bytes that the caching allocator of a GPU is predicted to reserve for the step; 0 on a CPU."""

    @property
    def layout_gap(self) -> float:
        """Excess of the layout's bytes over the bytes live at once, as a share of the latter."""
        return self.layout_bytes / self.layout_live_bytes - 1 if self.layout_live_bytes else 0.0

    @property
    def charged_bytes(self) -> int | None:
        """Bytes charged for the step: in an arena its peak plus the layout's waste, on a GPU those reserved; None if unknown."""
        if self.reserved_bytes:
            return self.reserved_bytes
        return self.peak_bytes + self.layout_bytes - self.layout_live_bytes if self.layout_bytes else None

    @property
    def gap(self) -> float:
        """Excess of the peak over its lower bound, as a share of the bound."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0

    @property
    def seconds_gap(self) -> float:
        """Excess of the seconds over their lower bound, as a share of the bound."""
        return self.seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0


@dataclass(frozen=True, slots=True)
class InstructionBytes:
    """Live bytes during and after one instruction."""

    instruction: Instruction
    during_bytes: int
    """Highest live bytes while the instruction runs."""
    after_bytes: int
    """Live bytes after the instruction."""


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """Times of one instruction on the computing thread, and of its transfer on the store's engine."""

    moment: InstructionBytes
    start_seconds: float
    ready_seconds: float
    """End of the wait for prefetched values."""
    end_seconds: float
    transfer: tuple[float, float] | None = None
    """(start, end) in seconds on the store's engine, for an `Offload` or a `Prefetch`."""


def slab_bytes(graph: TrainGraph, schedule: Schedule) -> int:
    """Return the bytes that a store allocates before the first step: one slot of whole pages for each offloaded value."""
    offloaded = {item.value for item in schedule.instructions if isinstance(item, Offload)}
    return sum(-(-graph.values[value].nbytes // PAGE_BYTES) * PAGE_BYTES for value in offloaded)


def resident_bytes(graph: TrainGraph, schedule: Schedule, costs: Costs) -> int:
    """Return the bytes that are resident through the whole step: static values, and an open store's bytes in this memory."""
    if not schedule.store:
        return graph.static_bytes
    store = _store(schedule, costs)
    return graph.static_bytes + store.pool_bytes + (slab_bytes(graph, schedule) if store.holds_memory else 0)


def timeline(graph: TrainGraph, schedule: Schedule, costs: Costs) -> Iterator[InstructionBytes]:
    """Yield the bytes during and after every instruction."""
    return itertools.starmap(InstructionBytes, _live_bytes(graph, schedule, costs))


def peak_bytes(graph: TrainGraph, plan: Plan, costs: Costs) -> int:
    """Return the highest bytes of a plan, without its seconds: planners call this often."""
    moments = _live_bytes(graph, lower(graph, plan), costs)
    return max((during for _, during, _ in moments), default=graph.static_bytes)


def _live_bytes(graph: TrainGraph, schedule: Schedule, costs: Costs) -> Iterator[tuple[Instruction, int, int]]:
    """Yield (instruction, bytes while it runs, bytes after it)."""
    nbytes = [value.nbytes for value in graph.values]
    live = resident_bytes(graph, schedule, costs)
    for instruction, begins, ends in lives(graph, schedule):
        before = live
        for value in begins:
            live += nbytes[value]
        for value in ends:
            live -= nbytes[value]
        if isinstance(instruction, Run):
            yield instruction, live + costs.scratch_bytes[instruction.op], live
        else:
            yield instruction, max(before, live), live


def simulate(
    graph: TrainGraph, schedule: Schedule, costs: Costs | None = None, budget_bytes: int | None = None
) -> Estimate:
    """Predict one step.

    Args:
        graph: Captured step.
        schedule: Lowered plan of the graph.
        costs: Measured costs; without them every op takes one second and no scratch.
        budget_bytes: Budget of the lower bound of seconds; nothing else depends on it.

    Raises:
        ConfigError: The schedule uses a store that `costs` does not have.

    >>> from autotune.testing.graphs import chain
    >>> graph = chain(3, nbytes=10)
    >>> estimate = simulate(graph, lower(graph, Plan.traced(graph)))
    >>> estimate.peak_bytes, estimate.seconds
    (20, 3.0)
    """
    costs = costs or Costs.unit(graph)
    clock = _clock(schedule, costs)
    peak, peak_op, current = graph.static_bytes, "", ""
    area, recompute, transfer = 0.0, 0.0, 0
    ran: set[int] = set()
    for moment in timeline(graph, schedule, costs):
        before = clock.now
        _tick(graph, costs, clock, moment.instruction)
        match moment.instruction:
            case Run(op):
                current = graph.ops[op].name
                recompute += costs.seconds[op] if op in ran else 0.0
                ran.add(op)
            case Offload(value) | Prefetch(value):
                transfer += graph.values[value].nbytes
            case Free(_):
                pass
        area += moment.during_bytes * (clock.now - before)
        if moment.during_bytes > peak:
            peak, peak_op = moment.during_bytes, current
    bound, bound_op = peak_lower_bound(graph, costs)
    return Estimate(
        peak_bytes=peak,
        peak_op=peak_op,
        mean_bytes=int(area / clock.now) if clock.now else graph.static_bytes,
        seconds=clock.now,
        recompute_seconds=recompute,
        transfer_bytes=transfer,
        stall_seconds=clock.stalled,
        lower_bound_bytes=bound,
        lower_bound_seconds=seconds_lower_bound(graph, costs, budget_bytes),
        lower_bound_op=graph.ops[bound_op].name if bound_op >= 0 else "",
    )


def time_instructions(graph: TrainGraph, schedule: Schedule, costs: Costs) -> Iterator[TimedInstruction]:
    """Yield the times of every instruction, with one computing engine and one engine for each direction of the store."""
    clock = _clock(schedule, costs)
    started = []
    for moment in timeline(graph, schedule, costs):
        start = clock.now
        ready, transfer = _tick(graph, costs, clock, moment.instruction)
        started.append((moment, start, ready, clock.now, transfer))
    clock.settle()  # the end of a transfer depends on those after it
    for moment, start, ready, end, transfer in started:
        ended = None if transfer is None or transfer.end is None else (transfer.start, transfer.end)
        yield TimedInstruction(moment, start, ready, end, ended)


def _tick(
    graph: TrainGraph, costs: Costs, clock: TransferClock, instruction: Instruction
) -> tuple[float, Transfer | None]:
    """Advance the clock over one instruction. Return the end of its initial wait, and the transfer that it starts."""
    match instruction:
        case Run(op):
            return clock.run((*graph.ops[op].inputs, *graph.ops[op].writes), costs.seconds[op]), None
        case Offload(value):
            return clock.now, clock.write(value, graph.values[value].nbytes)
        case Prefetch(value):
            return clock.now, clock.read(value, graph.values[value].nbytes)
        case Free(value):
            clock.free(value)
            return clock.now, None


def _clock(schedule: Schedule, costs: Costs) -> TransferClock:
    return TransferClock(_store(schedule, costs) if schedule.store else None)


def _store(schedule: Schedule, costs: Costs) -> StoreCost:
    if schedule.store not in costs.stores:
        measured = ", ".join(sorted(costs.stores)) or "none"
        raise ConfigError(
            f"the plan needs the store {schedule.store!r}; available: {measured}. Add --store {schedule.store}=DIR"
        )
    return costs.stores[schedule.store]
