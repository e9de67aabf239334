"""Interleaved timing: blocks of steps alternate with blocks of a baseline, so that both share the machine's pace.

Other jobs of the machine change its pace within minutes. Ratios of steps that ran next to each other hardly change.
"""

import bisect
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import psutil

from autotune.ir.plan import Plan
from autotune.measure.early_stop import MIN_STEPS, cannot_beat
from autotune.measure.machine_counters import MachineCounters, machine_load
from autotune.measure.messages import (
    Ask,
    BeginTiming,
    ChildError,
    Expects,
    FinishTiming,
    ReplyT,
    StopTiming,
    TimeBlock,
    TimedBlock,
    TimedDigestsRequest,
    TimingEnd,
)
from autotune.records.machine_load import MachineLoad
from autotune.records.measurement import Outcome

EAGER = "eager"
"""Name of the variant that all others are compared with."""
BLOCKS_BETWEEN = 2
"""Blocks of other variants between two of eager; each of them has an eager block next to it."""
FREE_MEMORY_FACTOR = 3
"""Free memory that a further process needs, as a multiple of the largest process so far."""
RESERVED_MEMORY = 0.1
"""Share of the machine's memory that stays free: without room for the pages of programs, each block reads them from a disk."""

T = TypeVar("T")


@dataclass
class TimedSide:
    """One side of an interleaved measurement: a process that times blocks of one plan, or of plain eager."""

    ask: Ask
    plan: Plan | None = None
    expected: Mapping[str, str] | None = None
    """Digests of the captured step that the plan's have to equal before it is timed; None to compare nothing."""
    floor_bytes: int = 0
    """Least bytes of the idle process; `begin` raises it to those of its own process."""
    blocks: list[TimedBlock] = field(default_factory=list)
    failure: ChildError | None = None
    """First error of a tolerated action."""

    @property
    def seconds(self) -> list[float]:
        """Time of each step so far."""
        return [seconds for block in self.blocks for seconds in block.seconds]

    def begin(self, *, rests: bool = True) -> None:
        """Make the process ready to be timed; ChildError where the plan computes other bits than expected."""
        self.floor_bytes = max(self.floor_bytes, self.ask(BeginTiming(self.plan, rests)).floor_bytes)
        if self.expected is not None:
            digests = self.ask(TimedDigestsRequest()).digests
            names = [*self.expected, *(name for name in digests if name not in self.expected)]
            if name := next((name for name in names if digests.get(name) != self.expected.get(name)), ""):
                self.stop()
                raise ChildError(Outcome.WRONG_RESULT, f"{name} differs from the captured step's")

    def run_block(self, *, rests: bool = True) -> TimedBlock:
        """Run one block and keep its times; the process returns its memory after it unless `rests` is false."""
        block = self.ask(TimeBlock(rests=rests))
        self.blocks.append(block)
        return block

    def finish(self, *, verify: bool = True) -> TimingEnd:
        """End the timing; `verify` compares steps in an arena with steps on malloc."""
        return self.ask(FinishTiming(verify))

    def stop(self) -> None:
        """End the timing without a measurement of the floor."""
        self.ask(StopTiming())

    def tolerate(self, action: Callable[[], T]) -> T | None:
        """Run an action of this side and record its ChildError; None then, and after an earlier failure."""
        if self.failure is None:
            try:
                return action()
            except ChildError as error:
                self.failure = error
        return None


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """Times of a plan's steps and of the eager steps between them."""

    step_seconds: tuple[float, ...]
    baseline_seconds: tuple[float, ...]
    stall_seconds: float
    """Median time in which a step waited for a store."""
    last_block: TimedBlock
    end: TimingEnd
    stopped_early: bool
    baseline_failure: str | None
    """Reason why eager's process ended before the plan's; None if it did not."""
    eager_blocks: tuple[float, ...] = ()
    """Mean seconds of a step in each of eager's blocks."""
    load: MachineLoad | None = None
    """Load of the machine beside the blocks; None where it was not read."""

    @property
    def time_ratio(self) -> float:
        """Median of a step's time over that of the eager step beside it."""
        pairs = zip(self.step_seconds, self.baseline_seconds, strict=False)
        return statistics.median(step / eager for step, eager in pairs)

    @property
    def step_charged_bytes(self) -> int:
        """Charge of a step above the floor of its process."""
        return self.last_block.charged_bytes - self.end.floor_bytes


