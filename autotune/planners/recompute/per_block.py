"""Keep what enters each repeated block and compute the rest of it again: torch.utils.checkpoint around every block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Int, Knob
from autotune.planners.recompute.segments import lowest_replay, replayed

DEEPEST = 4


@dataclass(frozen=True, slots=True)
class PerBlock:
    """Every block runs again at the first gradient that reads into it; masks of dropout are kept.

    Blocks are told by numbered names that have sisters: `encoder.layer.0` lies one number deep, `stages.0.layers.1`
    two. A step without such names, and one that fits already or would grow, stays as it is.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"depth": Int(0, DEEPEST)}
    depth: int = 0
    """Numbers in a block's name; 0 takes the depth with the lowest peak."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with every repeated block of the forward computed again."""
        depths = [self.depth] if self.depth else range(1, DEEPEST + 1)
        ways = (named_blocks(graph, plan.order, depth).values() for depth in depths)
        return lowest_replay(graph, plan, budget_bytes, costs, ways)


def checkpointed(graph: TrainGraph, plan: Plan, depth: int) -> Plan:
    """The plan with every block that lies so deep computed again."""
    return replayed(graph, plan, named_blocks(graph, plan.order, depth).values())


def named_blocks(graph: TrainGraph, order: tuple[int, ...], depth: int) -> dict[str, list[int]]:
    """Forward ops by the block that they belong to, in the order in which they run; blocks without a sister left out."""
    found: dict[str, list[int]] = {}
    for op_id in order:
        op = graph.ops[op_id]
        name = _block(op.layer, depth)
        if op.phase is Phase.FORWARD and name:
            found.setdefault(name, []).append(op_id)
    sisters: dict[str, int] = {}
    for name in found:
        parent = name.rpartition(".")[0]
        sisters[parent] = sisters.get(parent, 0) + 1
    return {name: ops for name, ops in found.items() if sisters[name.rpartition(".")[0]] > 1}


def _block(layer: str, depth: int) -> str:
    """The part of a layer's path that ends with its `depth`-th number; empty if it has fewer."""
    parts = layer.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[depth - 1] + 1]) if len(numbered) >= depth else ""
