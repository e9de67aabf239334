"""Give blobs that nobody needs any more to later ops of the same branch: whatever order the branches run in, it is right.

An op hands its token to all that depend on it, and a blob is taken over only by an op that holds the tokens of all ops
that touched it: Caffe2's memonger hands out tokens where a branch forks, which comes to the same.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

from experiments.memonger.sharing.net import Net

PREFIX = "__shared"
"""Names of shared blobs begin with their scope and this. A net that has one is left as it is: it would get the same names
for others."""


@dataclass(slots=True)
class _Buffer:
    device: str
    nbytes: int
    tenants: list[str]
    tokens: int = 0
    """Ops that touched a tenant, as bits."""


def recycle(
    net: Net,
    shareable: Collection[str] | None = None,
    *,
    nbytes: Mapping[str, int] | None = None,
    scope: str = "",
) -> dict[str, str]:
    """New names for blobs that share: of those that are `shareable` (all, unless told) and whose name begins with `scope`.

    With sizes an op takes the smallest free buffer that holds its output, else the one that has to grow least; without, the
    one with most tenants. The caller's own blobs stay; to protect others, leave them out.
    """
    if any(blob.startswith(scope + PREFIX) for blob in net.touched):
        return {}
    wanted = net.movable if shareable is None else net.movable & set(shareable)
    left = {blob: len(ops) for blob, ops in net.touched.items() if blob in wanted and blob.startswith(scope)}
    buffers: dict[str, _Buffer] = {}
    free: list[_Buffer] = []
    for number in _depth_first(net):
        op = net.ops[number]
        mine = [blob for blob in op.touches if blob in left]
        for blob in mine:
            if blob not in buffers:
                size = 0 if nbytes is None else nbytes[blob]
                usable = [one for one in free if _may_take(one, net.device[blob], net.ancestors[number])]
                buffers[blob] = taken = _choose(usable, size) or _Buffer(net.device[blob], size, [])
                free = [one for one in free if one is not taken]
                taken.tenants.append(blob)
                taken.nbytes = max(taken.nbytes, size)
            buffers[blob].tokens |= 1 << number
            left[blob] -= 1
        free += [buffers[blob] for blob in mine if not left[blob]]
    return _names({id(one): one.tenants for one in buffers.values()}.values(), scope)


def recycle_largest_first(
    net: Net, nbytes: Mapping[str, int], shareable: Collection[str] | None = None
) -> dict[str, str]:
    """New names for blobs that share, as `recycle` gives them: the largest blob first, so that no buffer ever grows.

    Each joins the first buffer in which all ops of one tenant have run before those of the next, in whatever order ops run.
    """
    if any(blob.startswith(PREFIX) for blob in net.touched):
        return {}
    wanted = net.movable if shareable is None else net.movable & set(shareable)
    tokens = {blob: sum(1 << number for number in net.touched[blob]) for blob in wanted}
    owned = {blob: reduce(and_, (net.ancestors[number] for number in net.touched[blob])) for blob in wanted}
    buffers: list[list[str]] = []
    for blob in sorted(wanted, key=lambda blob: (-nbytes[blob], net.touched[blob][0], blob)):
        for tenants in buffers:
            if net.device[blob] == net.device[tenants[0]] and all(
                not tokens[blob] & ~owned[other] or not tokens[other] & ~owned[blob] for other in tenants
            ):
                tenants.append(blob)
                break
        else:
            buffers.append([blob])
    return _names(buffers)


def _depth_first(net: Net) -> Iterator[int]:
    """Ops in an order in which they may run: along a branch to where it waits for another."""
    after: list[list[int]] = [[] for _ in net.ops]
    for number, earlier in enumerate(net.before):
        for other in earlier:
            after[other].append(number)
    waits_for = [len(earlier) for earlier in net.before]
    stack = [number for number, count in enumerate(waits_for) if not count][::-1]
    while stack:
        number = stack.pop()
        yield number
        for later in reversed(after[number]):
            waits_for[later] -= 1
            if not waits_for[later]:
                stack.append(later)


def _may_take(buffer: _Buffer, device: str, tokens: int) -> bool:
    return buffer.device == device and not buffer.tokens & ~tokens


def _choose(usable: Sequence[_Buffer], size: int) -> _Buffer | None:
    """Without sizes, all of them 0, that with most tenants; else the tightest."""

    def fit(one: _Buffer) -> tuple[int, int, int, str]:
        return max(size - one.nbytes, 0), one.nbytes - size, -len(one.tenants), one.tenants[0]

    return min(usable, key=fit, default=None)


def _names(buffers: Iterable[Sequence[str]], scope: str = "") -> dict[str, str]:
    several = (tenants for tenants in buffers if len(tenants) > 1)
    return {blob: f"{scope}{PREFIX}{number}" for number, tenants in enumerate(several) for blob in tenants}
