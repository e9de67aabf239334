"""Graphs for timing planners, by family: captured networks, RandWire cells, random training graphs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autotune.capture.fake.modelled_costs import model_seconds
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from experiments.common import simulated
from experiments.common.simulated import GraphAndCosts

GPT2_DEPTHS = (6, 12, 24, 48, 96)
RANDOM_OPS = (1_000, 3_000, 10_000, 30_000, 50_000)
SEEDS = (0, 1, 2, 3)


def graph_factories() -> dict[str, dict[str, Callable[[], GraphAndCosts]]]:
    """Return functions that make the graphs, by family and name, the smallest of a family first."""
    return {
        "randwire": {f"randwire32-{seed}": partial(randwire, seed) for seed in SEEDS},
        "random": {f"random-{ops}": partial(random_training, ops) for ops in RANDOM_OPS},
        "resnet": {
            "resnet18": partial(capture_zoo_model, "resnet18", batch=10),
            "resnet50": partial(capture_zoo_model, "resnet50", batch=8),
            "resnet152": partial(capture_zoo_model, "resnet152", batch=2),
        },
        "gpt2": {f"gpt2-{depth}": partial(capture_zoo_model, "gpt2", batch=8, depth=depth) for depth in GPT2_DEPTHS},
    }


def capture_zoo_model(model: str, **arguments: Any) -> GraphAndCosts:
    """Capture the step of a zoo workload on fake tensors."""
    from autotune.workloads.zoo import ZOO

    name = " ".join([model, *(f"{key}={value}" for key, value in arguments.items())])
    return simulated.capture_step(partial(ZOO[model], **arguments), name)


def randwire(seed: int, nodes: int = 32, neighbours: int = 4, chance: float = 0.75) -> GraphAndCosts:
    """Build one stage of RandWire (Xie et al. 2019) at inference: Watts-Strogatz, a sum and a convolution per node.

    Sources read the stage's input, which has twice a node's bytes. Sinks are averaged.
    """
    node_bytes = 4 * 78 * 28 * 28
    builder = _Builder(f"randwire{nodes}-{seed}")
    image = builder.value("image", 4 * 3 * 224 * 224, Role.BATCH)
    (stage,) = builder.op("stem", (image,), (2 * node_bytes,))
    readers = watts_strogatz(nodes, neighbours, chance, random.Random(seed))
    results: list[int] = []
    for node in range(nodes):
        sources = [results[earlier] for earlier in range(node) if node in readers[earlier]] or [stage]
        (total,) = builder.op(f"node{node}.sum", sources, (node_bytes,)) if len(sources) > 1 else (sources[0],)
        weight = builder.value(f"node{node}.weight", 4 * 78 * (9 + 78), Role.PARAM)
        results += builder.op(f"node{node}.conv", (total, weight), (node_bytes,))
    sinks = [results[node] for node in range(nodes) if not readers[node]]
    outputs = builder.op("average", sinks, (node_bytes,))
    graph = builder.graph(outputs)
    return graph, Costs(tuple(model_seconds(graph, op, 0.0) for op in graph.ops), (0,) * len(graph.ops))


def watts_strogatz(nodes: int, neighbours: int, chance: float, rng: random.Random) -> list[set[int]]:
    """Return the later neighbours of each node: a ring whose edges are rewired with this probability."""
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


def random_training(ops: int, seed: int = 0) -> GraphAndCosts:
    """Build a random forward of local wiring with a few long skips, and a backward that reads the forward's inputs.

    An unread value is read after eight more, so that the loss reads few values in every graph. Results have 1 KiB to
    4 MiB; every fifth op computes ten times as long as its bytes take.
    """
    rng = random.Random(seed)
    builder = _Builder(f"random-{ops}")
    values = [builder.value("batch", 2**20, Role.BATCH)]
    inputs: list[list[int]] = []
    for index in range(ops // 2 - 1):
        recent = values[-8:]
        reads = {values[-1] if rng.random() < 0.7 else rng.choice(recent)}
        reads |= {rng.choice(recent if rng.random() < 0.9 else values) for _ in range(rng.randrange(3))}
        reads |= {value for value in recent[:1] if not builder.is_read(value)}
        inputs.append(sorted(reads))
        values += builder.op(f"forward{index}", sorted(reads), (int(2 ** rng.uniform(10, 22)),))
    unread = [value for value in values[1:] if not builder.is_read(value)]
    loss = builder.op("loss", unread, (4,))
    gradients: dict[int, list[int]] = {value: [] for value in values}
    backward = {"phase": Phase.BACKWARD, "role": Role.GRAD}
    for value, gradient in zip(
        unread, builder.op("dloss", unread, map(builder.nbytes, unread), **backward), strict=True
    ):
        gradients[value].append(gradient)
    for index in reversed(range(len(inputs))):
        differentiable = [value for value in inputs[index] if value != values[0]]
        gradient_values = builder.op(
            f"backward{index}", [*gradients[values[index + 1]], *inputs[index]],
            map(builder.nbytes, differentiable or inputs[index]), **backward,
        )  # fmt: skip
        for value, gradient in zip(differentiable, gradient_values, strict=False):
            gradients[value].append(gradient)
    graph = builder.graph(loss)
    heavy = [10.0 if rng.random() < 0.2 else 1.0 for _ in graph.ops]
    seconds = tuple(model_seconds(graph, op, 0.0) * heavy[op.id] for op in graph.ops)
    return graph, Costs(seconds, (0,) * len(graph.ops))


@dataclass
class _Builder:
    name: str
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    read_values: set[int] = field(default_factory=set)

    def value(self, name: str, nbytes: int, role: Role) -> int:
        self.values.append(Value(len(self.values), name, nbytes, role))
        if role not in (Role.ACTIVATION, Role.GRAD):
            self.inputs.append(self.values[-1].id)
        return self.values[-1].id

    def op(self, name: str, reads: Any, makes: Any, phase: Phase = Phase.FORWARD, role: Role = Role.ACTIVATION) -> Any:
        outputs = tuple(self.value(f"{name}.{i}", nbytes, role) for i, nbytes in enumerate(makes))
        self.read_values.update(reads)
        self.ops.append(Op(len(self.ops), name, name.rstrip("0123456789"), tuple(reads), outputs, phase, name))
        return outputs

    def is_read(self, value: int) -> bool:
        return value in self.read_values

    def nbytes(self, value: int) -> int:
        return self.values[value].nbytes

    def graph(self, outputs: tuple[int, ...]) -> TrainGraph:
        return TrainGraph(self.name, tuple(self.ops), tuple(self.values), tuple(self.inputs), outputs)
