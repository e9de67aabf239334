"""Represent the states of an order search: sets of finished ops, and the bytes that each next op would need."""

from dataclasses import dataclass

from autotune.predict.ordering import Ordering

Path = tuple[int, "Path"] | None
"""Linked list of finished ops, the last one first."""


@dataclass(slots=True)
class SearchState:
    """State after some ops ran."""

    ran: int
    """Bit set of the finished ops."""
    count: int
    """Number of finished ops."""
    live: int
    """Live bytes."""
    peak: int
    """Peak so far in bytes, at least the lower bound of all orders."""
    ready: dict[int, tuple[int, int]]
    """Per op that may run next: (change of the live bytes, bytes that it adds while it runs)."""
    path: Path

    @property
    def order(self) -> tuple[int, ...]:
        """Finished ops in the order in which they ran."""
        ops, path = [], self.path
        while path is not None:
            op, path = path
            ops.append(op)
        return tuple(reversed(ops))


class StateSpace:
    """States of one ordering problem and the steps between them. A set of ops is an int with one bit per op."""

    def __init__(self, problem: Ordering) -> None:
        self.problem = problem
        self._bit = [1 << op for op in range(len(problem.before))]
        self._before = [self._bit_set(ops) for ops in problem.before]
        self._ends = [self._bit_set(ops) for ops in problem.ends]

    def _bit_set(self, ops: list[int]) -> int:
        bits = 0
        for op in ops:
            bits |= 1 << op
        return bits

    def start(self, floor: int) -> SearchState:
        """Return the state before any op ran. `floor` is a lower bound of the peak in bytes."""
        problem = self.problem
        live = problem.base + sum(problem.nbytes[value] for value in problem.live_at_start)
        ready = {op: self._weigh(0, op) for op, before in enumerate(problem.before) if not before}
        return self.settle(SearchState(0, 0, live, max(floor, live), ready, None))

    def _weigh(self, ran: int, op: int) -> tuple[int, int]:
        problem = self.problem
        net = created = 0
        bit = self._bit[op]
        for value in problem.touches[op]:
            ends, nbytes = self._ends[value], problem.nbytes[value]
            if not ends & ran and value not in problem.live_at_start:
                created += nbytes
                net += nbytes
            if ends & ~ran == bit and value not in problem.live_at_end:
                net -= nbytes
        return net, created + problem.scratch[op]

    def step(self, state: SearchState, op: int) -> SearchState:
        """Return the state after one ready op, and after all ops that can then run without disadvantage."""
        net, during = state.ready[op]
        next_state = SearchState(
            state.ran, state.count, state.live, max(state.peak, state.live + during), state.ready.copy(), state.path
        )
        self._run(next_state, op, net)
        return self.settle(next_state)

    def _run(self, state: SearchState, op: int, net: int) -> None:
        problem, ready = self.problem, state.ready
        del ready[op]
        before = state.ran
        ran = state.ran = before | self._bit[op]
        state.count += 1
        state.live += net
        state.path = (op, state.path)
        for value in problem.touches[op]:
            ends = self._ends[value]
            remaining = ends & ~ran
            # other ops of this value need fewer bytes once it is live, and free it once they are its last reader
            if remaining and (not ends & before or not remaining & (remaining - 1)):
                for other in problem.ends[value]:
                    if other in ready:
                        ready[other] = self._weigh(ran, other)
        for later in problem.after[op]:
            if not self._before[later] & ~ran:
                ready[later] = self._weigh(ran, later)

    def settle(self, state: SearchState) -> SearchState:
        """Run ready ops that leave no more bytes live and stay under the peak: postponing them never helps."""
        ready = state.ready
        while True:
            room = state.peak - state.live
            op = next((op for op, (net, during) in ready.items() if net <= 0 and during <= room), None)
            if op is None:
                return state
            self._run(state, op, ready[op][0])

    def replay_to(self, start: SearchState, end: SearchState, ran: int) -> SearchState:
        """Return the state of the bit set `ran`: `start` followed by those steps towards `end` that belong to it."""
        state = SearchState(start.ran, start.count, start.live, end.peak, start.ready.copy(), start.path)
        for op in end.order[start.count :]:
            if ran >> op & 1:
                self._run(state, op, state.ready[op][0])
        return self.settle(state)
