"""What one block can give: bytes not kept from its forward to its backward, at which peak, for which seconds.

A block is planned as a step of its own: `enter` makes what comes in, `away` stands for all that runs between its
forward and its backward, `back` makes the gradients that come in. The scratch of `away` limits what is kept across it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from autotune.planners.recompute.editable_order import Runs
from autotune.planners.recompute.repeats import Places, ties
from autotune.planners.recompute.search import Search, begin
from autotune.planners.unfold import without_unread
from autotune.predict.bounds import peak_lower_bound

KEPT = tuple(share / 20 for share in range(19, -1, -1))
"""Shares of the bytes that the given order keeps across the gap, aimed at one by one."""
ROOM = (1.0, 0.4, 0.0)
"""Peaks aimed at, between the lowest that can be (0) and that of the given order (1)."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block. Its bytes leave out what the block does not touch."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept_bytes: int
    """Of the block, while all between its forward and its backward runs; what others need there is left out."""
    forward_bytes: int
    backward_bytes: int
    seconds: float
    """Of what is computed again."""


@dataclass(frozen=True)
class Piece:
    """A block cut out of its step."""

    graph: TrainGraph
    costs: Costs
    forward: tuple[int, ...]
    """Ops of the whole step, as they run."""
    backward: tuple[int, ...]
    shared_bytes: int
    """Held across the gap for others, whatever is done here."""
    slack: tuple[int, int]
    """Bytes added to the forward, to the backward, so that both have the same room here as in the whole step."""

    @classmethod
    def cut(
        cls, graph: TrainGraph, places: Places, costs: Costs, pair: tuple[Sequence[int], Sequence[int]],
        around: tuple[int, int] = (0, 0),
    ) -> "Piece":  # fmt: skip
        """`pair`: forward and backward; `around`: bytes that stand in the whole step beside the one and the other."""
        forward, backward = pair
        tied = ties(graph, places, forward, backward)
        floor = min(around)
        slack = (around[0] - floor, around[1] - floor)
        number = {value: index for index, value in enumerate(tied)}
        held = [number[v] for v, tie in tied.items() if tie.between and tie.origin in ("before", "here")]
        front, rear = len(number), len(number) + 1
        values = [
            Value(i, graph.values[v].name, 0 if tied[v].origin == "static" else graph.values[v].nbytes, Role.ACTIVATION)
            for v, i in number.items()
        ]
        values += [Value(front, "slack", slack[0], Role.ACTIVATION), Value(rear, "slack", slack[1], Role.ACTIVATION)]

        def of(origin: str) -> list[int]:
            return [number[value] for value, tie in tied.items() if tie.origin == origin]

        def inner(op_id: int, at: int) -> Op:
            op = graph.ops[op_id]
            return replace(
                op, id=at, inputs=tuple(number[v] for v in op.inputs), outputs=tuple(number[v] for v in op.outputs),
                writes=tuple(number[v] for v in op.writes), inplace=tuple(number[v] for v in op.inplace), given=None,
            )  # fmt: skip

        gap = len(forward) + 1
        changed = [number[value] for value, tie in tied.items() if tie.changed and tie.origin == "static"]
        ops = (
            _stand_in(0, "enter", makes=(*of("before"), front)),
            *(inner(op, at) for at, op in enumerate(forward, 1)),
            _stand_in(gap, "away", reads=(*held, front)),
            _stand_in(gap + 1, "back", makes=(*of("between"), rear), writes=changed),
            *(inner(op, at) for at, op in enumerate(backward, gap + 2)),
        )
        inside = (*forward, *backward)
        seconds = [costs.seconds[op] for op in inside]
        scratch = [costs.scratch_bytes[op] for op in inside]
        size = len(forward)
        made = TrainGraph(
            "piece", ops, tuple(values), tuple(of("static")),
            (*(number[v] for v, tie in tied.items() if tie.after and tie.origin != "static"), rear),
        )  # fmt: skip
        return cls(
            made,
            Costs((0.0, *seconds[:size], 0.0, 0.0, *seconds[size:]), (0, *scratch[:size], 0, 0, *scratch[size:])),
            tuple(forward), tuple(backward), sum(values[v].nbytes for v in (*held, front)), slack,
        )  # fmt: skip

    @property
    def gap(self) -> int:
        """Op that stands for all that runs between forward and backward."""
        return len(self.forward) + 1

    @cached_property
    def given(self) -> Option:
        """The block as it stands."""
        return self.weigh(self.traced)

    @property
    def traced(self) -> tuple[int, ...]:
        """The piece as it stands."""
        return tuple(range(len(self.graph.ops)))

    def start(self, order: Sequence[int] | None = None) -> Runs:
        """An order of the piece, by default as it stands, with its bytes."""
        return Runs(self.graph, self.traced if order is None else order, self.costs)

    def begin(self, away_bytes: int, order: Sequence[int] | None = None) -> Search:
        """The same to be changed, with so many bytes standing while all else runs."""
        scratch = list(self.costs.scratch_bytes)
        scratch[self.gap] = away_bytes
        costs = replace(self.costs, scratch_bytes=tuple(scratch))
        return begin(self.graph, self.traced if order is None else order, costs)

    def weigh(self, order: tuple[int, ...]) -> Option:
        """The option that an order of this piece is."""
        runs = self.start(order)
        away = order.index(self.gap)
        back = away + 1 + order[away + 1 :].index(self.gap + 1)
        ahead = runs.bytes[1:away]
        behind = runs.bytes[back + 1 :]
        return Option(
            tuple(self._own(order[1:away])),
            tuple(self._own((*order[away + 1 : back], *order[back + 1 :]))),
            int(runs.bytes[away]) - self.shared_bytes,
            (int(ahead.max()) if len(ahead) else 0) - self.slack[0],
            (int(behind.max()) if len(behind) else 0) - self.slack[1],
            runs.seconds - sum(self.costs.seconds),
        )

    def _own(self, order: Iterable[int]) -> list[int]:
        """Ops of the whole step for ops of the piece."""
        ids = (-1, *self.forward, -1, -1, *self.backward)
        return [ids[op] for op in order if ids[op] >= 0]

    def inner(self, forward: Sequence[int], backward: Sequence[int]) -> tuple[int, ...]:
        """An order of this piece for ops of the whole step."""
        number = {op: at for at, op in enumerate(self.forward, 1)}
        number |= {op: at for at, op in enumerate(self.backward, self.gap + 2)}
        return (0, *(number[op] for op in forward), self.gap, self.gap + 1, *(number[op] for op in backward))


