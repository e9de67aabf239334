"""Reuse of free blobs by later ops of the same branch, correct in every order of the branches.

An op passes its token to all its dependents, and a blob is reused only by an op with the tokens of all ops that
touched it. Caffe2's memonger passes tokens where a branch forks, with the same result.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

from experiments.claims.memonger.sharing.net import Net

PREFIX = "__shared"
"""Marker of shared blobs after their scope. A net that has one stays unchanged, since its names would collide."""


@dataclass(slots=True)
class _Buffer:
    device: str
    nbytes: int
    tenants: list[str]
    tokens: int = 0
    """Ops that touched a tenant, as a bit set."""


def recycle(
    net: Net,
    shareable: Collection[str] | None = None,
    *,
    nbytes: Mapping[str, int] | None = None,
    scope: str = "",
) -> dict[str, str]:
    """Return new names for blobs that share: those of `shareable` (by default all) whose name begins with `scope`.

    With sizes, an op reuses the smallest free buffer that holds its output, else the one that grows least. Without sizes, it
    reuses the one with most tenants. The caller's blobs stay; leave others out to protect them.
    """
    if any(blob.startswith(scope + PREFIX) for blob in net.touched):
        return {}
    movable = net.movable if shareable is None else net.movable & set(shareable)
    remaining = {blob: len(ops) for blob, ops in net.touched.items() if blob in movable and blob.startswith(scope)}
    buffers: dict[str, _Buffer] = {}
    free: list[_Buffer] = []
    for number in _depth_first(net):
        op = net.ops[number]
        touched = [blob for blob in op.touches if blob in remaining]
        for blob in touched:
            if blob not in buffers:
                size = 0 if nbytes is None else nbytes[blob]
                usable = [buffer for buffer in free if _may_take(buffer, net.device[blob], net.ancestors[number])]
                buffers[blob] = chosen = _choose(usable, size) or _Buffer(net.device[blob], size, [])
                free = [buffer for buffer in free if buffer is not chosen]
                chosen.tenants.append(blob)
                chosen.nbytes = max(chosen.nbytes, size)
            buffers[blob].tokens |= 1 << number
            remaining[blob] -= 1
        free += [buffers[blob] for blob in touched if not remaining[blob]]
    return _names({id(buffer): buffer.tenants for buffer in buffers.values()}.values(), scope)


def recycle_largest_first(
    net: Net, nbytes: Mapping[str, int], shareable: Collection[str] | None = None
) -> dict[str, str]:
    """Return new names for blobs that share, the largest blob first, so that no buffer grows.

    Each joins the first buffer where all ops of one tenant precede those of the next, in every order of the ops.
    """
    if any(blob.startswith(PREFIX) for blob in net.touched):
        return {}
    movable = net.movable if shareable is None else net.movable & set(shareable)
    tokens = {blob: sum(1 << number for number in net.touched[blob]) for blob in movable}
    ancestors = {blob: reduce(and_, (net.ancestors[number] for number in net.touched[blob])) for blob in movable}
    buffers: list[list[str]] = []
    for blob in sorted(movable, key=lambda blob: (-nbytes[blob], net.touched[blob][0], blob)):
        for tenants in buffers:
            if net.device[blob] == net.device[tenants[0]] and all(
                not tokens[blob] & ~ancestors[other] or not tokens[other] & ~ancestors[blob] for other in tenants
            ):
                tenants.append(blob)
                break
        else:
            buffers.append([blob])
    return _names(buffers)


def _depth_first(net: Net) -> Iterator[int]:
    """Yield ops in a valid order: along a branch to the op where it waits for another."""
    later_ops: list[list[int]] = [[] for _ in net.ops]
    for number, earlier in enumerate(net.before):
        for other in earlier:
            later_ops[other].append(number)
    waits_for = [len(earlier) for earlier in net.before]
    stack = [number for number, count in enumerate(waits_for) if not count][::-1]
    while stack:
        number = stack.pop()
        yield number
        for later in reversed(later_ops[number]):
            waits_for[later] -= 1
            if not waits_for[later]:
                stack.append(later)


def _may_take(buffer: _Buffer, device: str, tokens: int) -> bool:
    return buffer.device == device and not buffer.tokens & ~tokens


def _choose(usable: Sequence[_Buffer], size: int) -> _Buffer | None:
    """Return the buffer with most tenants without sizes, which are then 0, else the tightest."""

    def fit(buffer: _Buffer) -> tuple[int, int, int, str]:
        return max(size - buffer.nbytes, 0), buffer.nbytes - size, -len(buffer.tenants), buffer.tenants[0]

    return min(usable, key=fit, default=None)


def _names(buffers: Iterable[Sequence[str]], scope: str = "") -> dict[str, str]:
    several = (tenants for tenants in buffers if len(tenants) > 1)
    return {blob: f"{scope}{PREFIX}{number}" for number, tenants in enumerate(several) for blob in tenants}
