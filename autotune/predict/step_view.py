"""One plan over its simulated step: bytes by role, what lives at the peak, when which engine is busy."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph, Value
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Offload, Prefetch, Run, Schedule, lower
from autotune.predict.simulate import resident_bytes, spans

SLICES = 500
"""Points of a memory timeline: finer than the screen would only make the file large."""
NO_LAYER = "(no layer)"
"""Module of an op that belongs to none, as the loss's."""
ROLES = (
    "parameters", "optimizer state", "buffers and batch", "store's own", "gradients", "activations", "in transit",
    "workspaces",
)  # fmt: skip
"""What bytes are for, from what always stands to what comes and goes. In transit is what stands only because its bytes are
on their way: being written until it is freed, loaded until it is read."""


class Walk:
    """The simulated step, walked once; every question to it is a property."""

    def __init__(self, graph: TrainGraph, costs: Costs, plan: Plan) -> None:
        self.graph, self.costs = graph, costs
        self.schedule: Schedule = lower(graph, plan)
        self.spans = tuple(spans(graph, self.schedule, costs))
        self.seconds = self.spans[-1].end_seconds if self.spans else 0.0
        self.peak_at = max(range(len(self.spans)), key=lambda at: self.spans[at].moment.during_bytes, default=0)

    @property
    def peak_bytes(self) -> int:
        """Highest bytes of the step."""
        return self.spans[self.peak_at].moment.during_bytes if self.spans else self.graph.static_bytes

    @cached_property
    def slices(self) -> tuple[int, ...]:
        """Of each slice of time the position of its highest moment; with few instructions all of them."""
        if len(self.spans) <= SLICES:
            return tuple(range(len(self.spans)))
        highest: dict[int, int] = {}
        for at, span in enumerate(self.spans):
            slot = int(span.start_seconds / self.seconds * SLICES) if self.seconds else 0
            if slot not in highest or span.moment.during_bytes > self.spans[highest[slot]].moment.during_bytes:
                highest[slot] = at
        return tuple(highest[slot] for slot in sorted(highest))

    @cached_property
    def band(self) -> tuple[list[float], list[int]]:
        """(seconds, bytes): each the highest within its slice of time."""
        return (
            [self.spans[at].start_seconds for at in self.slices],
            [self.spans[at].moment.during_bytes for at in self.slices],
        )

    @cached_property
    def by_role(self) -> dict[str, list[int]]:
        """The same bytes, role by role."""
        graph, at_slice = self.graph, set(self.slices)
        found: dict[str, list[int]] = {role: [] for role in ROLES}
        standing = Counter({"store's own": resident_bytes(graph, self.schedule, self.costs) - graph.static_bytes})
        moving: set[int] = set()
        for at, live in enumerate(self._live()):
            instruction = self.spans[at].moment.instruction
            match instruction:
                case Offload(value) | Prefetch(value):
                    moving.add(value)
                case Run(op):
                    moving.difference_update(graph.ops[op].inputs, graph.ops[op].writes)
            if at in at_slice:
                now = standing + Counter()
                for value in live:
                    role = "in transit" if value in moving else _role(graph, graph.values[value])
                    now[role] += graph.values[value].nbytes
                if isinstance(instruction, Run):
                    now["workspaces"] = self.costs.scratch_bytes[instruction.op]
                for role, nbytes in found.items():
                    nbytes.append(now[role])
            if isinstance(instruction, Free):
                moving.discard(instruction.value)
        return found

    def at_peak(self) -> Counter[str]:
        """Bytes that live at the peak, by the layer that made them; the user's own under their roles."""
        graph = self.graph
        alive: Counter[str] = Counter()
        for at, live in enumerate(self._live()):
            if at == self.peak_at:
                for value in live:
                    maker = graph.producer[value]
                    own = f"({_role(graph, graph.values[value])})"
                    layer = own if maker is None else graph.ops[maker].layer or NO_LAYER
                    alive[layer] += graph.values[value].nbytes
        match self.spans[self.peak_at].moment.instruction if self.spans else None:
            case Run(op) if self.costs.scratch_bytes[op]:
                alive["(workspace of the running op)"] += self.costs.scratch_bytes[op]
        return alive

    def tracks(self) -> dict[str, list[tuple[float, float, str]]]:
        """Per engine its bars; neighbours of one kind are one bar."""
        found: dict[str, list[tuple[float, float, str]]] = {"execute": [], "load": [], "save": []}
        ran: set[int] = set()
        for span in self.spans:
            start, end = span.start_seconds, span.end_seconds
            match span.moment.instruction:
                case Run(op):
                    what = "recompute" if op in ran else self.graph.ops[op].phase.value
                    ran.add(op)
                    _join(found["execute"], start, span.ready_seconds, "waiting")
                    _join(found["execute"], span.ready_seconds, end, what)
                case Free(_):
                    _join(found["execute"], start, end, "waiting")
                case Offload(_) if span.transfer:
                    _join(found["save"], *span.transfer, "save")
                case Prefetch(_) if span.transfer:
                    _join(found["load"], *span.transfer, "load")
        return found

    def _live(self) -> Iterator[set[int]]:
        """Values that live during each instruction; one set, changed in place."""
        live = set(self.graph.inputs)
        for span in self.spans:
            match span.moment.instruction:
                case Run(op, takes):
                    live.discard(-1 if takes is None else takes)
                    live.update(self.graph.ops[op].outputs)
                    yield live
                case Prefetch(value):
                    live.add(value)
                    yield live
                case Free(value):
                    yield live
                    live.discard(value)
                case Offload(_):
                    yield live


def _role(graph: TrainGraph, value: Value) -> str:
    match value.role:
        case Role.PARAM:
            return "parameters"
        case Role.STATE:
            return "optimizer state"
        case Role.BUFFER | Role.BATCH:
            return "buffers and batch"
        case Role.GRAD:
            return "gradients"
        case Role.ACTIVATION:
            maker = graph.producer[value.id]
            backward = maker is not None and graph.ops[maker].phase is not Phase.FORWARD
            return "gradients" if backward else "activations"


def _join(bars: list[tuple[float, float, str]], start: float, end: float, what: str) -> None:
    if end <= start:
        return
    if bars and bars[-1][2] == what and start - bars[-1][1] < 1e-9:
        start = bars.pop()[0]
    bars.append((start, end, what))