def time_beside_eager(
    plan: TimedSide,
    eager: TimedSide | None,
    *,
    samples: int,
    patience_seconds: float,
    beat: float | None = None,
    most_bytes: int | None = None,
    rests: bool = True,
    counters: Callable[[], MachineCounters | None] = lambda: None,
) -> PlanTiming:
    """Alternate blocks of eager and of the plan until there are enough samples, or the plan cannot reach `beat`.

    Each side has a process of its own. In one process the heap that a plan leaves behind made eager's steps on GPT-2 a
    fifth slower. With `rests` a process returns its memory while the other one runs, and its next steps are not
    measured. Without it both keep their memory, a block is one step, and eager's process stays ready for the next plan.
    `beat` is a ratio to eager's time. A plan whose step is charged more than `most_bytes` above the floor is timed no
    longer than one that cannot reach it. After `patience_seconds` no further block begins. `counters` reads the
    machine's load before the first block and after the last one. A failure of eager is recorded, a failure of the plan
    raises ChildError.
    """
    plan.begin(rests=rests)
    if eager is not None:
        eager.tolerate(eager.begin)
    begin, before = time.monotonic(), counters()
    stopped = False
    while not plan.blocks or (
        len(plan.seconds) < samples and time.monotonic() - begin < patience_seconds and not stopped
    ):
        if eager is not None:
            eager.tolerate(partial(eager.run_block, rests=rests))
        block = plan.run_block(rests=rests)
        beside = eager.seconds if eager is not None else []
        stopped = beat is not None and len(plan.seconds) < samples and cannot_beat(plan.seconds, beside, beat)
        is_hopeless = most_bytes is not None and block.charged_bytes - plan.floor_bytes > most_bytes
        if is_hopeless and len(plan.seconds) >= MIN_STEPS:
            break
    load = machine_load(before, counters())
    failure = eager.failure if eager is not None else None
    eager_side = plan if plan.plan is None else eager
    if eager is not None and rests:
        eager.tolerate(eager.stop)
    return PlanTiming(
        step_seconds=tuple(plan.seconds[:samples]),
        baseline_seconds=tuple(eager.seconds[:samples]) if eager is not None else (),
        stall_seconds=statistics.median(stall for block in plan.blocks for stall in block.stalls),
        last_block=plan.blocks[-1],
        end=plan.finish(verify=not stopped and plan.expected is None),
        stopped_early=stopped,
        baseline_failure=failure.detail if failure is not None else None,
        eager_blocks=tuple(statistics.fmean(block.seconds) for block in eager_side.blocks) if eager_side else (),
        load=load,
    )


class TimedProcess(Protocol):
    """A child process, as `autotune.measure.child.Child` is one."""

    def ask(self, request: Expects[ReplyT], seconds: float) -> ReplyT: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessVariant:
    """One way to run the step, in a process of its own."""

    start: Callable[[], TimedProcess]
    plan: Plan | None = None
    """None: run the child's workload without a plan."""
    compiles: bool = False
    verifies: bool = True
    """True to compare the results of an arena with those of malloc at the end. A limit may leave no room for steps on malloc."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Number and duration of rounds."""

    rounds: int
    least_rounds: int
    seconds: float
    """After this time and the least rounds, no further round begins."""
    request_seconds: float
    """Longest time of one request."""


@dataclass
class InterleavedTimes:
    """Times and charges of several variants."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    """Round, variant and seconds of each block, in the order in which they ran."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason of each variant that failed."""
    left_out: list[str] = field(default_factory=list)
    """Variants for which memory or time was short."""
    charged: dict[str, int] = field(default_factory=dict)
    """Charge of a step above the floor, of each variant that did not fail."""


def interleave(
    variants: Mapping[str, ProcessVariant], limits: RoundLimits, log: Callable[[str], None]
) -> InterleavedTimes:
    """Time variants, eager among them, each in a process of its own; blocks alternate while the other processes rest.

    In each round every variant runs a block, in another order, between two blocks of eager. A variant that fails is
    recorded. A variant is left out if free memory is short when it should start. So is one that compiles if half of the
    time has passed.
    """
    begin = time.monotonic()
    times = InterleavedTimes()
    with ExitStack() as stack:
        sides = _start_all(variants, limits, times, stack, log)
        for number in range(limits.rounds):
            if number >= limits.least_rounds and time.monotonic() - begin > limits.seconds:
                break
            log(f"round {number + 1} of {limits.rounds}")
            for name in [*turn_order([name for name in sides if name != EAGER], number), EAGER]:
                if name in sides and (block := _run_block(name, sides, times)) is not None:
                    times.blocks.append({"round": number, "variant": name, "seconds": list(block.seconds)})
        for name, side in sides.items():
            _finish(name, side, times, verify=variants[name].verifies)
    return times


