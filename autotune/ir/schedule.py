"""A plan as the instructions that it becomes; the simulator and the executor walk the same list."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import PlanError
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op; it reads the latest run of each input."""

    op: int
    takes: int | None = None
    """Value whose buffer is the output's; it is gone afterwards, without a `Free`. An input is overwritten there; what the
    op is given is taken as it is."""


@dataclass(frozen=True, slots=True)
class Free:
    """Give a value's memory back; if it is being offloaded, wait for the write first."""

    value: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to write a value to the store; its memory stays until `Free`."""

    value: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Take memory for a value and begin to read it back; its next reader waits for the read."""

    value: int


Instruction = Run | Free | Offload | Prefetch


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions of one step, and the store that they talk to."""

    instructions: tuple[Instruction, ...]
    store: str = ""


def layer_runs(graph: TrainGraph, order: tuple[int, ...]) -> list[int]:
    """Per position of `order` the number of its layer: a maximal run of ops of one layer."""
    numbers: list[int] = []
    for position, op in enumerate(order):
        same = position > 0 and graph.ops[op].layer == graph.ops[order[position - 1]].layer
        numbers.append(numbers[-1] + (not same) if numbers else 0)
    return numbers


def away(save_layer: int, load_layer: int, window: int) -> bool:
    """Whether a value last used in one layer and next in another leaves memory at all in between.

    It is saved beside the `window` layers after its own, and loaded beside the layer `window` before its reader; between
    the two at least one layer must run.
    """
    return load_layer - window > save_layer + window + 1


def around(layers: Sequence[int], happened: Sequence[tuple[int, bool]], gap: int) -> tuple[int, int]:
    """Layers of the events on both sides of a gap; -1 is where the step begins."""
    return layers[happened[gap][0]] if gap >= 0 else -1, layers[happened[gap + 1][0]]


def handed_over(graph: TrainGraph, order: Sequence[int]) -> dict[int, int]:
    """Per position of an op that computes nothing there the value that it takes, which the op before it just made."""
    found = {}
    for position, (before, op) in enumerate(itertools.pairwise(order), 1):
        given = graph.ops[op].given
        if given is not None and graph.producer[given] == before:
            found[position] = given
    return found


def lower(graph: TrainGraph, plan: Plan) -> Schedule:
    """Make the instructions of a plan: free at last use, save beside the next `window` layers, load so many ahead.

    A swap may add layers to either.
    """
    order = plan.order
    layers = layer_runs(graph, order)
    first = {layer: position for position, layer in reversed(list(enumerate(layers)))}
    last = {layer: position for position, layer in enumerate(layers)}
    before: dict[int, list[tuple[int, Instruction]]] = {}
    after: dict[int, list[Instruction]] = {}
    takes = handed_over(graph, order) | {made.position: made.value for made in plan.inplace}
    swaps: dict[int, dict[int, Swap]] = {}
    for swap in plan.offload:
        swaps.setdefault(swap.value, {})[swap.gap] = swap

    late_frees: dict[int, list[Instruction]] = {}
    instructions: list[Instruction] = []
    for value_id, happened in enumerate(events(graph, order)):
        gone = swaps.get(value_id, {})
        for gap in sorted(gone.keys() & set(range(-1, len(happened) - 1))):
            save, load = around(layers, happened, gap)
            save, load = save + gone[gap].late, load - gone[gap].early
            if not away(save, load, plan.window):
                name = graph.values[value_id].name
                raise PlanError(
                    f"{name} returns inside the window of {plan.window} layers: offloading it saves nothing"
                )
            begun = after.setdefault(happened[gap][0], []) if gap >= 0 else instructions
            begun.append(Offload(value_id))
            late_frees.setdefault(last[save + plan.window], []).append(Free(value_id))
            before.setdefault(first[load - plan.window], []).append((happened[gap + 1][0], Prefetch(value_id)))
        for gap, (position, _) in enumerate(happened):
            following = happened[gap + 1] if gap + 1 < len(happened) else None
            stays = value_id in graph.static or (following is None and value_id in graph.outputs)
            if stays or (gap in gone and following is not None):
                continue
            taken = value_id in (takes.get(position), takes.get(position + 1))
            if (following is None or following[1]) and not taken:
                after.setdefault(position, []).append(Free(value_id))

    for position, op in enumerate(order):
        prefetches = sorted(before.get(position, ()), key=lambda item: item[0])
        instructions.extend(prefetch for _, prefetch in prefetches)
        instructions.append(Run(op, takes.get(position)))
        # a write is begun before anything is waited for
        instructions.extend(sorted(after.get(position, ()), key=lambda made: isinstance(made, Free)))
        instructions.extend(late_frees.get(position, ()))
    return Schedule(tuple(instructions), plan.store if plan.offload else "")
