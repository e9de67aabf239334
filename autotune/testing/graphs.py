"""Graphs for tests: small ones with bytes that can be counted by hand, and random graphs and plans."""

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from autotune.ir.plan import InPlace, Plan, Swap, events
from autotune.ir.schedule import gap_layers, layer_numbers, leaves_memory


class Builder:
    """Builder of a graph whose values and ops refer to each other by name.

    >>> builder = Builder()
    >>> _ = builder.value("w", 4, Role.PARAM)
    >>> _ = builder.op("matmul", ["w"], [("y", 8)])
    >>> builder.graph("y").static_bytes
    4
    """

    def __init__(self, name: str = "built") -> None:
        self.name = name
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.inputs: list[int] = []
        self.ids: dict[str, int] = {}

    def value(self, name: str, nbytes: int, role: Role = Role.ACTIVATION) -> int:
        """Add a value and return its id. Parameters, state, buffers and batch become inputs of the graph."""
        self.ids[name] = len(self.values)
        self.values.append(Value(len(self.values), name, nbytes, role))
        if role in (Role.PARAM, Role.STATE, Role.BUFFER, Role.BATCH):
            self.inputs.append(self.ids[name])
        return self.ids[name]

    def op(
        self,
        name: str,
        reads: Iterable[str] = (),
        makes: Iterable[tuple[str, int]] = (),
        *,
        writes: Iterable[str] = (),
        phase: Phase = Phase.FORWARD,
        layer: str | None = None,
        repeatable: bool = True,
        draws: bool = False,
        role: Role = Role.ACTIVATION,
        inplace: Iterable[str] = (),
        alias_of: str | None = None,
    ) -> int:
        """Add an op and return its id.

        Args:
            name: Name of the op; its target is the name without trailing digits.
            reads: Names of its inputs.
            makes: (name, bytes) of its outputs, which are added as values.
            writes: Names of values that it changes in place.
            phase: Part of the step.
            layer: Path of its module; the op's name by default.
            repeatable: True if it may be recomputed.
            draws: True if it draws random numbers.
            role: Role of its outputs.
            inplace: Names of inputs whose buffer its output may reuse.
            alias_of: Name of the value that may become its output without a computation.
        """
        outputs = tuple(self.value(output, nbytes, role) for output, nbytes in makes)
        op = Op(
            id=len(self.ops),
            name=name,
            target=name.rstrip("0123456789"),
            inputs=tuple(self.ids[read] for read in reads),
            outputs=outputs,
            phase=phase,
            layer=name if layer is None else layer,
            repeatable=repeatable,
            random=draws,
            writes=tuple(self.ids[written] for written in writes),
            inplace=tuple(self.ids[overwritten] for overwritten in inplace),
            alias_of=None if alias_of is None else self.ids[alias_of],
        )
        self.ops.append(op)
        return op.id

    def graph(self, *outputs: str) -> TrainGraph:
        """Return the graph; `outputs` are the names of values that outlive the step."""
        return TrainGraph(
            self.name,
            tuple(self.ops),
            tuple(self.values),
            tuple(self.inputs),
            tuple(self.ids[name] for name in outputs),
        )


def chain(n: int, nbytes: int = 10) -> TrainGraph:
    """Return an inference chain: `op0` creates `v0`, and each next op reads the value before it. Values have `nbytes`."""
    built = Builder(f"chain{n}")
    for i in range(n):
        built.op(f"op{i}", [f"v{i - 1}"] if i else [], [(f"v{i}", nbytes)])
    return built.graph(f"v{n - 1}")


def training_chain(n: int, nbytes: int = 10, param_bytes: int = 2) -> TrainGraph:
    """Return `n` layers with one weight and one momentum each, and the updates at the end.

    Traced order: `fwd0..`, `loss`, `dloss`, then per layer from the last `dx` (not for layer 0) and `dw`, then
    `update0..`. Activations `h0..` and their gradients `g0..` have `nbytes`, `w`, `m` and `gw` have `param_bytes`,
    the batch `x` has `nbytes`, the loss 1 byte. Forward and backward ops of a layer share the layer `block0..`.
    """
    built = Builder(f"training_chain{n}")
    built.value("x", nbytes, Role.BATCH)
    for i in range(n):
        built.value(f"w{i}", param_bytes, Role.PARAM)
        built.value(f"m{i}", param_bytes, Role.STATE)
    for i in range(n):
        built.op(f"fwd{i}", [f"h{i - 1}" if i else "x", f"w{i}"], [(f"h{i}", nbytes)], layer=f"block{i}")
    backward = partial(built.op, phase=Phase.BACKWARD, role=Role.GRAD)
    built.op("loss", [f"h{n - 1}"], [("loss", 1)], layer="loss")
    backward("dloss", [f"h{n - 1}"], [(f"g{n - 1}", nbytes)], layer="loss")
    for i in reversed(range(n)):
        if i:
            backward(f"dx{i}", [f"g{i}", f"w{i}"], [(f"g{i - 1}", nbytes)], layer=f"block{i}")
        backward(f"dw{i}", [f"g{i}", f"h{i - 1}" if i else "x"], [(f"gw{i}", param_bytes)], layer=f"block{i}")
    for i in range(n):
        built.op(
            f"update{i}", [f"w{i}", f"m{i}", f"gw{i}"], writes=[f"w{i}", f"m{i}"], phase=Phase.UPDATE,
            layer=f"block{i}", repeatable=False,
        )  # fmt: skip
    return built.graph("loss")


