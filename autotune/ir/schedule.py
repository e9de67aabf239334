"""Schedules: the instructions that a plan is lowered to. The simulator and the executor read the same list."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.errors import PlanError
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op on the latest run of each input."""

    op: int
    reuses_buffer_of: int | None = None
    """Value whose buffer becomes the output's. The value is dead afterwards, without a `Free`.

    An input is overwritten in place; the op's `alias_of` becomes the output unchanged.
    """


@dataclass(frozen=True, slots=True)
class Free:
    """Free a value's memory, after its write if it is being offloaded."""

    value: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Start to write a value to the store. Its memory stays until `Free`."""

    value: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Allocate memory for a value and start to read it back. Its next reader waits for the read."""

    value: int


Instruction = Run | Free | Offload | Prefetch


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions of one step, and the name of the store that they use."""

    instructions: tuple[Instruction, ...]
    store: str = ""


def layer_numbers(graph: TrainGraph, order: tuple[int, ...]) -> list[int]:
    """Return per position of `order` the number of its layer.

    A layer here is a maximal run of consecutive ops of one module.
    """
    numbers: list[int] = []
    for position, op in enumerate(order):
        same = position > 0 and graph.ops[op].layer == graph.ops[order[position - 1]].layer
        numbers.append(numbers[-1] + (not same) if numbers else 0)
    return numbers


def leaves_memory(save_layer: int, load_layer: int, window: int) -> bool:
    """Return True if a value, last used in one layer and next used in another, leaves memory in between.

    The value is written during the `window` layers after its own, and read back from `window` layers before its reader.
    At least one layer must run between the two.
    """
    return load_layer - window > save_layer + window + 1


def gap_layers(layers: Sequence[int], value_events: Sequence[tuple[int, bool]], gap: int) -> tuple[int, int]:
    """Return the layers of the events on both sides of a gap; -1 is the start of the step."""
    return layers[value_events[gap][0]] if gap >= 0 else -1, layers[value_events[gap + 1][0]]


def aliased_runs(graph: TrainGraph, order: Sequence[int]) -> dict[int, int]:
    """Return {position: value} of the runs that compute nothing: the run before creates the value they are an alias of."""
    aliased = {}
    for position, (before, op) in enumerate(itertools.pairwise(order), 1):
        alias = graph.ops[op].alias_of
        if alias is not None and graph.producer[alias] == before:
            aliased[position] = alias
    return aliased


def lower(graph: TrainGraph, plan: Plan) -> Schedule:
    """Lower a plan to its instructions.

    Values are freed at their last use. An offloaded value is written during the `window` layers after its own and
    prefetched as many layers ahead of its reader; a swap may add layers to either.

    Raises:
        PlanError: An offloaded value would return within the window, so that its memory is never free.

    >>> from autotune.testing.graphs import chain
    >>> lower(chain(2), Plan((0, 1))).instructions
    (Run(op=0, reuses_buffer_of=None), Run(op=1, reuses_buffer_of=None), Free(value=0))
    """
    order = plan.order
    layers = layer_numbers(graph, order)
    first = {layer: position for position, layer in reversed(list(enumerate(layers)))}
    last = {layer: position for position, layer in enumerate(layers)}
    before: dict[int, list[tuple[int, Instruction]]] = {}
    after: dict[int, list[Instruction]] = {}
    reused = aliased_runs(graph, order) | {reuse.position: reuse.value for reuse in plan.inplace}
    swaps: dict[int, dict[int, Swap]] = {}
    for swap in plan.offload:
        swaps.setdefault(swap.value, {})[swap.gap] = swap

    late_frees: dict[int, list[Instruction]] = {}
    instructions: list[Instruction] = []
    for value, value_events in enumerate(events(graph, order)):
        value_swaps = swaps.get(value, {})
        for gap in sorted(value_swaps.keys() & set(range(-1, len(value_events) - 1))):
            save, load = gap_layers(layers, value_events, gap)
            save, load = save + value_swaps[gap].late, load - value_swaps[gap].early
            if not leaves_memory(save, load, plan.window):
                raise PlanError(
                    f"{graph.values[value].name} returns inside the window of {plan.window} layers: "
                    f"offloading it saves nothing"
                )
            writes = after.setdefault(value_events[gap][0], []) if gap >= 0 else instructions
            writes.append(Offload(value))
            late_frees.setdefault(last[save + plan.window], []).append(Free(value))
            before.setdefault(first[load - plan.window], []).append((value_events[gap + 1][0], Prefetch(value)))
        for gap, (position, _) in enumerate(value_events):
            following = value_events[gap + 1] if gap + 1 < len(value_events) else None
            stays = value in graph.static or (following is None and value in graph.outputs)
            if stays or (gap in value_swaps and following is not None):
                continue
            buffer_is_reused = value in (reused.get(position), reused.get(position + 1))
            if (following is None or following[1]) and not buffer_is_reused:
                after.setdefault(position, []).append(Free(value))

    for position, op in enumerate(order):
        prefetches = sorted(before.get(position, ()), key=lambda item: item[0])
        instructions.extend(prefetch for _, prefetch in prefetches)
        instructions.append(Run(op, reused.get(position)))
        # writes start before anything waits
        instructions.extend(sorted(after.get(position, ()), key=lambda instruction: isinstance(instruction, Free)))
        instructions.extend(late_frees.get(position, ()))
    return Schedule(tuple(instructions), plan.store if plan.offload else "")


def lives(graph: TrainGraph, schedule: Schedule) -> Iterator[tuple[Instruction, tuple[int, ...], tuple[int, ...]]]:
    """Yield each instruction with the values that become live in it and the values that die in it.

    Every count of live bytes reads this generator. The graph's inputs are live before the first instruction. A value
    whose buffer a `Run` reuses dies when the run begins; a freed value is live until its `Free` ends. The items are
    plain tuples because planners count bytes thousands of times.

    >>> from autotune.testing.graphs import chain
    >>> [(begins, ends) for _, begins, ends in lives(chain(2), lower(chain(2), Plan((0, 1))))]
    [((0,), ()), ((1,), ()), ((), (0,))]
    """
    outputs = [op.outputs for op in graph.ops]
    for instruction in schedule.instructions:
        match instruction:
            case Run(op, reused):
                yield instruction, outputs[op], () if reused is None else (reused,)
            case Free(value):
                yield instruction, (), (value,)
            case Prefetch(value):
                yield instruction, (value,), ()
            case Offload(_):
                yield instruction, (), ()
