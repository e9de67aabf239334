"""Solve the options of one block: bytes kept from its forward to its backward, peaks and seconds.

A block is planned as a step of its own. Op `enter` produces its inputs, `away` stands for all ops between its forward
and its backward, and `back` produces the incoming gradients. The scratch of `away` limits the bytes kept across it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from autotune.planners.recompute.editable_order import EditableOrder
from autotune.planners.recompute.repeats import Positions, find_links
from autotune.planners.recompute.search import Search, start_search
from autotune.planners.unfold import drop_unread_runs
from autotune.predict.bounds import peak_lower_bound

KEPT_SHARES = tuple(share / 20 for share in range(19, -1, -1))
"""Targets of the bytes kept across the gap, as shares of the input order's."""
PEAK_SHARES = (1.0, 0.4, 0.0)
"""Targets of the peak, from the proved lower bound (0) to the input order's peak (1)."""


@dataclass(frozen=True, slots=True)
class Option:
    """Option to run a block. Its bytes exclude values that the block does not touch."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept_bytes: int
    """Bytes that the block keeps across the gap between its forward and its backward, values of other readers excluded."""
    forward_bytes: int
    """Peak of the forward."""
    backward_bytes: int
    """Peak of the backward."""
    seconds: float
    """Seconds of recomputation."""


@dataclass(frozen=True)
class Piece:
    """Block cut out of its step, as a graph of its own."""

    graph: TrainGraph
    costs: Costs
    forward: tuple[int, ...]
    """Forward ops of the whole step, in running order."""
    backward: tuple[int, ...]
    """Backward ops of the whole step, in running order."""
    shared_bytes: int
    """Bytes held across the gap for readers outside of the block."""
    slack: tuple[int, int]
    """Bytes added to the forward and to the backward, so that both have the same room as in the whole step."""

    @classmethod
    def from_block(
        cls, graph: TrainGraph, positions: Positions, costs: Costs, pair: tuple[Sequence[int], Sequence[int]],
        around: tuple[int, int] = (0, 0),
    ) -> "Piece":  # fmt: skip
        """Cut a block out of its step.

        Args:
            graph: Whole step.
            positions: Positions of its ops.
            costs: Costs of its ops.
            pair: Forward and backward ops of the block.
            around: Bytes live beside the block in the whole step, during its forward and its backward.
        """
        forward, backward = pair
        links = find_links(graph, positions, forward, backward)
        floor = min(around)
        slack = (around[0] - floor, around[1] - floor)
        number = {value: index for index, value in enumerate(links)}
        held = [number[v] for v, link in links.items() if link.between and link.origin in ("before", "inside")]
        front, rear = len(number), len(number) + 1
        values = [
            Value(
                i, graph.values[v].name, 0 if links[v].origin == "static" else graph.values[v].nbytes, Role.ACTIVATION
            )
            for v, i in number.items()
        ]
        values += [Value(front, "slack", slack[0], Role.ACTIVATION), Value(rear, "slack", slack[1], Role.ACTIVATION)]

        def from_origin(origin: str) -> list[int]:
            return [number[value] for value, link in links.items() if link.origin == origin]

        def renumber(op_id: int, index: int) -> Op:
            op = graph.ops[op_id]
            return replace(
                op, id=index, inputs=tuple(number[v] for v in op.inputs), outputs=tuple(number[v] for v in op.outputs),
                writes=tuple(number[v] for v in op.writes), inplace=tuple(number[v] for v in op.inplace), alias_of=None,
            )  # fmt: skip

        gap = len(forward) + 1
        changed = [number[value] for value, link in links.items() if link.changed and link.origin == "static"]
        ops = (
            _stand_in(0, "enter", makes=(*from_origin("before"), front)),
            *(renumber(op, index) for index, op in enumerate(forward, 1)),
            _stand_in(gap, "away", reads=(*held, front)),
            _stand_in(gap + 1, "back", makes=(*from_origin("between"), rear), writes=changed),
            *(renumber(op, index) for index, op in enumerate(backward, gap + 2)),
        )
        inside = (*forward, *backward)
        seconds = [costs.seconds[op] for op in inside]
        scratch = [costs.scratch_bytes[op] for op in inside]
        size = len(forward)
        piece_graph = TrainGraph(
            "piece", ops, tuple(values), tuple(from_origin("static")),
            (*(number[v] for v, link in links.items() if link.after and link.origin != "static"), rear),
        )  # fmt: skip
        return cls(
            piece_graph,
            Costs((0.0, *seconds[:size], 0.0, 0.0, *seconds[size:]), (0, *scratch[:size], 0, 0, *scratch[size:])),
            tuple(forward), tuple(backward), sum(values[v].nbytes for v in (*held, front)), slack,
        )  # fmt: skip

    @property
    def gap(self) -> int:
        """Op that stands for all ops between forward and backward."""
        return len(self.forward) + 1

    @cached_property
    def unchanged(self) -> Option:
        """Option of the input order."""
        return self.weigh(self.traced)

    @property
    def traced(self) -> tuple[int, ...]:
        """Input order of the piece."""
        return tuple(range(len(self.graph.ops)))

    def edit(self, order: Sequence[int] | None = None) -> EditableOrder:
        """Return an editable order of the piece, by default the input order."""
        return EditableOrder(self.graph, self.traced if order is None else order, self.costs)

    def search(self, away_bytes: int, order: Sequence[int] | None = None) -> Search:
        """Return a search of an order, by default the input order, with `away_bytes` live during the gap."""
        scratch = list(self.costs.scratch_bytes)
        scratch[self.gap] = away_bytes
        costs = replace(self.costs, scratch_bytes=tuple(scratch))
        return start_search(self.graph, self.traced if order is None else order, costs)

    def weigh(self, order: tuple[int, ...]) -> Option:
        """Return the option that an order of this piece represents."""
        runs = self.edit(order)
        away = order.index(self.gap)
        back = away + 1 + order[away + 1 :].index(self.gap + 1)
        ahead = runs.bytes[1:away]
        behind = runs.bytes[back + 1 :]
        return Option(
            tuple(self._step_ops(order[1:away])),
            tuple(self._step_ops((*order[away + 1 : back], *order[back + 1 :]))),
            int(runs.bytes[away]) - self.shared_bytes,
            (int(ahead.max()) if len(ahead) else 0) - self.slack[0],
            (int(behind.max()) if len(behind) else 0) - self.slack[1],
            runs.seconds - sum(self.costs.seconds),
        )

    def _step_ops(self, order: Iterable[int]) -> list[int]:
        """Return the ops of the whole step for ops of the piece."""
        ids = (-1, *self.forward, -1, -1, *self.backward)
        return [ids[op] for op in order if ids[op] >= 0]

    def piece_order(self, forward: Sequence[int], backward: Sequence[int]) -> tuple[int, ...]:
        """Return the order of this piece for ops of the whole step."""
        number = {op: index for index, op in enumerate(self.forward, 1)}
        number |= {op: index for index, op in enumerate(self.backward, self.gap + 2)}
        return (0, *(number[op] for op in forward), self.gap, self.gap + 1, *(number[op] for op in backward))


def _stand_in(
    index: int, name: str, reads: Sequence[int] = (), makes: Sequence[int] = (), writes: Sequence[int] = ()
) -> Op:
    return Op(
        index, name, name, tuple(reads), tuple(makes), Phase.FORWARD, name, repeatable=False, writes=tuple(writes)
    )


def solve_options(piece: Piece, greed: float) -> tuple[Option, ...]:
    """Return the Pareto options of a block, from greedy evictions to targets of the peak and of the kept bytes."""
    unchanged = piece.unchanged
    high = max(unchanged.forward_bytes + piece.slack[0], unchanged.backward_bytes + piece.slack[1])
    low = min(high, peak_lower_bound(piece.graph, piece.costs)[0])
    results = [unchanged]
    for room in PEAK_SHARES:
        peak = int(low + room * (high - low))
        reached = unchanged.kept_bytes + 1
        for share in KEPT_SHARES:
            kept = int(share * unchanged.kept_bytes)
            if kept >= reached:
                continue
            limit = max(peak, piece.shared_bytes + kept)
            search = piece.search(limit - piece.shared_bytes - kept)
            search.fit(limit, greed)
            met = search.peak <= limit
            search.undo(max(limit, search.peak))
            results.append(piece.weigh(search.order))
            reached = results[-1].kept_bytes
            if not met:
                break
    return keep_pareto(results)


def recompute_whole(
    piece: Piece, inside: Sequence[tuple[Sequence[int], Sequence[int]]], may_repeat: Callable[[int], bool]
) -> Option:
    """Return the option that recomputes several blocks from their inputs, then runs the `inside` pairs."""
    forward = list(piece.forward)
    recomputed = [op for ahead, _ in inside for op in ahead if may_repeat(op)]
    backward = [*recomputed, *(op for _, behind in reversed(inside) for op in behind)]
    order = drop_needless_runs(piece.graph, piece.piece_order(forward, backward))
    bare = piece.edit(order)
    room = bare.peak - int(bare.bytes[order.index(piece.gap)])
    search = piece.search(
        room, order
    )  # without room across the gap no recomputation is undone that would keep a value there
    search.undo(search.peak)
    return piece.weigh(search.order)


def drop_needless_runs(graph: TrainGraph, order: Sequence[int]) -> tuple[int, ...]:
    """Return the order without unread runs, and without repeated runs whose previous results are still unread."""
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
    return drop_unread_runs(graph, before)


def keep_pareto(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the options on the Pareto front of kept bytes, both peaks and seconds; cheapest first."""
    front: list[Option] = []
    for option in sorted(options, key=lambda option: (option.seconds, option.kept_bytes, len(option.backward))):
        if not any(
            other.kept_bytes <= option.kept_bytes
            and other.forward_bytes <= option.forward_bytes
            and other.backward_bytes <= option.backward_bytes
            for other in front
        ):
            front.append(option)
    return tuple(front)
