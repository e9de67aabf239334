"""Nets like those of memonger's tests, and random ones; what they compute is a number that every input changes."""

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from hypothesis import strategies as st

from experiments.claims.memonger.sharing.net import Net, NetOp


class Toy:
    """Puts a net together: a method per layer, which names its output; `backward` adds what its gradients take."""

    def __init__(self, *inputs: str, scope: str = "") -> None:
        self.scope, self.device = scope, "cpu"
        self.ops: list[NetOp] = []
        self.inputs = [scope + name for name in inputs]
        self.gradients: list[str] = []
        """Of values; those of weights are in `weight_gradients`."""
        self.weight_gradients: list[str] = []
        self.activations: list[str] = []

    def op(self, kind: str, reads: Sequence[str], makes: Sequence[str], host: Sequence[str] = ()) -> str:
        self.ops.append(NetOp(kind, tuple(reads), tuple(makes), self.device, tuple(host)))
        self.activations += [name for name in makes if name and name not in self.activations]
        return makes[0]

    def fc(self, read: str, name: str) -> str:
        weight = f"{self.scope}{name}_w"
        if weight not in self.inputs:
            self.inputs.append(weight)
        return self.op("fc", [read, weight], [self.scope + name])

    def chain(self, read: str, *names: str) -> str:
        for name in names:
            read = self.fc(read, name)
        return read

    def relu(self, read: str, name: str = "") -> str:
        """In place, unless it is named."""
        return self.op("relu", [read], [self.scope + name if name else read])

    def add(self, *reads: str, name: str) -> str:
        return self.op("sum", reads, [self.scope + name])

    def loss(self, read: str, name: str = "loss") -> str:
        probabilities = self.op("softmax", [read], [f"{self.scope}{name}_probs"])
        xent = self.op("xent", [probabilities, self.scope + "label"], [f"{self.scope}{name}_xent"])
        return self.op("mean", [xent], [self.scope + name])

    def backward(self, *losses: str) -> None:
        """A gradient op for each op, in reverse: it reads its inputs, outputs (unless it is linear) and their gradients,
        and makes those of its inputs. Gradients of a value with several readers are summed; that of an op in place is in place too.
        """
        forward, number = list(self.ops), count()
        pending = {loss: [self._gradient("ones", [loss], [f"{loss}_grad"])[0]] for loss in losses}
        for op in reversed(forward):
            self.device = op.device
            got = []
            for output in filter(None, op.outputs):
                parts = pending.pop(output, [])
                got += self._gradient("sum", parts, [f"{output}_grad_sum{next(number)}"]) if len(parts) > 1 else parts
            if not got:
                continue
            inputs = [name for name in dict.fromkeys(op.inputs) if name not in self.inputs or name.endswith("_w")]
            inplace = set(op.inputs) & set(op.outputs)
            made = [got[0] if name in inplace else f"{name}_grad{next(number)}" for name in inputs]
            made_before = () if op.kind == "fc" else filter(None, op.outputs)
            reads = dict.fromkeys((*op.inputs, *made_before, *got))
            self._gradient(f"{op.kind}_grad", list(reads), made)
            for name, gradient in zip(inputs, made, strict=True):
                if not name.endswith("_w"):
                    pending.setdefault(name, []).append(gradient)

    def _gradient(self, kind: str, reads: Sequence[str], makes: Sequence[str]) -> Sequence[str]:
        self.ops.append(NetOp(kind, tuple(reads), tuple(makes), self.device))
        for name in makes:
            found = self.weight_gradients if "_w_grad" in name else self.gradients
            found += [name] if name not in found else []
        return makes

    def net(self, *outputs: str) -> Net:
        return Net(tuple(self.ops), tuple(self.inputs), (*outputs, *self.weight_gradients))


def renamed(net: Net, names: Mapping[str, str]) -> Net:
    """The net with other names for some blobs."""

    def new(blobs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(blob, blob) for blob in blobs)

    ops = (replace(op, inputs=new(op.inputs), outputs=new(op.outputs), host=new(op.host)) for op in net.ops)
    return replace(net, ops=tuple(ops))