def _stand_in(
    at: int, name: str, reads: Sequence[int] = (), makes: Sequence[int] = (), writes: Sequence[int] = ()
) -> Op:
    return Op(at, name, name, tuple(reads), tuple(makes), Phase.FORWARD, name, repeatable=False, writes=tuple(writes))


def options(piece: Piece, greed: float) -> tuple[Option, ...]:
    """Pareto options of a block, its given order first; each is the greedy eviction's answer to two limits."""
    given = piece.given
    high = max(given.forward_bytes + piece.slack[0], given.backward_bytes + piece.slack[1])
    low = min(high, peak_lower_bound(piece.graph, piece.costs)[0])
    found = [given]
    for room in ROOM:
        peak = int(low + room * (high - low))
        reached = given.kept_bytes + 1
        for share in KEPT:
            kept = int(share * given.kept_bytes)
            if kept >= reached:
                continue
            limit = max(peak, piece.shared_bytes + kept)
            search = piece.begin(limit - piece.shared_bytes - kept)
            search.fit(limit, greed)
            met = search.peak <= limit
            search.undo(max(limit, search.peak))
            found.append(piece.weigh(search.order))
            reached = found[-1].kept_bytes
            if not met:
                break
    return pareto(found)


def whole(
    piece: Piece, inside: Sequence[tuple[Sequence[int], Sequence[int]]], may_repeat: Callable[[int], bool]
) -> Option:
    """The option to run several blocks again from where they begin, and each (forward, backward) then as given."""
    forward = list(piece.forward)
    again = [op for ahead, _ in inside for op in ahead if may_repeat(op)]
    backward = [*again, *(op for _, behind in reversed(inside) for op in behind)]
    order = tidy(piece.graph, piece.inner(forward, backward))
    bare = piece.start(order)
    room = bare.peak - int(bare.bytes[order.index(piece.gap)])
    search = piece.begin(room, order)  # with no room across the gap nothing is taken back that would be kept there
    search.undo(search.peak)
    return piece.weigh(search.order)


def tidy(graph: TrainGraph, order: Sequence[int]) -> tuple[int, ...]:
    """The order without runs that nobody reads, and without those whose last run nobody has read yet."""
    before: list[int] = []
    ran: set[int] = set()
    unread: set[int] = set()
    for op_id in order:
        if op_id in ran and op_id in unread:
            continue
        unread.difference_update(maker for v in graph.ops[op_id].inputs if (maker := graph.producer[v]) is not None)
        ran.add(op_id)
        unread.add(op_id)
        before.append(op_id)
    return without_unread(graph, before)


def pareto(found: Iterable[Option]) -> tuple[Option, ...]:
    """Those that no other beats in bytes kept, both peaks and seconds; cheapest first."""
    left: list[Option] = []
    for option in sorted(found, key=lambda made: (made.seconds, made.kept_bytes, len(made.backward))):
        mine = (option.kept_bytes, option.forward_bytes, option.backward_bytes)
        if not any(
            other.kept_bytes <= mine[0] and other.forward_bytes <= mine[1] and other.backward_bytes <= mine[2]
            for other in left
        ):
            left.append(option)
    return tuple(left)
