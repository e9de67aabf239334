"""Change a planned step to keep its gradients instead of updating: for clipping, loss scaling and accumulation."""

from collections.abc import Iterator
from dataclasses import replace

from autotune.capture.program import Program, reads
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import gap_layers, layer_numbers, leaves_memory


def keep_gradients(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """Replace each update by an op that stores the gradient in `.grad`, right after the gradient is computed.

    Offloads of a value that such an op reads are dropped from the plan.
    """
    calls = list(program.calls)
    stores_after: dict[int, list[int]] = {}
    position_of = {op: position for position, op in enumerate(plan.order)}
    assert program.updates is not None
    for op in program.graph.ops:
        store_gradient = program.updates.gradient_keeper(program.calls[op.id].target)
        if store_gradient is None:
            continue
        calls[op.id] = replace(calls[op.id], target=store_gradient)
        inputs = [
            position_of[producer]
            for value in reads(calls[op.id].args[2])
            if (producer := program.graph.producer[value]) is not None
        ]
        stores_after.setdefault(max(inputs, default=-1), []).append(op.id)
    moved = {op for ops in stores_after.values() for op in ops}
    order = [*stores_after.get(-1, ())]
    new_position: dict[int, int] = {}
    for position, op_id in enumerate(plan.order):
        new_position[position] = len(order)
        order += [] if op_id in moved else [op_id]
        order += stores_after.get(position, ())
    inplace = tuple(replace(choice, position=new_position[choice.position]) for choice in plan.inplace)
    kept = {value for op in moved for value in program.graph.ops[op].inputs}
    moved_plan = replace(plan, order=tuple(order), inplace=inplace)
    offload = tuple(swap for swap in _possible_swaps(program.graph, moved_plan) if swap.value not in kept)
    return replace(program, calls=tuple(calls)), replace(moved_plan, offload=offload)


def _possible_swaps(graph: TrainGraph, plan: Plan) -> Iterator[Swap]:
    """Yield the swaps that the plan's order still allows.

    Without updates between them two runs of a layer may have become one, which leaves no time outside of memory.
    """
    layers, accesses = layer_numbers(graph, plan.order), events(graph, plan.order)
    for swap in plan.offload:
        save, load = gap_layers(layers, accesses[swap.value], swap.gap)
        if leaves_memory(save + swap.late, load - swap.early, plan.window):
            yield swap