def same(net: Net, other: Net) -> bool:
    """Whether two nets compute the same, run as they stand: names apart, each op reads what the same ops made.

    What one computes in place the other does too. The caller's own blobs keep their names.
    """
    return (
        len(net.ops) == len(other.ops)
        and (net.inputs, net.outputs) == (other.inputs, other.outputs)
        and _wiring(net) == _wiring(other)
    )


def _wiring(net: Net) -> list[object]:
    made: dict[str, tuple[int, int] | str] = {"": ""}
    found: list[object] = []
    for number, op in enumerate(net.ops):
        read = [made.get(blob, blob) for blob in op.inputs]
        inplace = [
            (i, o) for i, blob in enumerate(op.inputs) for o, out in enumerate(op.outputs) if blob and blob == out
        ]
        missing = [o for o, out in enumerate(op.outputs) if not out]
        twice = len({*filter(None, op.outputs)}) + len(missing) < len(op.outputs)
        found.append((op.kind, op.device, read, inplace, missing, twice))
        made.update({blob: (number, o) for o, blob in enumerate(op.outputs) if blob})
    return [*found, [made.get(blob, blob) for blob in net.outputs]]


def run(net: Net, order: Sequence[int] | None = None) -> tuple[list[list[int]], list[int]]:
    """What each op made when it ran, and what the net's outputs hold at the end; ops run in `order`."""
    held = {name: _mix("input", name) for name in net.inputs}
    made: list[list[int]] = [[] for _ in net.ops]
    for number in range(len(net.ops)) if order is None else order:
        op = net.ops[number]
        read = [held.get(name, 0) for name in op.inputs]
        made[number] = [_mix(op.kind, position, *read) if name else 0 for position, name in enumerate(op.outputs)]
        held.update({name: value for name, value in zip(op.outputs, made[number], strict=True) if name})
    return made, [held[name] for name in net.outputs]


def _mix(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def all_orders(net: Net) -> Iterator[tuple[int, ...]]:
    """Every order in which the ops may run, for a few ops."""

    def extend(ran: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(ran) == len(net.ops):
            yield ran
        for number in range(len(net.ops)):
            if number not in ran and net.before[number] <= set(ran):
                yield from extend((*ran, number))

    return extend(())


def some_order(net: Net, rng: random.Random) -> tuple[int, ...]:
    """An order in which the ops may run."""
    order: list[int] = []
    left = set(range(len(net.ops)))
    while left:
        order.append(rng.choice([number for number in sorted(left) if left.isdisjoint(net.before[number])]))
        left.remove(order[-1])
    return tuple(order)


def random_net(rng: random.Random, most_ops: int) -> Net:
    """Branches and joins, ops in place, blobs written again, devices, outputs that do not exist, blobs nobody reads."""
    inputs = [f"in{number}" for number in range(rng.randint(1, 2))]
    known, ops = list(inputs), list[NetOp]()
    for number in range(rng.randint(1, most_ops)):
        reads = rng.choices(known[-4:] if rng.random() < 0.7 else known, k=rng.randint(1, 3))
        makes = [f"b{number}.{position}" for position in range(rng.choice((1, 1, 1, 2)))]
        own = [name for name in known if name not in inputs]
        if own and rng.random() < 0.15:
            makes[0] = rng.choice(own)
        if len(makes) > 1 and rng.random() < 0.2:
            makes[1] = ""
        device = rng.choice(("cpu", "cpu", "gpu"))
        host = tuple(name for name in makes if name and name not in known and rng.random() < 0.1)
        ops.append(NetOp(f"op{number}", tuple(reads), tuple(makes), device, host))
        known += [name for name in makes if name and name not in known]
    made = known[len(inputs) :]
    return Net(tuple(ops), tuple(inputs), tuple(rng.sample(made, min(len(made), rng.randint(0, 2)))))


def random_bytes(net: Net, rng: random.Random) -> dict[str, int]:
    """A size for every blob."""
    return {blob: rng.choice((0, 1, 3, 8, 20, 50)) for blob in (*net.inputs, *net.touched)}


def nets(most_ops: int) -> st.SearchStrategy[Net]:
    """`random_net` for hypothesis."""
    return st.randoms(use_true_random=False).map(lambda rng: random_net(rng, most_ops))


def blobs(net: Net, names: Mapping[str, str] | None = None) -> set[str]:
    """What its ops read and write, once some are renamed."""
    return set(renamed(net, names or {}).touched)
