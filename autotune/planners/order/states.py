"""What a search over orders steps through: sets of ops that ran, and what each next op would take and leave."""

from dataclasses import dataclass

from autotune.predict.ordering import Ordering

Path = tuple[int, "Path"] | None
"""The ops that ran, the last first."""


@dataclass(slots=True)
class State:
    """Some ops ran."""

    ran: int
    """The set of them, a bit for each."""
    count: int
    live: int
    """Bytes that stand now."""
    peak: int
    """Highest on the way, or what no order can avoid anyway."""
    ready: dict[int, tuple[int, int]]
    """Ops that may run next: (bytes that each would leave behind, bytes that it takes while it runs)."""
    path: Path

    @property
    def order(self) -> tuple[int, ...]:
        """The ops that ran, in their order."""
        found, path = [], self.path
        while path is not None:
            op, path = path
            found.append(op)
        return tuple(reversed(found))


class Steps:
    """Steps of one problem. The sets of ops that states are told apart by are whole numbers."""

    def __init__(self, problem: Ordering) -> None:
        self.problem = problem
        self._bit = [1 << op for op in range(len(problem.before))]
        self._before = [self._set(ops) for ops in problem.before]
        self._ends = [self._set(ops) for ops in problem.ends]

    def _set(self, ops: list[int]) -> int:
        found = 0
        for op in ops:
            found |= 1 << op
        return found

    def start(self, floor: int) -> State:
        """Nothing ran yet. `floor`: a peak that no order can avoid."""
        problem = self.problem
        live = problem.base + sum(problem.nbytes[value] for value in problem.stands)
        ready = {op: self._weigh(0, op) for op, before in enumerate(problem.before) if not before}
        return self.settle(State(0, 0, live, max(floor, live), ready, None))

    def _weigh(self, ran: int, op: int) -> tuple[int, int]:
        problem = self.problem
        left = made = 0
        own = self._bit[op]
        for value in problem.touches[op]:
            ends, nbytes = self._ends[value], problem.nbytes[value]
            if not ends & ran and value not in problem.stands:
                made += nbytes
                left += nbytes
            if ends & ~ran == own and value not in problem.stays:
                left -= nbytes
        return left, made + problem.scratch[op]

    def step(self, state: State, op: int) -> State:
        """Run one ready op, and then all that can only do good."""
        left, during = state.ready[op]
        next_state = State(
            state.ran, state.count, state.live, max(state.peak, state.live + during), state.ready.copy(), state.path
        )
        self._run(next_state, op, left)
        return self.settle(next_state)

    def _run(self, state: State, op: int, left: int) -> None:
        problem, ready = self.problem, state.ready
        del ready[op]
        before = state.ran
        ran = state.ran = before | self._bit[op]
        state.count += 1
        state.live += left
        state.path = (op, state.path)
        for value in problem.touches[op]:
            ends = self._ends[value]
            remaining = ends & ~ran
            # others weigh less once it stands, and when they are the last
            if remaining and (not ends & before or not remaining & (remaining - 1)):
                for other in problem.ends[value]:
                    if other in ready:
                        ready[other] = self._weigh(ran, other)
        for later in problem.after[op]:
            if not self._before[later] & ~ran:
                ready[later] = self._weigh(ran, later)

    def settle(self, state: State) -> State:
        """Run ready ops that leave no more than they find and stay under the peak so far: later they do no better."""
        ready = state.ready
        while True:
            room = state.peak - state.live
            op = next((op for op, (left, during) in ready.items() if left <= 0 and during <= room), None)
            if op is None:
                return state
            self._run(state, op, ready[op][0])

    def through(self, start: State, end: State, ran: int) -> State:
        """From `start` to the set `ran`, by those steps to `end` that lead there."""
        here = State(start.ran, start.count, start.live, end.peak, start.ready.copy(), start.path)
        for op in end.order[start.count :]:
            if ran >> op & 1:
                self._run(here, op, here.ready[op][0])
        return self.settle(here)
