"""Timeline of one plan's simulated step: live bytes by use, bytes at the peak by layer, and busy times of the engines."""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cached_property

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph, Value
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Offload, Prefetch, Run, Schedule, lives, lower
from autotune.predict.simulate import resident_bytes, time_instructions

SLICES = 500
"""Maximum number of points of a memory timeline: more than a screen shows would only enlarge the file."""
NO_LAYER = "(no layer)"
"""Layer name of an op that belongs to no module, such as the loss."""


class ByteUse(StrEnum):
    """Use of live bytes, from those that are always resident to those that live shortest."""

    PARAMETERS = "parameters"
    STATE = "optimizer state"
    BUFFERS_AND_BATCH = "buffers and batch"
    STORE = "store's own"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    IN_TRANSIT = "in transit"
    """Bytes that are live only because of a transfer: being written until freed, or prefetched until read."""
    WORKSPACES = "workspaces"


class Engine(StrEnum):
    """Engine of a step that works in parallel with the others."""

    EXECUTE = "execute"
    LOAD = "load"
    SAVE = "save"


class BarKind(StrEnum):
    """Kind of a bar in the engines' timeline, beside the phases of ops that run for the first time."""

    RECOMPUTE = "recompute"
    WAITING = "waiting"
    LOAD = "load"
    SAVE = "save"


