"""Who runs beside whom, what is told of it, and what becomes of a variant that dies or has no room."""

import argparse
import sys
from functools import partial
from typing import Any

import pytest

from autotune.measure.messages import Failed
from autotune.records.measurement import Outcome
from tests.experiments.scripts import EXPERIMENTS, script

sys.path.insert(0, str(EXPERIMENTS))
turns = script("turns.py")


def test_eager_has_a_turn_before_and_after_every_two():
    order = turns.turns(list("abcde"), 0)
    assert sorted(order) == sorted([*"abcde", *["eager"] * 4])
    assert [at for at, name in enumerate(order) if name == "eager"] == [0, 3, 6, 8]
    assert turns.turns(list("abcde"), 1) != order


def test_a_block_is_compared_with_eager_in_the_same_minutes():
    # the machine is half as fast for a while, in which eager had one block of three
    seen = [("eager", 1.0), ("a", 0.9), ("eager", 1.0), ("a", 1.8), ("eager", 2.0), ("a", 1.8)]
    pairs = turns.beside([(name, [took, took]) for name, took in seen], "a")
    assert [eager for _, eager in pairs] == [[1.0] * 4, [1.0, 1.0, 2.0, 2.0], [2.0, 2.0]]
    assert turns.ratios(pairs) == pytest.approx([0.9, 1.2, 0.9])


def test_an_interval_holds_the_median_and_one_outlier_does_not_move_its_ends():
    assert turns.interval([1.0, 1.02, 1.01, 1.0]) == pytest.approx((1.0, 1.02))
    low, high = turns.interval([0.9] * 8 + [0.92] * 8 + [9.0])
    assert (low, high) == pytest.approx((0.9, 0.92))


class Scripted:
    """A child that answers so many questions for a block and dies at the next."""

    def __init__(self, blocks: int, differs: str = "") -> None:
        self.blocks, self.differs = blocks, differs

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if request["do"] == "block":
            self.blocks -= 1
        if request["do"] == "finish" and self.differs:
            return {"outcome": Outcome.WRONG_RESULT, "detail": self.differs}
        if self.blocks < 0:
            raise Failed(Outcome.CRASHED, "gone")
        return {"seconds": [1.0], "charged_bytes": 100, "floor_bytes": 40}

    def end(self) -> None:
        pass


def in_turns(blocks: dict[str, int], rounds: int) -> dict[str, Any]:
    variants = {name: turns.Variant(partial(Scripted, number)) for name, number in blocks.items()}
    return turns.in_turns(variants, turns.How(rounds, rounds, seconds=60.0, limit=1.0), lambda _: None)


def test_a_variant_that_dies_in_a_later_round_has_a_reason_and_no_charge():
    found = in_turns({"eager": 99, "checkpoint": 99, "selective": 2}, 3)
    assert found["charged"] == {"eager": 60, "checkpoint": 60}
    assert list(found["failed"]) == ["selective"]
    assert [block["round"] for block in found["blocks"] if block["variant"] == "selective"] == [0]


def test_a_plan_that_computes_something_else_in_its_arena_is_not_counted():
    variants = {name: turns.Variant(partial(Scripted, 9, differs)) for name, differs in (("eager", ""), ("a", "loss"))}
    found = turns.in_turns(variants, turns.How(1, 1, seconds=60.0, limit=1.0), lambda _: None)
    assert ("a" in found["charged"], found["failed"]) == (False, {"a": "wrong_result: loss"})
    assert {block["variant"] for block in found["blocks"]} == {"eager"}


def test_a_variant_that_memory_is_short_for_is_left_for_another_session(monkeypatch: pytest.MonkeyPatch):
    free = iter([1000, 300, 299])
    monkeypatch.setattr(turns.psutil, "virtual_memory", lambda: argparse.Namespace(available=next(free)))
    found = in_turns(dict.fromkeys(["eager", "a", "b", "c"], 99), 1)
    assert found["left_out"] == ["c"]
    assert {block["variant"] for block in found["blocks"]} == {"eager", "a", "b"}
