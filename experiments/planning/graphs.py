"""The graphs that planners are timed on, by family: captured nets, RandWire cells, random training graphs."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value

sys.path.insert(0, str(Path(__file__).parents[1]))
import simulated
from simulated import Made, modelled_seconds

GPT2_DEPTHS = (6, 12, 24, 48, 96)
RANDOM_OPS = (1_000, 3_000, 10_000, 30_000, 50_000)
SEEDS = (0, 1, 2, 3)


def graphs() -> dict[str, dict[str, Callable[[], Made]]]:
    """Per family and name what makes the graph, the smallest of a family first."""
    return {
        "randwire": {f"randwire32-{seed}": partial(randwire, seed) for seed in SEEDS},
        "random": {f"random-{ops}": partial(random_training, ops) for ops in RANDOM_OPS},
        "resnet": {
            "resnet18": partial(captured, "resnet18", batch=10),
            "resnet50": partial(captured, "resnet50", batch=8),
            "resnet152": partial(captured, "resnet152", batch=2),
        },
        "gpt2": {f"gpt2-{depth}": partial(captured, "gpt2", batch=8, depth=depth) for depth in GPT2_DEPTHS},
    }


def captured(model: str, **arguments: Any) -> Made:
    """A ready workload's step, captured on fake tensors."""
    from autotune.workloads.zoo import ZOO

    return simulated.captured(partial(ZOO[model], **arguments), model)


def randwire(seed: int, nodes: int = 32, neighbours: int = 4, chance: float = 0.75) -> Made:
    """One stage of RandWire (Xie et al. 2019) at inference: Watts-Strogatz, a sum and a convolution for each node.

    Sources read the stage's input, which has twice a node's bytes; sinks are averaged.
    """
    node_bytes = 4 * 78 * 28 * 28
    built = _Builder(f"randwire{nodes}-{seed}")
    image = built.value("image", 4 * 3 * 224 * 224, Role.BATCH)
    (stage,) = built.op("stem", (image,), (2 * node_bytes,))
    readers = watts_strogatz(nodes, neighbours, chance, random.Random(seed))
    made: list[int] = []
    for node in range(nodes):
        sources = [made[earlier] for earlier in range(node) if node in readers[earlier]] or [stage]
        (total,) = built.op(f"node{node}.sum", sources, (node_bytes,)) if len(sources) > 1 else (sources[0],)
        weight = built.value(f"node{node}.weight", 4 * 78 * (9 + 78), Role.PARAM)
        made += built.op(f"node{node}.conv", (total, weight), (node_bytes,))
    sinks = [made[node] for node in range(nodes) if not readers[node]]
    outputs = built.op("average", sinks, (node_bytes,))
    graph = built.graph(outputs)
    return graph, Costs(tuple(modelled_seconds(graph, op, 0.0) for op in graph.ops), (0,) * len(graph.ops))


def watts_strogatz(nodes: int, neighbours: int, chance: float, rng: random.Random) -> list[set[int]]:
    """Per node its later neighbours: a ring in which each edge is rewired with a chance, from its lower to its higher end."""
    ends = {frozenset((v, (v + i) % nodes)) for v in range(nodes) for i in range(1, neighbours // 2 + 1)}
    for i in range(1, neighbours // 2 + 1):
        for v in range(nodes):
            edge = frozenset((v, (v + i) % nodes))
            free = [w for w in range(nodes) if w != v and frozenset((v, w)) not in ends]
            if edge in ends and free and rng.random() < chance:
                ends.remove(edge)
                ends.add(frozenset((v, rng.choice(free))))
    readers: list[set[int]] = [set() for _ in range(nodes)]
    for edge in ends:
        readers[min(edge)].add(max(edge))
    return readers


def random_training(ops: int, seed: int = 0) -> Made:
    """A random forward of local wiring with a few long skips, and its backward: every op's gradient reads its inputs.

    What nobody read is read once eight more are made, so that the loss reads a few values however many there are.
    Results have 1 KiB to 4 MiB; every fifth op computes ten times as long as its bytes take.
    """
    rng = random.Random(seed)
    built = _Builder(f"random-{ops}")
    made = [built.value("batch", 2**20, Role.BATCH)]
    inputs: list[list[int]] = []
    for index in range(ops // 2 - 1):
        near = made[-8:]
        reads = {made[-1] if rng.random() < 0.7 else rng.choice(near)}
        reads |= {rng.choice(near if rng.random() < 0.9 else made) for _ in range(rng.randrange(3))}
        reads |= {value for value in near[:1] if not built.is_read(value)}
        inputs.append(sorted(reads))
        made += built.op(f"forward{index}", sorted(reads), (int(2 ** rng.uniform(10, 22)),))
    unread = [value for value in made[1:] if not built.is_read(value)]
    loss = built.op("loss", unread, (4,))
    gradients: dict[int, list[int]] = {value: [] for value in made}
    backward = {"phase": Phase.BACKWARD, "role": Role.GRAD}
    for value, gradient in zip(unread, built.op("dloss", unread, map(built.nbytes, unread), **backward), strict=True):
        gradients[value].append(gradient)
    for index in reversed(range(len(inputs))):
        wanted = [value for value in inputs[index] if value != made[0]]
        given = built.op(
            f"backward{index}", [*gradients[made[index + 1]], *inputs[index]],
            map(built.nbytes, wanted or inputs[index]), **backward,
        )  # fmt: skip
        for value, gradient in zip(wanted, given, strict=False):
            gradients[value].append(gradient)
    graph = built.graph(loss)
    heavy = [10.0 if rng.random() < 0.2 else 1.0 for _ in graph.ops]
    seconds = tuple(modelled_seconds(graph, op, 0.0) * heavy[op.id] for op in graph.ops)
    return graph, Costs(seconds, (0,) * len(graph.ops))


@dataclass
class _Builder:
    name: str
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)

    def value(self, name: str, nbytes: int, role: Role) -> int:
        self.values.append(Value(len(self.values), name, nbytes, role))
        if role not in (Role.ACTIVATION, Role.GRAD):
            self.inputs.append(self.values[-1].id)
        return self.values[-1].id

    def op(self, name: str, reads: Any, makes: Any, phase: Phase = Phase.FORWARD, role: Role = Role.ACTIVATION) -> Any:
        outputs = tuple(self.value(f"{name}.{i}", nbytes, role) for i, nbytes in enumerate(makes))
        self.read.update(reads)
        self.ops.append(Op(len(self.ops), name, name.rstrip("0123456789"), tuple(reads), outputs, phase, name))
        return outputs

    def is_read(self, value: int) -> bool:
        return value in self.read

    def nbytes(self, value: int) -> int:
        return self.values[value].nbytes

    def graph(self, outputs: tuple[int, ...]) -> TrainGraph:
        return TrainGraph(self.name, tuple(self.ops), tuple(self.values), tuple(self.inputs), outputs)
