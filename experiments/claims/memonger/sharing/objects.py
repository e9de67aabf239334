"""Values with known lives in shared objects, each as large as its largest tenant: greedy and exact solvers."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Life:
    """Life of one value, from the op that makes it to the last that touches it; by default throughout."""

    name: str
    defined: float = -inf
    used: float = inf
    nbytes: int = 1


Tenants = tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class SharedObjects:
    """Tenants of each object, and a lower bound."""

    objects: tuple[Tenants, ...]
    """Tenants of each object in order of their lives."""
    lower_bound_bytes: int
    """Proved lower bound on the bytes of every sharing of these lives."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of all objects, each as large as its largest tenant."""
        return _bytes(self.objects)

    @property
    def unshared_bytes(self) -> int:
        """Bytes of all values, each in an object of its own."""
        return sum(life.nbytes for tenants in self.objects for life in tenants)

    @property
    def names(self) -> dict[str, str]:
        """Name of the object, which is that of its last tenant, for each value that shares."""
        return {life.name: tenants[-1].name for tenants in self.objects if len(tenants) > 1 for life in tenants}


def share_greedily(lives: Iterable[Life], static: Collection[str] = ()) -> SharedObjects:
    """Assign values in order of last use, each to the free object nearest in size."""
    moving, alone = _split(lives, static)
    objects: list[Tenants] = []
    for life in moving:
        free = [number for number, tenants in enumerate(objects) if _follows(life, tenants)]
        if free:
            objects[min(free, key=lambda number: abs(_largest(objects[number]) - life.nbytes))] += (life,)
        else:
            objects.append((life,))
    return SharedObjects((*objects, *alone), sum(least_object_sizes(moving)) + _bytes(alone))


def share_exactly(lives: Iterable[Life], static: Collection[str] = (), states: int = 100_000) -> SharedObjects:
    """Return the minimum of bytes if searching `states` partial sharings is enough, else a good sharing with a bound."""
    moving, alone = _split(lives, static)
    objects, bound = _search(
        moving, min(share_greedily(moving).objects, _share_largest_first(moving), key=_bytes), states
    )
    return SharedObjects((*objects, *alone), bound + _bytes(alone))


def _share_largest_first(lives: Tenants) -> tuple[Tenants, ...]:
    """Assign the largest values first, each to the first object that is free during its life."""
    lives, objects = _by_size(lives), list[list[Life]]()
    for life in lives:
        open_to = (tenants for tenants in objects if not any(_overlap(life, other) for other in tenants))
        tenants = next(open_to, None)
        if tenants is None:
            objects.append([life])
        else:
            tenants.append(life)
    return _sort_tenants(objects)


class _Partial(NamedTuple):
    """Partial sharing of the largest lives; the least bound is searched first, and among equals the deepest."""

    bound_bytes: int
    left: int
    """Number of lives without an object."""
    number: int
    nbytes: int
    closed: tuple[int, ...]
    """Lives that each object cannot take, as a bit set."""
    chosen: tuple[int, ...]
    """Object of each assigned life."""


def _search(lives: Tenants, initial: tuple[Tenants, ...], states: int) -> tuple[tuple[Tenants, ...], int]:
    """Return a sharing of fewer bytes than the initial one, if one exists, and a lower bound.

    Lives are assigned from the largest, so an object never grows, and only a new object costs bytes. Of partial sharings
    whose objects are closed to the same lives only the cheapest is kept. The first complete sharing is the best.
    """
    lives = _by_size(lives)
    least, ceiling = least_object_sizes(lives), _bytes(initial)
    heap: list[_Partial] = []
    cheapest: dict[tuple[int, tuple[int, ...]], int] = {}
    number = count()

    def push(left: int, nbytes: int, closed: tuple[int, ...], chosen: tuple[int, ...]) -> None:
        bound = nbytes + sum(least[len(closed) :])
        key = left, tuple(sorted(shut >> (len(lives) - left) for shut in closed))
        if bound < ceiling and nbytes < cheapest.get(key, ceiling):
            cheapest[key] = nbytes
            heappush(heap, _Partial(bound, left, next(number), nbytes, closed, chosen))

    push(len(lives), 0, (), ())
    for _ in range(states):
        if not heap:
            return initial, ceiling
        bound, left, _, nbytes, closed, chosen = heappop(heap)
        if not left:
            return _objects(lives, chosen), bound
        index = len(lives) - left
        shuts = sum(1 << later for later in range(index + 1, len(lives)) if _overlap(lives[index], lives[later]))
        for object_index, shut in enumerate(closed):
            if not shut >> index & 1:
                push(
                    left - 1,
                    nbytes,
                    (*closed[:object_index], shut | shuts, *closed[object_index + 1 :]),
                    (*chosen, object_index),
                )
        push(left - 1, nbytes + lives[index].nbytes, (*closed, shuts), (*chosen, len(closed)))
    return initial, min([ceiling, *(partial.bound_bytes for partial in heap)])


def _objects(lives: Tenants, chosen: Sequence[int]) -> tuple[Tenants, ...]:
    tenants: dict[int, list[Life]] = {}
    for life, object_index in zip(lives, chosen, strict=True):
        tenants.setdefault(object_index, []).append(life)
    return _sort_tenants(tenants.values())


def least_object_sizes(lives: Iterable[Life]) -> list[int]:
    """Return lower bounds on the largest object, the second largest, and so on; their sum bounds every sharing.

    Where k lives of at least some size overlap, fewer than k objects of that size cannot hold them.
    """
    lives = sorted(lives, key=lambda life: -life.nbytes)
    moments = sorted({life.defined for life in lives})
    crowd = [0] * len(moments)
    least: list[int] = []
    for life in lives:
        first, end = bisect_left(moments, life.defined), bisect_right(moments, life.used)
        crowd[first:end] = [1 + others for others in crowd[first:end]]
        if max(crowd[first:end]) > len(least):
            least.append(life.nbytes)
    return least


def _split(lives: Iterable[Life], static: Collection[str]) -> tuple[Tenants, tuple[Tenants, ...]]:
    """Return the values that may share, in order of last use, and one object for each static value."""
    ordered = sorted(lives, key=lambda life: life.used)
    alone = tuple((life,) for life in ordered if life.name in static)
    return tuple(life for life in ordered if life.name not in static), alone


def _by_size(lives: Iterable[Life]) -> Tenants:
    return tuple(sorted(lives, key=lambda life: (-life.nbytes, life.defined)))


def _sort_tenants(objects: Iterable[Iterable[Life]]) -> tuple[Tenants, ...]:
    return tuple(tuple(sorted(tenants, key=lambda life: life.used)) for tenants in objects)


def _follows(life: Life, tenants: Tenants) -> bool:
    """Return True if the object is free before the op that makes the value; an op still reads its inputs while it runs."""
    return life.defined > tenants[-1].used


def _overlap(life: Life, other: Life) -> bool:
    return life.defined <= other.used and other.defined <= life.used


def _bytes(objects: Iterable[Tenants]) -> int:
    return sum(map(_largest, objects))


def _largest(tenants: Tenants) -> int:
    return max(life.nbytes for life in tenants)
