import itertools
import random

import pytest

from autotune.errors import PlanError
from autotune.layout import Buffers, Layout, check_layout


def of(*lives, alignment=1):
    return Buffers.from_lives(*zip(*lives, strict=True), alignment=alignment)


def layout(offsets, top):
    return Layout(tuple(offsets), top, 0)


def test_two_that_live_at_once_may_not_share_a_byte():
    with pytest.raises(PlanError, match=r"buffers 0 and 1 both live at 2 and share the bytes 3 to 4"):
        check_layout(of((4, 0, 5), (4, 2, 9)), layout((0, 3), 8))


def test_one_that_lies_within_another_is_seen():
    with pytest.raises(PlanError, match="both live at 1"):
        check_layout(of((10, 0, 9), (2, 1, 3)), layout((0, 4), 10))


def test_nntrainers_overlap_that_its_own_validator_lets_pass_is_refused():
    """V2's rule for weight gradients puts all three of these at 0; it compares sorted positions with raw ones."""
    with pytest.raises(PlanError, match="share the bytes 0 to 5"):
        check_layout(of((8, 20, 23), (5, 18, 21), (5, 2, 4)), layout((0, 0, 0), 8))


def test_one_that_dies_as_another_is_born_may_lie_there():
    check_layout(of((4, 0, 5), (4, 5, 9)), layout((0, 0), 4))


def test_one_above_the_block_is_refused():
    with pytest.raises(PlanError, match="buffer 1 lies at 4 to 8, outside of the 7 bytes"):
        check_layout(of((4, 0, 5), (4, 2, 9)), layout((0, 4), 7))


def test_one_below_the_block_is_refused():
    with pytest.raises(PlanError, match="outside"):
        check_layout(of((4, 0, 5)), layout((-4,), 8))


def test_an_offset_askew_is_refused():
    with pytest.raises(PlanError, match="lies at 32, which is no multiple of 64"):
        check_layout(of((4, 0, 5), alignment=64), layout((32,), 128))


def test_an_offset_too_few_is_refused():
    with pytest.raises(PlanError, match="1 offsets for 2 buffers"):
        check_layout(of((4, 0, 5), (4, 2, 9)), layout((0,), 8))


def test_it_agrees_with_every_pair_compared_on_500_random_layouts():
    draw = random.Random(0)
    verdicts = set()
    for _ in range(500):
        lives = [(draw.randrange(0, 4), born, born + draw.randrange(1, 6)) for born in draw.choices(range(8), k=5)]
        offsets = [draw.randrange(0, 14) for _ in lives]
        clash = any(
            a[1] < b[2] and b[1] < a[2] and x < y + b[0] and y < x + a[0] and a[0] and b[0]
            for (a, x), (b, y) in itertools.combinations(list(zip(lives, offsets, strict=True)), 2)
        )
        try:
            check_layout(of(*lives), layout(offsets, 20))
            refused = False
        except PlanError:
            refused = True
        assert refused == clash
        verdicts.add(clash)
    assert verdicts == {True, False}
