"""Orders of a net's ops: depth-first from its end, and the longest chain of ops first."""

from autotune.planners.order.longest_path import order_longest_chain_first
from autotune.predict.ordering import Ordering
from autotune.predict.reachability import reverse_edges
from experiments.claims.memonger.sharing.net import Net


def depth_first(net: Net) -> tuple[int, ...]:
    """Return an order in which an op that waits for nothing runs late."""
    readers = reverse_edges([sorted(earlier) for earlier in net.before])
    visited: set[int] = set()
    order: list[int] = []
    for start in range(len(net.ops)):
        stack = [(start, False)]
        while stack:
            op, done = stack.pop()
            if done:
                order.append(op)
            elif op not in visited:
                visited.add(op)
                stack += [(op, True), *((later, False) for later in reversed(readers[op]))]
    return tuple(reversed(order))


def longest_chain_first(net: Net) -> tuple[int, ...]:
    """Return an order in which the inputs of a chain are made as late as possible."""
    before = [sorted(earlier) for earlier in net.before]
    no_values: list[list[int]] = [[] for _ in before]
    return order_longest_chain_first(
        Ordering(before, reverse_edges(before), no_values, [], [], [0] * len(before), frozenset(), frozenset(), base=0)
    )
