"""The order of blocks, their pairs with eager's, and variants that die or have no room."""

import argparse
from functools import partial
from typing import Any

import pytest

from autotune.measure import interleaving
from autotune.measure.interleaving import (
    EAGER,
    InterleavedTimes,
    ProcessVariant,
    RoundLimits,
    interleave,
    pair_with_baseline,
    ratios_to_baseline,
    turn_order,
)
from autotune.measure.messages import ChildError, FinishTiming, TimeBlock, TimedBlock, TimingBegin, TimingEnd
from autotune.records.measurement import Outcome


def test_eager_has_a_turn_before_every_two():
    order = turn_order("abcde", 0)
    assert sorted(order) == sorted([*"abcde", *[EAGER] * 3])
    assert [at for at, name in enumerate(order) if name == EAGER] == [0, 3, 6]
    assert turn_order("abcde", 1) != order


def test_every_block_has_eagers_before_and_after_it_within_two():
    names = [block["variant"] for block in times(dict.fromkeys([EAGER, *"abcde"], 99), 1).blocks]
    assert sorted(names) == sorted([*"abcde", *[EAGER] * 4])
    assert [at for at, name in enumerate(names) if name == EAGER] == [0, 3, 6, 8]


def test_a_block_is_compared_with_eager_in_the_same_minutes():
    # the machine is half as fast for a while, in which eager had one block of three
    blocks = [("eager", 1.0), ("a", 0.9), ("eager", 1.0), ("a", 1.8), ("eager", 2.0), ("a", 1.8)]
    pairs = pair_with_baseline([(name, [seconds, seconds]) for name, seconds in blocks], "a")
    assert [eager for _, eager in pairs] == [[1.0] * 4, [1.0, 1.0, 2.0, 2.0], [2.0, 2.0]]
    assert ratios_to_baseline(pairs) == pytest.approx([0.9, 1.2, 0.9])


class Scripted:
    """A child that answers so many requests for a block and dies at the next, or where its arena is compared."""

    def __init__(self, blocks: int, mismatch: str = "", *, room_to_verify: bool = True) -> None:
        self.blocks, self.mismatch, self.room_to_verify = blocks, mismatch, room_to_verify

    def ask(self, request: Any, seconds: float) -> Any:
        if isinstance(request, TimeBlock):
            self.blocks -= 1
        if self.blocks < 0:
            raise ChildError(Outcome.CRASHED, "gone")
        match request:
            case TimeBlock():
                return TimedBlock((1.0,), (0.0,), (0,), 0, None, charged_bytes=100, meter="fake")
            case FinishTiming(verify):
                if verify and not self.room_to_verify:
                    raise ChildError(Outcome.OUT_OF_MEMORY, "over its limit")
                return TimingEnd(40, self.mismatch)
        return TimingBegin()

    def end(self) -> None:
        pass


def times(blocks: dict[str, int], rounds: int) -> InterleavedTimes:
    variants = {name: ProcessVariant(partial(Scripted, number)) for name, number in blocks.items()}
    return interleave(variants, RoundLimits(rounds, rounds, seconds=60.0, request_seconds=1.0), lambda _: None)


def test_a_variant_that_dies_in_a_later_round_has_a_reason_and_no_charge():
    result = times({EAGER: 99, "checkpoint": 99, "selective": 2}, 3)
    assert result.charged == {EAGER: 60, "checkpoint": 60}
    assert list(result.failed) == ["selective"]
    assert [block["round"] for block in result.blocks if block["variant"] == "selective"] == [0]


def test_a_plan_that_computes_something_else_in_its_arena_is_not_counted():
    variants = {name: ProcessVariant(partial(Scripted, 9, differs)) for name, differs in ((EAGER, ""), ("a", "loss"))}
    result = interleave(variants, RoundLimits(1, 1, seconds=60.0, request_seconds=1.0), lambda _: None)
    assert "a" not in result.charged
    assert result.failed == {"a": "wrong_result: loss differs between arena and malloc"}
    assert {block["variant"] for block in result.blocks} == {EAGER}


@pytest.mark.parametrize("verifies", [False, True])
def test_a_variant_without_room_for_a_step_on_malloc_counts_only_where_it_is_not_verified(verifies: bool):
    limited = ProcessVariant(partial(Scripted, 9, room_to_verify=False), verifies=verifies)
    variants = {EAGER: ProcessVariant(partial(Scripted, 9)), "limited": limited}
    result = interleave(variants, RoundLimits(1, 1, seconds=60.0, request_seconds=1.0), lambda _: None)
    assert result.failed == ({"limited": "out_of_memory: over its limit"} if verifies else {})
    counted = {EAGER} if verifies else {EAGER, "limited"}
    assert result.charged.keys() == {block["variant"] for block in result.blocks} == counted


def test_a_variant_that_memory_is_short_for_is_left_for_another_session(monkeypatch: pytest.MonkeyPatch):
    free = iter([1000, 500, 499])
    memory = lambda: argparse.Namespace(available=next(free), total=2000)  # noqa: E731
    monkeypatch.setattr(interleaving.psutil, "virtual_memory", memory)
    result = times(dict.fromkeys([EAGER, "a", "b", "c"], 99), 1)
    assert result.left_out == ["c"]
    assert {block["variant"] for block in result.blocks} == {EAGER, "a", "b"}
