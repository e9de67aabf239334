"""The cheapest cut between two sides of a network (Dinic 1970)."""

from collections import deque

FREE = 1 << 62
"""Capacity of an edge that no cut may take."""


class Network:
    """Nodes are numbers; node 0 is one side, node 1 the other."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # per node
        self._head: list[int] = []
        self._room: list[int] = []  # an edge's twin, which leads back, stands next to it

    def node(self) -> int:
        """A new node."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, tail: int, head: int, capacity: int) -> None:
        """Cutting it, with `tail` on side 0 and `head` on side 1, costs its capacity."""
        for node, other, room in ((tail, head, capacity), (head, tail, 0)):
            self._edges[node].append(len(self._head))
            self._head.append(other)
            self._room.append(room)

    def cut(self) -> list[bool]:
        """Per node whether it is on side 0, in the cheapest cut with the most nodes there."""
        while (level := self._levels())[1] >= 0:
            self._block(level)
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
        """Per node its distance from node 0 over edges with room."""
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

    def _block(self, level: list[int]) -> None:
        """Send what fits along shortest ways."""
        following = [iter(edges) for edges in self._edges]
        way: list[int] = []
        node = 0
        while True:
            if node == 1:
                sent = min(self._room[edge] for edge in way)
                for edge in way:
                    self._room[edge] -= sent
                    self._room[edge ^ 1] += sent
                full = next(place for place, edge in enumerate(way) if not self._room[edge])
                node = self._head[way[full] ^ 1]
                del way[full:]
                # the edge was passed over by its iterator: it is full, and stays so in this round
                continue
            for edge in following[node]:
                if self._room[edge] and level[self._head[edge]] == level[node] + 1:
                    way.append(edge)
                    node = self._head[edge]
                    break
            else:
                if not way:
                    return
                level[node] = -1
                node = self._head[way.pop() ^ 1]
