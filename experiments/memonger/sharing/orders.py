"""Orders in which a net may run: depth-first from its end, and the longest chain of ops first."""

from autotune.planners.order.longest_path import longest_first
from autotune.predict.ordering import Ordering
from autotune.predict.reachability import turned
from experiments.memonger.sharing.net import Net


def depth_first(net: Net) -> tuple[int, ...]:
    """What waits for nothing comes late: each op stands before all that depend on it, those found last first."""
    after = turned([sorted(earlier) for earlier in net.before])
    seen: set[int] = set()
    order: list[int] = []
    for start in range(len(net.ops)):
        stack = [(start, False)]
        while stack:
            op, done = stack.pop()
            if done:
                order.append(op)
            elif op not in seen:
                seen.add(op)
                stack += [(op, True), *((later, False) for later in reversed(after[op]))]
    return tuple(reversed(order))


def longest_chain_first(net: Net) -> tuple[int, ...]:
    """What a chain waits for is made only when it must be."""
    before = [sorted(earlier) for earlier in net.before]
    none: list[list[int]] = [[] for _ in before]
    return longest_first(
        Ordering(before, turned(before), none, [], [], [0] * len(before), frozenset(), frozenset(), base=0)
    )
