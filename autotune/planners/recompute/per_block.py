"""Recompute every repeated block from its inputs, as `torch.utils.checkpoint` around each block does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Int, Knob
from autotune.planners.recompute.segments import choose_replay, replay_segments

MAX_DEPTH = 4
"""Maximum number of numbers in a block's name."""


@dataclass(frozen=True, slots=True)
class PerBlock:
    """Planner that recomputes every block at the first gradient that reads from it; dropout masks are kept.

    A block is a numbered layer name with siblings. `encoder.layer.0` has depth 1, `stages.0.layers.1` depth 2. The plan
    is unchanged if the step has no such names, fits already, or would have a higher peak.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"depth": Int(0, MAX_DEPTH)}
    depth: int = 0
    """Number of numbers in a block's name; 0 for the depth with the lowest peak."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with every repeated block of the forward recomputed."""
        depths = [self.depth] if self.depth else range(1, MAX_DEPTH + 1)
        alternatives = (group_by_block(graph, plan.order, depth).values() for depth in depths)
        return choose_replay(graph, plan, budget_bytes, costs, alternatives)


def checkpoint_blocks(graph: TrainGraph, plan: Plan, depth: int) -> Plan:
    """Return the plan with every block at this depth recomputed."""
    return replay_segments(graph, plan, group_by_block(graph, plan.order, depth).values())


def group_by_block(graph: TrainGraph, order: tuple[int, ...], depth: int) -> dict[str, list[int]]:
    """Return the forward ops of each block by its name, in running order; a block without siblings is left out."""
    blocks: dict[str, list[int]] = {}
    for op_id in order:
        op = graph.ops[op_id]
        name = _block_name(op.layer, depth)
        if op.phase is Phase.FORWARD and name:
            blocks.setdefault(name, []).append(op_id)
    siblings: dict[str, int] = {}
    for name in blocks:
        parent = name.rpartition(".")[0]
        siblings[parent] = siblings.get(parent, 0) + 1
    return {name: ops for name, ops in blocks.items() if siblings[name.rpartition(".")[0]] > 1}


def _block_name(layer: str, depth: int) -> str:
    """Return the part of a layer's path up to its `depth`-th number; empty if it has fewer."""
    parts = layer.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[depth - 1] + 1]) if len(numbered) >= depth else ""