class StepTimeline:
    """Simulated step of one plan. The simulation runs once; every view of it is a property or a method.

    >>> from autotune.testing.graphs import chain
    >>> timeline = StepTimeline(chain(3), Costs.unit(chain(3)), Plan((0, 1, 2)))
    >>> timeline.peak_bytes, timeline.seconds
    (20, 3.0)
    """

    def __init__(self, graph: TrainGraph, costs: Costs, plan: Plan) -> None:
        self.graph, self.costs = graph, costs
        self.schedule: Schedule = lower(graph, plan)
        self.spans = tuple(time_instructions(graph, self.schedule, costs))
        self.seconds = self.spans[-1].end_seconds if self.spans else 0.0
        self.peak_position = max(
            range(len(self.spans)), key=lambda position: self.spans[position].moment.during_bytes, default=0
        )

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the step."""
        return self.spans[self.peak_position].moment.during_bytes if self.spans else self.graph.static_bytes

    @cached_property
    def slices(self) -> tuple[int, ...]:
        """Position of the highest instruction in each slice of time; with few instructions, all positions."""
        if len(self.spans) <= SLICES:
            return tuple(range(len(self.spans)))
        highest: dict[int, int] = {}
        for position, span in enumerate(self.spans):
            slot = int(span.start_seconds / self.seconds * SLICES) if self.seconds else 0
            if slot not in highest or span.moment.during_bytes > self.spans[highest[slot]].moment.during_bytes:
                highest[slot] = position
        return tuple(highest[slot] for slot in sorted(highest))

    @cached_property
    def highest_bytes(self) -> tuple[list[float], list[int]]:
        """Start seconds and live bytes of the highest instruction in each slice of time."""
        return (
            [self.spans[position].start_seconds for position in self.slices],
            [self.spans[position].moment.during_bytes for position in self.slices],
        )

    @cached_property
    def bytes_by_role(self) -> dict[str, list[int]]:
        """Live bytes of each slice of time, by `ByteUse`."""
        return self.bytes_by_use(self.slices)

    def bytes_by_use(self, positions: Iterable[int]) -> dict[str, list[int]]:
        """Return the live bytes during the instructions at some ascending positions, by `ByteUse`."""
        graph, drawn = self.graph, set(positions)
        series: dict[str, list[int]] = {use: [] for use in ByteUse}
        store_bytes = resident_bytes(graph, self.schedule, self.costs) - graph.static_bytes
        moving: set[int] = set()
        for position, live in enumerate(self._live()):
            instruction = self.spans[position].moment.instruction
            match instruction:
                case Offload(value) | Prefetch(value):
                    moving.add(value)
                case Run(op):
                    moving.difference_update(graph.ops[op].inputs, graph.ops[op].writes)
            if position in drawn:
                now = Counter[str]({ByteUse.STORE: store_bytes})
                for value in live:
                    use = ByteUse.IN_TRANSIT if value in moving else _use(graph, graph.values[value])
                    now[use] += graph.values[value].nbytes
                if isinstance(instruction, Run):
                    now[ByteUse.WORKSPACES] = self.costs.scratch_bytes[instruction.op]
                for name, nbytes in series.items():
                    nbytes.append(now[name])
            if isinstance(instruction, Free):
                moving.discard(instruction.value)
        return series

    @property
    def phase_starts(self) -> tuple[tuple[float, str], ...]:
        """Start in seconds and name of each phase, in the order of their first ops.

        Updates beside their gradients are part of backward: a plan's update phase begins after its last other op.
        """
        begins: dict[Phase, float] = {}
        for span in self.spans:
            match span.moment.instruction:
                case Run(op):
                    phase = self.graph.ops[op].phase
                    if phase is not Phase.UPDATE:
                        begins.pop(Phase.UPDATE, None)
                    begins.setdefault(phase, span.start_seconds)
        return tuple((start, str(phase)) for phase, start in begins.items())

    def bytes_at_peak(self) -> Counter[str]:
        """Return the live bytes at the peak, by the layer that created them; graph inputs by their use."""
        graph = self.graph
        by_layer: Counter[str] = Counter()
        for position, live in enumerate(self._live()):
            if position == self.peak_position:
                for value in live:
                    producer = graph.producer[value]
                    static = f"({_use(graph, graph.values[value])})"
                    layer = static if producer is None else graph.ops[producer].layer or NO_LAYER
                    by_layer[layer] += graph.values[value].nbytes
        match self.spans[self.peak_position].moment.instruction if self.spans else None:
            case Run(op) if self.costs.scratch_bytes[op]:
                by_layer["(workspace of the running op)"] += self.costs.scratch_bytes[op]
        return by_layer

    def engine_bars(self) -> dict[str, list[tuple[float, float, str]]]:
        """Return per engine its bars, (start seconds, end seconds, kind); adjacent bars of one kind are merged."""
        bars: dict[str, list[tuple[float, float, str]]] = {engine: [] for engine in Engine}
        ran: set[int] = set()
        for span in self.spans:
            start, end = span.start_seconds, span.end_seconds
            match span.moment.instruction:
                case Run(op):
                    kind = BarKind.RECOMPUTE if op in ran else self.graph.ops[op].phase
                    ran.add(op)
                    _append(bars[Engine.EXECUTE], start, span.ready_seconds, BarKind.WAITING)
                    _append(bars[Engine.EXECUTE], span.ready_seconds, end, kind)
                case Free(_):
                    _append(bars[Engine.EXECUTE], start, end, BarKind.WAITING)
                case Offload(_) if span.transfer:
                    _append(bars[Engine.SAVE], *span.transfer, BarKind.SAVE)
                case Prefetch(_) if span.transfer:
                    _append(bars[Engine.LOAD], *span.transfer, BarKind.LOAD)
        return bars

    def _live(self) -> Iterator[set[int]]:
        """Yield the values that are live during each instruction: one set, changed in place."""
        live = set(self.graph.inputs)
        for instruction, begins, ends in lives(self.graph, self.schedule):
            if isinstance(instruction, Run):
                live.difference_update(ends)
            live.update(begins)
            yield live
            live.difference_update(ends)


def _use(graph: TrainGraph, value: Value) -> ByteUse:
    match value.role:
        case Role.PARAM:
            return ByteUse.PARAMETERS
        case Role.STATE:
            return ByteUse.STATE
        case Role.BUFFER | Role.BATCH:
            return ByteUse.BUFFERS_AND_BATCH
        case Role.GRAD:
            return ByteUse.GRADIENTS
        case Role.ACTIVATION:
            producer = graph.producer[value.id]
            backward = producer is not None and graph.ops[producer].phase is not Phase.FORWARD
            return ByteUse.GRADIENTS if backward else ByteUse.ACTIVATIONS


def _append(bars: list[tuple[float, float, str]], start: float, end: float, kind: str) -> None:
    """Append a bar, or extend the last bar if it is adjacent and of the same kind."""
    if end <= start:
        return
    if bars and bars[-1][2] == kind and start - bars[-1][1] < 1e-9:
        start = bars.pop()[0]
    bars.append((start, end, kind))
