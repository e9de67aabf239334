"""Buffers of a plan, as its schedule creates and frees them, and the layout that an arena would give them."""

from dataclasses import dataclass, replace

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lives, lower
from autotune.layout import WORK, Buffers, Layout, lay_out
from autotune.predict.reserved_bytes import replay_allocations
from autotune.predict.simulate import Estimate


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """One buffer of a step: memory of a value, or the scratch memory of an op."""

    name: str
    size: int
    """Bytes."""
    born: int
    died: int
    """End of its life, exclusive; both moments are twice an instruction's position."""


def plan_buffers(graph: TrainGraph, plan: Plan, costs: Costs) -> list[PlanBuffer]:
    """Return the buffers of a step that an arena holds, in order of birth.

    Graph inputs and values that outlive the step are left out: their memory lies outside the arena's block.
    """
    schedule = lower(graph, plan)
    begun: dict[int, tuple[str, int, int]] = {}  # value -> name, size and birth of the buffer that holds it
    buffers: list[PlanBuffer] = []
    for position, (instruction, begins, ends) in enumerate(lives(graph, schedule)):
        moment, reused = 2 * position, None
        if isinstance(instruction, Run):
            scratch = costs.scratch_bytes[instruction.op]
            if scratch > 0:
                name = f"{graph.ops[instruction.op].name} (scratch)"
                buffers.append(PlanBuffer(name, scratch, moment, moment + 1))
            reused = begun.pop(ends[0], None) if ends else None
            size = graph.values[ends[0]].nbytes if ends else -1
        else:
            buffers += [PlanBuffer(*begun.pop(value), moment) for value in ends if value in begun]
        for value in begins:
            if value in graph.static:
                continue
            begun[value] = (graph.values[value].name, graph.values[value].nbytes, moment)
            if reused is not None and graph.values[value].nbytes == size:
                begun[value], reused = reused, None
    end = 2 * len(schedule.instructions)
    buffers += [PlanBuffer(*begun[value], end) for value in begun.keys() - set(graph.outputs)]
    return sorted(
        (buffer for buffer in buffers if buffer.size), key=lambda buffer: (buffer.born, buffer.died, buffer.name)
    )


def to_buffers(buffers: list[PlanBuffer]) -> Buffers:
    """Return sizes and lives as the layout solvers read them, with an arena's alignment."""
    return Buffers.from_lives(
        [buffer.size for buffer in buffers],
        [buffer.born for buffer in buffers],
        [buffer.died for buffer in buffers],
    )


def lay_out_plan(graph: TrainGraph, plan: Plan, costs: Costs, *, work: int = WORK) -> Layout:
    """Return a layout of a plan's buffers in one block. `work` limits the search, as in `lay_out`."""
    return lay_out(to_buffers(plan_buffers(graph, plan, costs)), work=work)


def add_layout(graph: TrainGraph, plan: Plan, costs: Costs, expected: Estimate) -> Estimate:
    """Return the estimate of a plan with its layout's bytes if it runs in an arena, on a GPU with those of its allocator."""
    if costs.device_kind == "cuda":
        peaks = replay_allocations(graph, plan, costs)
        return replace(expected, peak_bytes=peaks.allocated_bytes, reserved_bytes=peaks.reserved_bytes)
    if plan.allocator != "arena" or expected.layout_bytes:
        return expected
    layout = lay_out_plan(graph, plan, costs, work=WORK // 2)
    return replace(expected, layout_bytes=layout.bytes, layout_live_bytes=layout.max_live)
