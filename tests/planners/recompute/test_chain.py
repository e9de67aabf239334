import random
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.planners.recompute.chain import BlockChoice, choose_cheapest, find_lowest_limit


def chains(length: int, choices: Sequence[BlockChoice], first: int = 0) -> Iterator[tuple[int, ...]]:
    """Every way to cover blocks `first` to `length`."""
    if first == length:
        yield ()
    for index, made in enumerate(choices):
        if made.first == first and first + made.count <= length:
            yield from ((index, *rest) for rest in chains(length, choices, first + made.count))


def peak(choices: Sequence[BlockChoice], chosen: Sequence[int]) -> int:
    saved, highest = 0, -(10**9)
    for made in map(choices.__getitem__, chosen):
        highest = max(highest, made.peak_bytes - saved)
        saved += made.saved_bytes
    return highest


def seconds(choices: Sequence[BlockChoice], chosen: Sequence[int]) -> float:
    return sum(choices[index].seconds for index in chosen)


def task(rng: random.Random) -> tuple[int, list[BlockChoice]]:
    length = rng.randint(1, 5)
    choices = []
    for first in range(length):
        choices.append(BlockChoice(first, 1, 0, rng.randint(10, 40), 0.0))
        for _ in range(rng.randint(0, 3)):
            count = rng.choice([1, 1, 1, 2, 3])
            choices.append(
                BlockChoice(first, count, rng.randint(-3, 12), rng.randint(8, 40), float(rng.choice([1, 2, 3, 5])))
            )
    rng.shuffle(choices)
    return length, choices


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_no_chain_under_the_limit_is_cheaper_and_none_is_missed(seed: int):
    length, choices = task(rng := random.Random(seed))
    limit = rng.randint(5, 40)
    fitting = [chosen for chosen in chains(length, choices) if peak(choices, chosen) <= limit]
    made = choose_cheapest(length, choices, limit)
    assert (made is None) == (not fitting)
    if made is not None:
        assert made in fitting
        assert seconds(choices, made) == min(seconds(choices, chosen) for chosen in fitting)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_the_lowest_limit_is_the_lowest_peak_of_any_chain(seed: int):
    length, choices = task(random.Random(seed))
    every = [peak(choices, chosen) for chosen in chains(length, choices)]
    assert find_lowest_limit(length, choices, max(every), 0) == min(every)


def test_options_that_only_keep_more_make_no_table_of_bytes():
    choices = [BlockChoice(0, 1, 0, 100, 0.0), BlockChoice(0, 1, -(10**9), 50, 1.0)]
    assert choose_cheapest(1, choices, 60) == (1,)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_chain_of_many_bytes_never_needs_more_than_the_limit(seed: int):
    """Bytes are counted in steps: what is rounded is on the safe side."""
    length, choices = task(rng := random.Random(seed))
    scale = rng.randint(10**6, 10**9)
    large = [
        BlockChoice(c.first, c.count, c.saved_bytes * scale + rng.randint(0, scale), c.peak_bytes * scale, c.seconds)
        for c in choices
    ]
    limit = rng.randint(5, 40) * scale
    made = choose_cheapest(length, large, limit)
    if made is not None:
        assert peak(large, made) <= limit
