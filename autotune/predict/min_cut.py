"""Minimum cut of a network, after Dinic (1970)."""

from collections import deque

UNCUTTABLE = 1 << 62
"""Capacity of an edge that no cut may contain."""


class Network:
    """Directed network with capacities. Nodes are integers; node 0 is the source and node 1 the sink.

    >>> network = Network()
    >>> middle = network.add_node()
    >>> network.add_edge(0, middle, 3)
    >>> network.add_edge(middle, 1, 2)
    >>> network.min_cut()
    [True, False, True]
    """

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # per node
        self._head: list[int] = []
        self._room: list[int] = []  # residual capacity; edge ^ 1 is the reverse of an edge

    def add_node(self) -> int:
        """Add a node and return its number."""
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge. A cut with `tail` on the source side and `head` on the sink side pays its capacity."""
        for node, other, room in ((tail, head, capacity), (head, tail, 0)):
            self._edges[node].append(len(self._head))
            self._head.append(other)
            self._room.append(room)

    def min_cut(self) -> list[bool]:
        """Return per node True for the source side, in the minimum cut with the most nodes on that side."""
        while (level := self._levels())[1] >= 0:
            self._send_flow(level)
        side = [True] * len(self._edges)
        side[1] = False
        queue = deque([1])
        while queue:
            for edge in self._edges[queue.popleft()]:
                tail = self._head[edge]
                if side[tail] and self._room[edge ^ 1]:
                    side[tail] = False
                    queue.append(tail)
        return side

    def _levels(self) -> list[int]:
        """Return per node its distance from the source over edges with residual capacity; -1 if there is no path."""
        level = [-1] * len(self._edges)
        level[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                head = self._head[edge]
                if self._room[edge] and level[head] < 0:
                    level[head] = level[node] + 1
                    queue.append(head)
        return level

    def _send_flow(self, level: list[int]) -> None:
        """Send a blocking flow along shortest paths."""
        following = [0] * len(self._edges)  # edges of each node that cannot be used in this round
        path: list[int] = []
        node = 0
        while True:
            if node == 1:
                sent = min(self._room[edge] for edge in path)
                for edge in path:
                    self._room[edge] -= sent
                    self._room[edge ^ 1] += sent
                full = next(index for index, edge in enumerate(path) if not self._room[edge])
                node = self._head[path[full] ^ 1]
                del path[full:]
                continue
            edges = self._edges[node]
            while following[node] < len(edges):
                edge = edges[following[node]]
                if self._room[edge] and level[self._head[edge]] == level[node] + 1:
                    path.append(edge)
                    node = self._head[edge]
                    break
                following[node] += 1
            else:
                if not path:
                    return
                level[node] = -1
                node = self._head[path.pop() ^ 1]