def _start_all(
    variants: Mapping[str, ProcessVariant],
    limits: RoundLimits,
    times: InterleavedTimes,
    stack: ExitStack,
    log: Callable[[str], None],
) -> dict[str, TimedSide]:
    """Start the variants' processes, each with one block that does not count: it may compile."""
    begin, largest_bytes = time.monotonic(), 0
    sides: dict[str, TimedSide] = {}
    for name, variant in variants.items():
        late = variant.compiles and time.monotonic() - begin > limits.seconds / 2
        if name != EAGER and (late or _is_memory_short(largest_bytes)):
            times.left_out.append(name)
            continue
        log(f"{name} gets ready")
        child = variant.start()
        stack.callback(child.end)
        side = TimedSide(_with_limit(child, limits.request_seconds), variant.plan)
        try:
            side.begin()
            largest_bytes = max(largest_bytes, side.ask(TimeBlock(counts=False)).charged_bytes)
        except ChildError as error:
            times.failed[name] = error.summary()
        else:
            sides[name] = side
    return sides


def _is_memory_short(largest_bytes: int) -> bool:
    memory = psutil.virtual_memory()
    return memory.available < FREE_MEMORY_FACTOR * largest_bytes + RESERVED_MEMORY * memory.total


def _with_limit(child: TimedProcess, seconds: float) -> Ask:
    def ask(request: Expects[ReplyT], /) -> ReplyT:
        try:
            return child.ask(request, seconds)
        except ChildError:
            child.end()
            raise

    return ask


def _run_block(name: str, sides: dict[str, TimedSide], times: InterleavedTimes) -> TimedBlock | None:
    side = sides[name]
    block = side.tolerate(side.run_block)
    if block is not None:
        times.charged[name] = block.charged_bytes
    elif side.failure is not None:
        times.failed[name] = side.failure.summary()
        times.charged.pop(name, None)  # it includes the floor, which a dead process cannot measure
        del sides[name]
    return block


def _finish(name: str, side: TimedSide, times: InterleavedTimes, *, verify: bool) -> None:
    end = side.tolerate(partial(side.finish, verify=verify))
    if end is not None and not end.mismatch:
        times.charged[name] -= end.floor_bytes
        return
    wrong = f"{Outcome.WRONG_RESULT}: {describe_mismatch(end)}" if end is not None else None
    times.failed[name] = wrong or (side.failure.summary() if side.failure is not None else "")
    times.blocks = [block for block in times.blocks if block["variant"] != name]
    del times.charged[name]


def describe_mismatch(end: TimingEnd) -> str:
    """Describe which result an arena changes."""
    return f"{end.mismatch} differs between arena and malloc"


def turn_order(names: Sequence[str], number: int, *, baseline: str = EAGER, between: int = BLOCKS_BETWEEN) -> list[str]:
    """Return the order of one round: names shuffled by the round's number, with the baseline before every `between`.

    >>> turn_order(["a"], 0)
    ['eager', 'a']
    """
    shuffled = random.Random(number).sample(names, len(names))
    parts = [[baseline, *shuffled[first : first + between]] for first in range(0, len(shuffled), between)]
    return list(itertools.chain(*parts))


def pair_with_baseline(
    blocks: Sequence[tuple[str, list[float]]], variant: str, *, baseline: str = EAGER
) -> list[tuple[list[float], list[float]]]:
    """Pair the seconds of each block of a variant with those of the baseline's blocks right before and after it."""
    positions = [index for index, (name, _) in enumerate(blocks) if name == baseline]
    pairs = []
    for index, (name, seconds) in enumerate(blocks):
        if name == variant and positions:
            after = bisect.bisect(positions, index)
            near = [index] if name == baseline else positions[max(0, after - 1) : after + 1]
            pairs.append((seconds, [value for position in near for value in blocks[position][1]]))
    return pairs


def ratios_to_baseline(pairs: Sequence[tuple[list[float], list[float]]]) -> list[float]:
    """Return the median of each block over the median of the baseline next to it."""
    return [statistics.median(seconds) / statistics.median(baseline) for seconds, baseline in pairs]
