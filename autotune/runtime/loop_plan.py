"""Transfer a plan between two forms of one step that differ in the training loop around it."""

from collections.abc import Iterator
from dataclasses import replace

from autotune.capture.optimizers.loop_ops import apply_loop
from autotune.capture.optimizers.loop_updates import base_program
from autotune.capture.program import Program
from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.graph_summary import differ_in_batch_only, summarize_graph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import gap_layers, layer_numbers, leaves_memory
from autotune.records.plan_file import PlanFile, describe_other_graph
from autotune.workloads.loop import Loop


def transfer_to_loop(plan: Plan, old: TrainGraph, new: TrainGraph) -> Plan:
    """Return the plan of `old` for `new`, whose ops differ only in the use of the gradients.

    Ops that only `new` has run as soon as their inputs exist, and its updates at the end. Offloads of values that such
    ops read are dropped. Ops are matched by name, values by id.
    """
    new_ids = {op.name: op.id for op in new.ops}
    ids = {op.id: new_ids[op.name] for op in old.ops if _is_same(old, op.id, new, new_ids.get(op.name))}
    added = [op for op in new.ops if op.id not in ids.values()]
    runs_after: dict[int, list[int]] = {}
    positions = {op: position for position, op in reversed(list(enumerate(plan.order)))}  # of the first runs
    old_ids = {new_id: old_id for old_id, new_id in ids.items()}
    for op in (op for op in added if op.phase is not Phase.UPDATE):
        before = [positions[old_ids[other]] for other in new.predecessors[op.id] if other in old_ids]
        runs_after.setdefault(max(before, default=-1), []).append(op.id)
    order = [*runs_after.get(-1, ())]
    new_positions: dict[int, int] = {}
    for position, op_id in enumerate(plan.order):
        new_positions[position] = len(order)
        order += [ids[op_id]] if op_id in ids else []
        order += runs_after.get(position, ())
    order += [op.id for op in added if op.phase is Phase.UPDATE]
    inplace = tuple(replace(choice, position=new_positions[choice.position]) for choice in plan.inplace)
    moved = replace(plan, order=tuple(order), inplace=inplace)
    touched = {value for op in added for value in (*op.inputs, *op.writes)}
    touched |= {value for op in old.ops if op.id not in ids for value in (*op.inputs, *op.writes)}
    return replace(moved, offload=tuple(swap for swap in _possible_swaps(new, moved) if swap.value not in touched))


def fits_graph(graph: TrainGraph, plan: Plan) -> bool:
    """Return True if a plan is valid for a graph."""
    try:
        check(graph, plan)
    except PlanError:
        return False
    return True


def find_planned_form(program: Program, file: PlanFile) -> Program:
    """Return the program itself, or the form of it for another loop that a plan file was made for.

    Raises PlanError where the file is for another graph.
    """
    if file.graph_digest == program.graph.digest:
        return program
    loop = Loop.parse(file.loop)
    other = apply_loop(base_program(program), loop)
    if file.graph_digest == other.graph.digest:
        return other
    graph = program.graph
    raise PlanError(
        f"the plan is for {file.workload} (graph {file.graph_digest[:8]}{f', loop {loop}' if file.loop else ''}); this step is "
        f"another graph ({graph.digest[:8]}): {describe_other_graph(file, graph)}; {_suggest_plan(file, loop, graph)}"
    )


def _suggest_plan(file: PlanFile, loop: Loop, graph: TrainGraph) -> str:
    """Return the next step where a plan is for another graph: a plan with updates is of no use without them, and vice versa."""
    has_updates = any(op.phase is Phase.UPDATE for op in graph.ops)
    plans_updates = not loop.gradients and file.summary is not None and file.summary.ops[Phase.UPDATE.value] > 0
    if plans_updates and not has_updates:
        return "a PlannedLoss takes plans of --loop gradients: make one, or run this plan in a TrainStep"
    if loop.gradients and has_updates:
        return "a TrainStep takes plans without --loop gradients: make one, or run this plan in a PlannedLoss"
    return "check model, batch shape, dtype, optimizer, or tune it"


def is_for_another_batch(file: PlanFile, graph: TrainGraph) -> bool:
    """Return True if a plan file of gradients was made for a batch of another shape, and otherwise for the same step."""
    if file.summary is None or file.graph_digest == graph.digest or not Loop.parse(file.loop).gradients:
        return False
    return differ_in_batch_only(file.summary, summarize_graph(graph))


def _is_same(old: TrainGraph, old_id: int, new: TrainGraph, new_id: int | None) -> bool:
    """Return True if both ops exist and do the same with the same values."""
    if new_id is None:
        return False
    one, other = old.ops[old_id], new.ops[new_id]
    return (one.target, one.signature, one.inputs, one.outputs, one.writes) == (
        other.target,
        other.signature,
        other.inputs,
        other.outputs,
        other.writes,
    )


def _possible_swaps(graph: TrainGraph, plan: Plan) -> Iterator[Swap]:
    """Yield the swaps that the plan's order still allows.

    Without updates between them two runs of a layer may have become one, which leaves no time outside of memory.
    """
    layers, accesses = layer_numbers(graph, plan.order), events(graph, plan.order)
    for swap in plan.offload:
        if swap.value >= len(accesses) or swap.gap + 1 >= len(accesses[swap.value]):
            continue
        save, load = gap_layers(layers, accesses[swap.value], swap.gap)
        if leaves_memory(save + swap.late, load - swap.early, plan.window):
            yield swap
