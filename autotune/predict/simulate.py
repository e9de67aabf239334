"""Predict the bytes and the seconds of a schedule: bytes exactly, seconds from the ops' own."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Instruction, Offload, Prefetch, Run, Schedule, lower
from autotune.predict.bounds import peak_lower_bound, seconds_lower_bound
from autotune.predict.clock import Clock, Transfer
from autotune.units import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts of one step. Bytes are the step's own: compare with `Measurement.step_peak_bytes`."""

    peak_bytes: int
    peak_op: str
    """Name of the op during which the peak stands."""
    mean_bytes: int
    """Mean over time."""
    seconds: float
    recompute_seconds: float
    transfer_bytes: int
    """Written and read."""
    stall_seconds: float
    lower_bound_bytes: int
    """No plan of this graph reaches a lower peak: proved."""
    lower_bound_seconds: float
    """No plan within the budget is faster: proved. Every op once, where no budget was given or a store may help."""
    lower_bound_op: str = ""
    """Name of the op that forbids a lower peak."""
    layout_bytes: int = 0
    """Size of the block in which an arena lays the step's own buffers; 0 where it was not laid out."""
    layout_live_bytes: int = 0
    """The most of them that live at once: no layout is smaller."""

    @property
    def layout_gap(self) -> float:
        """How far the layout lies above what lives in it at once, relative to that."""
        return self.layout_bytes / self.layout_live_bytes - 1 if self.layout_live_bytes else 0.0

    @property
    def charged_bytes(self) -> int | None:
        """The peak and what the layout wastes: what a step in the arena is charged; None where it was not laid out."""
        return self.peak_bytes + self.layout_bytes - self.layout_live_bytes if self.layout_bytes else None

    @property
    def gap(self) -> float:
        """How far the peak lies above its lower bound, relative to that."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0

    @property
    def seconds_gap(self) -> float:
        """How far the seconds lie above their lower bound, relative to that."""
        return self.seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes around one instruction."""

    instruction: Instruction
    during_bytes: int
    """Highest while it runs."""
    after_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """When one instruction holds the computing thread, and when the store moves its bytes."""

    moment: Moment
    start_seconds: float
    ready_seconds: float
    """When the waiting, for a value on its way, is over."""
    end_seconds: float
    transfer: tuple[float, float] | None = None
    """(start, end) on the store's own engine, of an `Offload` or a `Prefetch`."""


def slab_bytes(graph: TrainGraph, schedule: Schedule) -> int:
    """Bytes that a store allocates in full before the first step: one slot for each offloaded value."""
    offloaded = {made.value for made in schedule.instructions if isinstance(made, Offload)}
    return sum(-(-graph.values[value].nbytes // PAGE_BYTES) * PAGE_BYTES for value in offloaded)


def resident_bytes(graph: TrainGraph, schedule: Schedule, costs: Costs) -> int:
    """Bytes that stand through the whole step: static values, and what an open store holds in this memory."""
    if not schedule.store:
        return graph.static_bytes
    store = _store(schedule, costs)
    return graph.static_bytes + store.pool_bytes + (slab_bytes(graph, schedule) if store.holds_memory else 0)


def timeline(graph: TrainGraph, schedule: Schedule, costs: Costs) -> Iterator[Moment]:
    """Bytes during and after every instruction."""
    live = resident_bytes(graph, schedule, costs)
    for instruction in schedule.instructions:
        during = live
        match instruction:
            case Run(op, takes):
                live += sum(graph.values[value].nbytes for value in graph.ops[op].outputs)
                live -= graph.values[takes].nbytes if takes is not None else 0
                during = live + costs.scratch_bytes[op]
            case Free(value):
                live -= graph.values[value].nbytes
            case Prefetch(value):
                live += graph.values[value].nbytes
                during = live
            case Offload(_):
                pass
        yield Moment(instruction, during, live)


def peak_bytes(graph: TrainGraph, plan: Plan, costs: Costs) -> int:
    """Highest bytes of a plan, without its seconds: what planners ask often."""
    moments = timeline(graph, lower(graph, plan), costs)
    return max((moment.during_bytes for moment in moments), default=graph.static_bytes)


def simulate(
    graph: TrainGraph, schedule: Schedule, costs: Costs | None = None, budget_bytes: int | None = None
) -> Estimate:
    """Predict one step: the spans of its instructions, summed up. The budget is the certificate's alone."""
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
    bound, forbids = peak_lower_bound(graph, costs)
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
        lower_bound_op=graph.ops[forbids].name if forbids >= 0 else "",
    )


def spans(graph: TrainGraph, schedule: Schedule, costs: Costs) -> Iterator[Span]:
    """Walk the schedule with one engine that computes and one for each direction of the store."""
    clock = _clock(schedule, costs)
    seen = []
    for moment in timeline(graph, schedule, costs):
        start = clock.now
        ready, transfer = _tick(graph, costs, clock, moment.instruction)
        seen.append((moment, start, ready, clock.now, transfer))
    clock.settle()  # only now is it known when a transfer ended
    for moment, start, ready, end, transfer in seen:
        moved = None if transfer is None or transfer.end is None else (transfer.start, transfer.end)
        yield Span(moment, start, ready, end, moved)


def _tick(graph: TrainGraph, costs: Costs, clock: Clock, instruction: Instruction) -> tuple[float, Transfer | None]:
    """One instruction: when the waiting that it may begin with is over, and the transfer that it begins."""
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


def _clock(schedule: Schedule, costs: Costs) -> Clock:
    return Clock(_store(schedule, costs) if schedule.store else None)


def _store(schedule: Schedule, costs: Costs) -> StoreCost:
    if schedule.store not in costs.stores:
        known = ", ".join(sorted(costs.stores)) or "none"
        raise ConfigError(
            f"the plan needs the store {schedule.store!r}; given: {known}. Add --store {schedule.store}=DIR"
        )
    return costs.stores[schedule.store]