def random_graph(rng: random.Random, max_ops: int = 12) -> TrainGraph:
    """Return a small random DAG.

    It has zero-byte values, several outputs, random ops, side effects, values written in place, layers, and aliases.
    """
    built = Builder("random")
    for i in range(rng.randint(0, 3)):
        built.value(f"in{i}", rng.choice([0, 1, 5, 16]), rng.choice([Role.PARAM, Role.STATE, Role.BUFFER, Role.BATCH]))
    static = list(built.ids)
    layer, count = 0, rng.randint(1, max_ops)
    hidden: set[str] = set()  # no other op reads an alias
    for i in range(count):
        if f"v{i - 1}.0" in hidden:
            whole = built.ops[-1]
            reads = [f"v{i - 1}.1", *(name for name, value in built.ids.items() if value in whole.inputs)]
            nbytes = built.values[whole.outputs[0]].nbytes
            built.op(
                f"op{i}", reads, [(f"v{i}.0", nbytes)], phase=whole.phase, layer=whole.layer, alias_of=f"v{i - 1}.0"
            )
            continue
        layer += rng.random() < 0.6
        readable = [name for name in built.ids if name not in hidden]
        recent = readable[-4:] if rng.random() < 0.6 else readable
        reads = sorted(set(rng.choices(recent, k=rng.randint(0, min(3, len(recent)))))) if recent else []
        writes = [rng.choice(static)] if static and rng.random() < 0.15 else []
        makes = [rng.choice([0, 1, 3, 8, 20, 50]) for _ in range(rng.randint(0 if writes else 1, 2))]
        over = [read for read in reads if read not in static]
        if makes and over and rng.random() < 0.4:
            makes[-1] = built.values[built.ids[rng.choice(over)]].nbytes
            over = [read for read in over if built.values[built.ids[read]].nbytes == makes[-1]]
        else:
            over = []
        share = i / count
        built.op(
            f"op{i}",
            reads,
            [(f"v{i}.{j}", nbytes) for j, nbytes in enumerate(makes)],
            writes=writes,
            phase=Phase.FORWARD if share < 0.5 else Phase.UPDATE if writes else Phase.BACKWARD,
            layer=f"layer{layer if share < 0.5 else layer // 2}",
            repeatable=rng.random() < 0.9,
            draws=rng.random() < 0.12,
            role=rng.choice([Role.ACTIVATION, Role.GRAD]),
            inplace=over,
        )
        if len(makes) == 2 and i + 1 < count and rng.random() < 0.3:
            hidden.add(f"v{i}.0")
    created = [name for name in built.ids if name not in static and name not in hidden]
    return built.graph(*rng.sample(created, min(len(created), rng.randint(0, 2))))


def graphs(max_ops: int = 12) -> st.SearchStrategy[TrainGraph]:
    """Return a hypothesis strategy of `random_graph`."""
    return st.randoms(use_true_random=False).map(lambda rng: random_graph(rng, max_ops))


def random_order(graph: TrainGraph, rng: random.Random) -> tuple[int, ...]:
    """Return a random topological order of all ops."""
    order: list[int] = []
    left = set(range(len(graph.ops)))
    while left:
        ready = [op for op in sorted(left) if left.isdisjoint(graph.predecessors[op])]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return tuple(order)


def random_plan(graph: TrainGraph, rng: random.Random, *, repeat: int = 4, offload: bool = True) -> Plan:
    """Return a valid plan: a random order with recomputation, runs in place and offloaded values where `check` allows them."""
    plan = Plan(random_order(graph, rng))
    for _ in range(rng.randint(0, repeat)):
        position = rng.randint(0, len(plan.order))
        order = (*plan.order[:position], rng.randrange(len(graph.ops)), *plan.order[position:])
        plan = _if_valid(graph, Plan(order), plan)
    for reuse in inplace_candidates(graph, plan.order):
        if rng.random() < 0.5:
            plan = _if_valid(graph, replace(plan, inplace=(*plan.inplace, reuse)), plan)
    if not offload:
        return plan
    window = rng.randint(1, 2)
    layers = layer_numbers(graph, plan.order)
    gaps = []
    for value, value_events in enumerate(events(graph, plan.order)):
        for gap in range(-1 if value in graph.static else 0, len(value_events) - 1):
            save, load = gap_layers(layers, value_events, gap)
            late, early = rng.choice((0, 0, 1)), rng.choice((0, 0, 1))
            if leaves_memory(save + late, load - early, window):
                gaps.append(Swap(value, gap, late, early))
    swaps = tuple(
        swap for swap in gaps if rng.random() < 0.6 and _valid(graph, Plan(plan.order, (swap,), window, "ssd"))
    )
    return replace(plan, offload=swaps, window=window, store="ssd") if swaps else plan


def inplace_candidates(graph: TrainGraph, order: tuple[int, ...]) -> list[InPlace]:
    """Return every run of an order with every input that its op may overwrite, whether or not it is read later."""
    return [InPlace(position, value) for position, op in enumerate(order) for value in graph.ops[op].inplace]


def plans(max_ops: int = 12) -> st.SearchStrategy[tuple[TrainGraph, Plan]]:
    """Return a hypothesis strategy of random graphs, each with a valid random plan."""

    def draw(rng: random.Random) -> tuple[TrainGraph, Plan]:
        graph = random_graph(rng, max_ops)
        return graph, random_plan(graph, rng)

    return st.randoms(use_true_random=False).map(draw)


def _valid(graph: TrainGraph, plan: Plan) -> bool:
    try:
        check(graph, plan)
    except PlanError:
        return False
    return True


def _if_valid(graph: TrainGraph, plan: Plan, otherwise: Plan) -> Plan:
    return plan if _valid(graph, plan) else otherwise
