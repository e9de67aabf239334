"""The buffers of a plan, as its schedule makes and frees them, and the layout that an arena would give them."""

from dataclasses import dataclass, replace

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Offload, Prefetch, Run, lower
from autotune.layout import WORK, Buffers, Layout, lay_out
from autotune.predict.simulate import Estimate


@dataclass(frozen=True, slots=True)
class Tenant:
    """What lies in a buffer: the value that it was made for, or an op's workspace."""

    name: str
    size: int
    born: int
    died: int


def tenants(graph: TrainGraph, plan: Plan, costs: Costs) -> list[Tenant]:
    """Everything of a step that an arena holds, in the order of birth; moments are twice the instruction's position.

    Not the user's own, and nothing that outlives the step: their memory is no part of the block.
    """
    instructions = lower(graph, plan).instructions
    begun: dict[int, tuple[str, int, int]] = {}  # value -> name, size and birth of the buffer that it lies in
    made: list[Tenant] = []

    def end(value: int, moment: int) -> None:
        if value in begun:
            made.append(Tenant(*begun.pop(value), moment))

    for at, instruction in enumerate(instructions):
        match instruction:
            case Run(op, takes):
                if costs.scratch_bytes[op] > 0:
                    made.append(Tenant(f"{graph.ops[op].name} (scratch)", costs.scratch_bytes[op], 2 * at, 2 * at + 1))
                taken = None if takes is None else begun.pop(takes, None)
                for value in graph.ops[op].outputs:
                    begun[value] = taken or (graph.values[value].name, graph.values[value].nbytes, 2 * at)
            case Prefetch(value) if value not in graph.static:
                begun[value] = (graph.values[value].name, graph.values[value].nbytes, 2 * at)
            case Free(value):
                end(value, 2 * at)
            case Prefetch(_) | Offload(_):
                pass
    for value in begun.keys() - set(graph.outputs):
        end(value, 2 * len(instructions))
    return sorted((one for one in made if one.size), key=lambda one: (one.born, one.died, one.name))


def buffers_of(made: list[Tenant]) -> Buffers:
    """Sizes and lives, as an arena aligns them."""
    return Buffers.of([one.size for one in made], [one.born for one in made], [one.died for one in made])


def layout_of(graph: TrainGraph, plan: Plan, costs: Costs, *, work: int = WORK) -> Layout:
    """The layout of a plan's own buffers."""
    return lay_out(buffers_of(tenants(graph, plan, costs)), work=work)


def with_layout(graph: TrainGraph, plan: Plan, costs: Costs, expected: Estimate) -> Estimate:
    """The estimate of a plan with its layout's bytes, if it runs in an arena."""
    if plan.allocator != "arena" or expected.layout_bytes:
        return expected
    found = layout_of(graph, plan, costs, work=WORK // 2)
    return replace(expected, layout_bytes=found.bytes, layout_live_bytes=found.max_live)
