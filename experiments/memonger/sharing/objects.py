"""Values with known lives in shared objects, each as large as its largest tenant: greedily, exactly."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Life:
    """One value, from the op that makes it to the last that touches it; unless told, from the start or until the end."""

    name: str
    defined: float = -inf
    used: float = inf
    nbytes: int = 1


Tenants = tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Objects:
    """Who shares with whom, and what that takes."""

    objects: tuple[Tenants, ...]
    """The tenants of each object, one after the other."""
    lower_bound_bytes: int
    """No sharing of these lives takes less: proved."""

    @property
    def shared_bytes(self) -> int:
        """Every object as large as its largest tenant."""
        return _bytes(self.objects)

    @property
    def unshared_bytes(self) -> int:
        """Every value in an object of its own."""
        return sum(life.nbytes for tenants in self.objects for life in tenants)

    @property
    def names(self) -> dict[str, str]:
        """Per value that shares its object's name, which is that of the last tenant."""
        return {life.name: tenants[-1].name for tenants in self.objects if len(tenants) > 1 for life in tenants}


def greedy(lives: Iterable[Life], static: Collection[str] = ()) -> Objects:
    """In order of last use each joins, of the objects that are free by then, the one nearest to it in size."""
    moving, alone = _split(lives, static)
    objects: list[Tenants] = []
    for life in moving:
        free = [number for number, tenants in enumerate(objects) if _follows(life, tenants)]
        if free:
            objects[min(free, key=lambda number: abs(_largest(objects[number]) - life.nbytes))] += (life,)
        else:
            objects.append((life,))
    return Objects((*objects, *alone), sum(least_sizes(moving)) + _bytes(alone))


def exact(lives: Iterable[Life], static: Collection[str] = (), states: int = 100_000) -> Objects:
    """The fewest bytes of all where looking at `states` partial sharings is enough; else few, with a bound."""
    moving, alone = _split(lives, static)
    found, bound = _search(moving, min(greedy(moving).objects, _largest_first(moving), key=_bytes), states)
    return Objects((*found, *alone), bound + _bytes(alone))


def _largest_first(lives: Tenants) -> tuple[Tenants, ...]:
    """The largest first, each into the first object that has room for its life."""
    lives, objects = _by_size(lives), list[list[Life]]()
    for life in lives:
        open_to = (tenants for tenants in objects if not any(_together(life, other) for other in tenants))
        tenants = next(open_to, None)
        if tenants is None:
            objects.append([life])
        else:
            tenants.append(life)
    return _in_turn(objects)


class _Partial(NamedTuple):
    """The largest lives put into objects. Those of the least bound are looked at first, of them the deepest."""

    bound_bytes: int
    left: int
    """Lives that have no object yet."""
    number: int
    nbytes: int
    closed: tuple[int, ...]
    """Per object, as bits, the lives that it cannot take."""
    chosen: tuple[int, ...]
    """Per life its object."""


def _search(lives: Tenants, known: tuple[Tenants, ...], states: int) -> tuple[tuple[Tenants, ...], int]:
    """A sharing of fewer bytes than the known one, if there is one, and what none falls below.

    The largest first: then an object never grows, and only one that is begun costs. Of partial sharings whose objects are
    closed to the same lives the cheapest is followed. The first that is complete is the best.
    """
    lives = _by_size(lives)
    least, ceiling = least_sizes(lives), _bytes(known)
    heap: list[_Partial] = []
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    number = count()

    def push(left: int, nbytes: int, closed: tuple[int, ...], chosen: tuple[int, ...]) -> None:
        bound = nbytes + sum(least[len(closed) :])
        key = left, tuple(sorted(shut >> (len(lives) - left) for shut in closed))
        if bound < ceiling and nbytes < seen.get(key, ceiling):
            seen[key] = nbytes
            heappush(heap, _Partial(bound, left, next(number), nbytes, closed, chosen))

    push(len(lives), 0, (), ())
    for _ in range(states):
        if not heap:
            return known, ceiling
        bound, left, _, nbytes, closed, chosen = heappop(heap)
        if not left:
            return _objects(lives, chosen), bound
        at = len(lives) - left
        shuts = sum(1 << later for later in range(at + 1, len(lives)) if _together(lives[at], lives[later]))
        for taken, shut in enumerate(closed):
            if not shut >> at & 1:
                push(left - 1, nbytes, (*closed[:taken], shut | shuts, *closed[taken + 1 :]), (*chosen, taken))
        push(left - 1, nbytes + lives[at].nbytes, (*closed, shuts), (*chosen, len(closed)))
    return known, min([ceiling, *(partial.bound_bytes for partial in heap)])


def _objects(lives: Tenants, chosen: Sequence[int]) -> tuple[Tenants, ...]:
    tenants: dict[int, list[Life]] = {}
    for life, at in zip(lives, chosen, strict=True):
        tenants.setdefault(at, []).append(life)
    return _in_turn(tenants.values())


def least_sizes(lives: Iterable[Life]) -> list[int]:
    """What the largest object has at least, the second largest, and so on: their sum bounds every sharing.

    Where k lives of some size or more are there at once, fewer than k objects of that size do not hold them.
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
    """What may share, in order of last use, and an object for each that is static."""
    ordered = sorted(lives, key=lambda life: life.used)
    alone = tuple((life,) for life in ordered if life.name in static)
    return tuple(life for life in ordered if life.name not in static), alone


def _by_size(lives: Iterable[Life]) -> Tenants:
    return tuple(sorted(lives, key=lambda life: (-life.nbytes, life.defined)))


def _in_turn(objects: Iterable[Iterable[Life]]) -> tuple[Tenants, ...]:
    return tuple(tuple(sorted(tenants, key=lambda life: life.used)) for tenants in objects)


def _follows(life: Life, tenants: Tenants) -> bool:
    """Whether the object is free before the op that makes the value; while the op still reads its tenant, it is not."""
    return life.defined > tenants[-1].used


def _together(life: Life, other: Life) -> bool:
    return life.defined <= other.used and other.defined <= life.used


def _bytes(objects: Iterable[Tenants]) -> int:
    return sum(map(_largest, objects))


def _largest(tenants: Tenants) -> int:
    return max(life.nbytes for life in tenants)
