"""Graphs on which the order of ops matters, from the descriptions in the papers that are known for them."""

import random

from autotune.ir.graph import Phase, TrainGraph
from autotune.testing.graphs import Builder


def bottleneck() -> TrainGraph:
    """The block of nnstreamer/nntrainer#1126: its first sort takes 300 bytes, its second 225. The sum is in place."""
    built = Builder("nntrainer1126")
    built.op("input", makes=[("T1", 100)])
    built.op("L", ["T1"], [("T2", 100)])
    built.op("M", ["T2"], [("T3", 25)])
    built.op("N", ["T3"], [("T4", 100)])
    built.op("P", ["T1"], [("T5", 100)])
    built.op("Add", ["T4", "T5"], [("T6", 0)])
    return built.graph("T6")


def small_world(seed: int, nodes: int = 32, neighbours: int = 4, rewired: float = 0.75) -> list[list[int]]:
    """Per node the nodes that it reads: a Watts-Strogatz graph, its edges led from the lower number to the higher
    (Xie et al. 2019, "Exploring randomly wired neural networks": 32 nodes, K = 4, P = 0.75).
    """
    rng = random.Random(seed)
    edges = {
        frozenset((node, (node + step) % nodes)) for step in range(1, neighbours // 2 + 1) for node in range(nodes)
    }
    for step in range(1, neighbours // 2 + 1):
        for node in range(nodes):
            other = (node + step) % nodes
            if rng.random() < rewired:
                free = [n for n in range(nodes) if n != node and frozenset((node, n)) not in edges]
                edges.remove(frozenset((node, other)))
                edges.add(frozenset((node, rng.choice(free))))
    return [sorted(low for edge in edges if max(edge) == node for low in edge if low < node) for node in range(nodes)]


def randwire(seed: int, stages: int = 1, nbytes: int = 64, *, train: bool = False) -> TrainGraph:
    """Stages of randomly wired nodes. A node sums what it reads and makes one tensor; nodes that read no other read the
    stage's input, and those that no other reads are averaged into its output. Each stage halves the bytes.

    Training adds for every node the gradient of its sum, from what its readers send and what it made itself, one more to
    send to each that it read, and its weight's gradient of 1 byte with its update.
    """
    built = Builder(f"randwire{seed}x{stages}")
    reads: dict[str, list[str]] = {}
    size: dict[str, int] = {}

    def add(name: str, sources: list[str], made: int) -> str:
        built.op(name, sources, [(f"{name}.out", made)])
        reads[name], size[name] = sources, made
        return f"{name}.out"

    current = add("stem", [], nbytes)
    for stage in range(stages):
        made = nbytes >> stage
        wiring = small_world(seed + 1000 * stage)
        read = {node for sources in wiring for node in sources}
        names = [f"stage{stage}node{node}" for node in range(len(wiring))]
        for node, sources in enumerate(wiring):
            add(names[node], [f"{names[source]}.out" for source in sources] or [current], made)
        current = add(f"stage{stage}out", [f"{names[n]}.out" for n in range(len(wiring)) if n not in read], made)
    if not train:
        return built.graph(current)
    readers: dict[str, list[str]] = {name: [] for name in reads}
    for name in reversed(list(reads)):
        built.op(f"d{name}", [*readers[name], f"{name}.out"], [(f"{name}.grad", size[name])], phase=Phase.BACKWARD)
        for source in reads[name]:
            maker = source.removesuffix(".out")
            readers[maker].append(f"{name}.to.{maker}")
            built.op(f"{name}to{maker}", [f"{name}.grad"], [(readers[maker][-1], size[maker])], phase=Phase.BACKWARD)
        built.op(f"w{name}", [f"{name}.grad", *reads[name]], [(f"{name}.weight", 1)], phase=Phase.BACKWARD)
        built.op(f"u{name}", [f"{name}.weight"], phase=Phase.UPDATE, repeatable=False)
    return built.graph()


def alexnet(batch: int = 32) -> TrainGraph:
    """A training step of AlexNet in one column, 224 pixels wide, an update for every weight (biases left out).

    Every op's result is a tensor of its own, as a framework makes it; what each gradient reads is what it needs.
    """
    built = Builder("alexnet")
    convs = [(64, 55, 3 * 11 * 11, 27), (192, 27, 64 * 25, 13), (384, 13, 192 * 9, 0), (256, 13, 384 * 9, 0),
             (256, 13, 256 * 9, 6)]  # fmt: skip
    tape: list[tuple[str, str, str, int, int]] = []  # (op, what it read, what it made, bytes read, bytes of weight)
    built.op("load", makes=[("x", 4 * batch * 3 * 224 * 224)])
    current, nbytes = "x", 0

    def add(name: str, made: int, weight: int = 0, extra: int = 0) -> None:
        nonlocal current, nbytes
        values = [(f"{name}.out", made)] + ([(f"{name}.kept", extra)] if extra else [])
        built.op(name, [current], values)
        tape.append((name, current, f"{name}.out", nbytes, weight))
        current, nbytes = f"{name}.out", made

    for i, (channels, side, fan_in, pooled) in enumerate(convs):
        made = 4 * batch * channels * side * side
        add(f"conv{i}", made, 4 * channels * fan_in)
        add(f"relu{i}", made)
        if pooled:
            count = batch * channels * pooled * pooled
            add(f"pool{i}", 4 * count, extra=8 * count)
    for i, (wide, deep) in enumerate([(9216, 4096), (4096, 4096), (4096, 1000)]):
        if i < 2:
            add(f"drop{i}", 4 * batch * wide, extra=batch * wide)
        add(f"fc{i}", 4 * batch * deep, 4 * wide * deep)
        if i < 2:
            add(f"act{i}", 4 * batch * deep)
    built.op("loss", [current], [("loss.out", 4)])
    built.op("dloss", [current], [("grad", nbytes)], phase=Phase.BACKWARD)
    gradient = "grad"
    for name, read, made, size, weight in reversed(tape):
        if weight:
            built.op(f"w{name}", [gradient, read], [(f"{name}.weight", weight)], phase=Phase.BACKWARD)
            built.op(f"u{name}", [f"{name}.weight"], phase=Phase.UPDATE, repeatable=False)
        if read == "x":
            break
        kept = f"{name}.kept"
        needs = [] if name.startswith("fc") or name.startswith("conv") else [kept if kept in built.ids else made]
        built.op(f"d{name}", [gradient, *needs], [(f"{name}.grad", size)], phase=Phase.BACKWARD)
        gradient = f"{name}.grad"
    return built.graph("loss.out")


def xla_seven() -> TrainGraph:
    """The graph on which XLA's list schedule is known to miss the best order, 5 bytes (`hlo_memory_scheduler.cc`)."""
    built = Builder("xla")
    for name, reads, nbytes in [("A", "", 1), ("B", "A", 2), ("C", "B", 1), ("D", "A", 1), ("E", "A", 1), ("F", "DE", 2),
                                ("G", "CF", 1)]:  # fmt: skip
        built.op(name, [read.lower() for read in reads], [(name.lower(), nbytes)])
    return built.graph("g")
