"""A step that keeps its gradients for the user instead of updating: for clipping, loss scaling and accumulation."""

from collections.abc import Iterator
from dataclasses import replace

from autotune.capture.program import Program, reads
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import around, away, layer_runs


def gradients_kept(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """The program with each update replaced by keeping the gradient in `.grad`, right where the gradient is made."""
    calls = list(program.calls)
    sinks: dict[int, list[int]] = {}
    position = {op: at for at, op in enumerate(plan.order)}
    assert program.updates is not None
    for op in program.graph.ops:
        keep = program.updates.kept(program.calls[op.id].target)
        if keep is None:
            continue
        calls[op.id] = replace(calls[op.id], target=keep)
        needed = [
            position[made]
            for value in reads(calls[op.id].args[2])
            if (made := program.graph.producer[value]) is not None
        ]
        sinks.setdefault(max(needed, default=-1), []).append(op.id)
    moved = {op for ops in sinks.values() for op in ops}
    order = [*sinks.get(-1, ())]
    now_at: dict[int, int] = {}
    for at, op_id in enumerate(plan.order):
        now_at[at] = len(order)
        order += [] if op_id in moved else [op_id]
        order += sinks.get(at, ())
    inplace = tuple(replace(made, position=now_at[made.position]) for made in plan.inplace)
    kept = {value for op in moved for value in program.graph.ops[op].inputs}
    moved_plan = replace(plan, order=tuple(order), inplace=inplace)
    offload = tuple(swap for swap in _still_away(program.graph, moved_plan) if swap.value not in kept)
    return replace(program, calls=tuple(calls)), replace(moved_plan, offload=offload)


def _still_away(graph: TrainGraph, plan: Plan) -> Iterator[Swap]:
    """What leaves memory in the plan's order: without updates between them two runs of a layer may have become one."""
    layers, happened = layer_runs(graph, plan.order), events(graph, plan.order)
    for swap in plan.offload:
        save, load = around(layers, happened[swap.value], swap.gap)
        if away(save + swap.late, load - swap.early, plan.window):
            yield swap
