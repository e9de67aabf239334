"""Find the largest batch size whose bytes stay within a budget, with few evaluations."""

from collections.abc import Callable

GROWTH = 4
"""Largest factor from one size to the next while nothing has exceeded the budget."""


def find_largest_size(
    bytes_at: Callable[[int], float], budget_bytes: int, *, start: int, cap: int, probes: int = 0
) -> int:
    """Return the largest batch size that is known to stay within the budget; 0 where none does.

    The sizes between a size that fits and one that does not are searched by secants and bisection in turns. Where bytes rise
    with the size, the result is exact. Where they do not, the result fits and the next size does not. `probes` sizes up to
    twice the result are then tried too, evenly spaced: all of them if there are no more. A larger size that fits is taken,
    and the search goes on from there.

    Args:
        bytes_at: Bytes of a size; infinity for a size that cannot run. Each size is asked for once.
        budget_bytes: Maximum bytes.
        start: First size to try, at least 1.
        cap: Largest size to return.
        probes: Number of larger sizes to try at the end.

    >>> find_largest_size(lambda size: 100 + 10 * size, 1000, start=8, cap=10**6)
    90
    >>> find_largest_size(lambda size: 100 + 10 * size, 105, start=8, cap=10**6)
    0
    """
    sizes = _Sizes(bytes_at, budget_bytes)
    low, high = 0, cap + 1
    size = min(start, cap)
    while True:
        use_secant = True
        while high - low > 1:
            if sizes.fits(size):
                low = max(low, size)
            else:
                high = min(high, size)
            size = sizes.propose(low, high, cap, use_secant=use_secant)
            use_secant = not use_secant
        larger = next((probe for probe in _spread(low, min(2 * low, cap), probes) if sizes.fits(probe)), None)
        if larger is None:
            return low
        low, high, size = larger, cap + 1, min(larger + 1, cap)


class _Sizes:
    """Bytes of the sizes so far."""

    def __init__(self, bytes_at: Callable[[int], float], budget_bytes: int) -> None:
        self._bytes_at, self._budget_bytes = bytes_at, budget_bytes
        self._bytes: dict[int, float] = {}

    def fits(self, size: int) -> bool:
        if size not in self._bytes:
            self._bytes[size] = self._bytes_at(size)
        return self._bytes[size] <= self._budget_bytes

    def propose(self, low: int, high: int, cap: int, *, use_secant: bool) -> int:
        """Return a size between `low`, which fits, and `high`, which does not."""
        if high > cap:
            limit = min(cap, GROWTH * max(low, 1))
            return min(max(self._secant(low) or 2 * low, low + 1), limit)
        middle = (low + high) // 2
        secant = self._secant(low, high) if use_secant else None
        return min(max(middle if secant is None else secant, low + 1), max(high - 1, low + 1))

    def _secant(self, low: int, high: int | None = None) -> int | None:
        """Return the size at which a line through two sizes meets the budget; None where there is no such line."""
        ordered = sorted(size for size in self._bytes if size <= low or size == high)
        if len(ordered) < 2:
            return None
        first, second = ordered[-2:]
        rise = self._bytes[second] - self._bytes[first]
        if not 0 < rise < float("inf"):
            return None
        return first + int((self._budget_bytes - self._bytes[first]) * (second - first) / rise)


def _spread(low: int, high: int, count: int) -> list[int]:
    """Return at most `count` sizes in (low, high], largest first; all of them where there are no more.

    >>> _spread(4, 8, 9), _spread(10, 20, 2)
    ([8, 7, 6, 5], [20, 15])
    """
    if high - low <= count:
        return list(range(high, low, -1))
    return [high - (high - low) * step // count for step in range(count)]
