"""Seconds of many variants in turns, each in a process of its own, beside plain eager: what is compared shares its minutes."""

import bisect
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from autotune.measure.child import Child
from autotune.measure.messages import Failed

EAGER = "eager"
BESIDE = 2
"""Blocks of other variants between two of eager: each has one for a neighbour."""
ROOM = 3
"""Times what the largest process so far took, that must be free for another to get ready."""
RESAMPLES = 5_000


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the step."""

    start: Callable[[], Child]
    plan: Any = None
    """A plan's record; None: as the child's workload runs by itself."""
    compiles: bool = False


@dataclass(frozen=True, slots=True)
class How:
    """How often and how long."""

    rounds: int
    least_rounds: int
    seconds: float
    """After the least rounds no other begins."""
    limit: float
    """Seconds for one answer."""


def in_turns(variants: Mapping[str, Variant], how: How, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds and charge of variants, eager among them, each in a process of its own with malloc as it comes.

    In each round every variant runs a block, in another order, with a block of eager before and after every two; the
    processes of the others rest. A variant that fails, or whose turn to get ready comes when memory for the largest of
    them is short or, where it compiles, half of the time is gone, is named and left out.
    """
    began = time.monotonic()
    largest = 0
    found: dict[str, Any] = {"blocks": [], "failed": {}, "left_out": [], "charged": {}}
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, variant in variants.items():
            late = variant.compiles and time.monotonic() - began > how.seconds / 2
            if name != EAGER and (late or psutil.virtual_memory().available < ROOM * largest):
                found["left_out"].append(name)
                continue
            say(f"{name} gets ready")
            child = variant.start()
            stack.callback(child.end)
            try:
                child.ask({"do": "begin", "plan": variant.plan}, how.limit)
                # compiles
                largest = max(largest, child.ask({"do": "block", "counts": False}, how.limit)["charged_bytes"])
            except Failed as failure:
                found["failed"][name] = reason(failure)
                child.end()
            else:
                children[name] = child
        for number in range(how.rounds):
            if number >= how.least_rounds and time.monotonic() - began > how.seconds:
                break
            say(f"round {number + 1} of {how.rounds}")
            for name in turns([name for name in children if name != EAGER], number):
                if name not in children:
                    continue
                try:
                    block = children[name].ask({"do": "block"}, how.limit)
                except Failed as failure:
                    found["failed"][name] = reason(failure)
                    children.pop(name).end()
                    found["charged"].pop(name, None)  # of the whole process: its floor is not told any more
                    continue
                found["blocks"].append({"round": number, "variant": name, "seconds": block["seconds"]})
                found["charged"][name] = block["charged_bytes"]
        for name, child in children.items():
            reply = child.ask({"do": "finish"}, how.limit)
            if "outcome" in reply:
                found["failed"][name] = f"{reply['outcome']}: {reply['detail']}"
                found["blocks"] = [block for block in found["blocks"] if block["variant"] != name]
                del found["charged"][name]
            else:
                found["charged"][name] -= reply["floor_bytes"]
    return found


def turns(names: list[str], number: int) -> list[str]:
    """In an order of this round's own, eager before, between and after them."""
    shuffled = random.Random(number).sample(names, len(names))
    parts = [[EAGER, *shuffled[at : at + BESIDE]] for at in range(0, len(shuffled), BESIDE)]
    return [*itertools.chain(*parts), EAGER]


def beside(blocks: Sequence[tuple[str, list[float]]], variant: str) -> list[tuple[list[float], list[float]]]:
    """Each block of a variant, and the blocks of eager next to it in time, before it and after it: other jobs of the
    machine come and go, and what they take from one they take from its neighbours."""
    eager = [at for at, (name, _) in enumerate(blocks) if name == EAGER]
    found = []
    for at, (name, seconds) in enumerate(blocks):
        if name == variant and eager:
            after = bisect.bisect(eager, at)
            near = [at] if name == EAGER else eager[max(0, after - 1) : after + 1]
            found.append((seconds, [one for place in near for one in blocks[place][1]]))
    return found


def ratios(pairs: Sequence[tuple[list[float], list[float]]]) -> list[float]:
    """Of each block's median to that of the eager beside it."""
    return [statistics.median(mine) / statistics.median(eager) for mine, eager in pairs]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of their median: they are drawn with replacement."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def reason(failure: Failed) -> str:
    """In one line, without this machine's paths."""
    said = failure.detail if failure.ours() else f"{failure.outcome}: {failure.detail}"
    return said.splitlines()[0].replace(f"{Path(__file__).parent}/", "")
