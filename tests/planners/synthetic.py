"""Training steps with the shape, the bytes and the seconds of well-known nets, made without torch."""

from collections.abc import Sequence

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.testing.graphs import Builder

FLOPS_PER_SECOND = 100e9
BYTES_PER_SECOND = 8e9
LAUNCH_SECONDS = 5e-6


class Net(Builder):
    """Forward ops with the rule for their gradients; `train` writes the backward and the updates."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seconds: list[float] = []
        self.scratch: list[int] = []
        self.size: dict[str, int] = {}
        self.tape: list[tuple[str, list[str], list[str], list[str], float, list[str]]] = []
        self.commits: list[tuple[str, list[str]]] = []
        self.params: list[str] = []
        self.layer = ""
        self.count = 0

    def make(
        self,
        kind: str,
        reads: Sequence[str],
        makes: Sequence[int],
        *,
        flops: float = 0.0,
        phase: Phase = Phase.FORWARD,
        draws: bool = False,
        scratch: int = 0,
    ) -> list[str]:
        self.count += 1
        names = [f"{kind}{self.count}.{i}" for i in range(len(makes))]
        self.size.update(zip(names, makes, strict=True))
        role = Role.GRAD if phase is Phase.BACKWARD else Role.ACTIVATION
        reads = list(dict.fromkeys(reads))
        self.op(f"{kind}{self.count}", reads, list(zip(names, makes, strict=True)), phase=phase, layer=self.layer,
                draws=draws, role=role)  # fmt: skip
        moved = sum(self.size[name] for name in (*reads, *names))
        self.seconds.append(LAUNCH_SECONDS + flops / FLOPS_PER_SECOND + moved / BYTES_PER_SECOND)
        self.scratch.append(scratch)
        return names

    def param(self, name: str, nbytes: int) -> str:
        self.value(name, nbytes, Role.PARAM)
        self.value(name + ".momentum", nbytes, Role.STATE)
        self.size[name] = self.size[name + ".momentum"] = nbytes
        self.params.append(name)
        return name

    def batch(self, name: str, nbytes: int) -> str:
        self.value(name, nbytes, Role.BATCH)
        self.size[name] = nbytes
        return name

    def forward(
        self, kind: str, reads: Sequence[str], makes: Sequence[int], *, saves: Sequence[str] = (),
        saves_made: Sequence[int] = (), wrt: Sequence[str] | None = None, flops: float = 0.0, draws: bool = False,
        scratch: int = 0,
    ) -> list[str]:  # fmt: skip
        """One op; its gradient op reads the first result's gradient, `saves` and the results `saves_made`."""
        made = self.make(kind, reads, makes, flops=flops, draws=draws, scratch=scratch)
        kept = [*saves, *(made[i] for i in saves_made)]
        self.tape.append((kind, list(reads if wrt is None else wrt), made, kept, flops, [self.layer]))
        return made

    def conv(self, x: str, out_bytes: int, weight_bytes: int, flops: float) -> str:
        weight = self.param(f"w{len(self.params)}", weight_bytes)
        return self.forward("conv", [x, weight], [out_bytes], saves=[x, weight], flops=flops)[0]

    def norm(self, x: str, channels: int, *, statistics: bool = True) -> str:
        weight = self.param(f"w{len(self.params)}", 4 * channels)
        size = self.size[x]
        made = self.forward(
            "norm", [x, weight], [size, 4 * channels, 4 * channels], saves=[x, weight], saves_made=[1, 2]
        )
        if statistics:
            buffer = f"running{len(self.commits)}"
            self.value(buffer, 4 * channels, Role.BUFFER)
            self.commits.append((buffer, made[1:]))
        return made[0]

    def relu(self, x: str) -> str:
        return self.forward("relu", [x], [self.size[x]], saves_made=[0])[0]

    def add(self, x: str, y: str) -> str:
        return self.forward("add", [x, y], [self.size[x]])[0]

    def dropout(self, x: str) -> str:
        mask = self.make("mask", [], [self.size[x] // 4], draws=True)[0]
        return self.forward("scale", [x, mask], [self.size[x]], saves=[mask], wrt=[x])[0]

    def linear(self, x: str, out_bytes: int, weight_bytes: int, flops: float) -> str:
        weight = self.param(f"w{len(self.params)}", weight_bytes)
        return self.forward("linear", [x, weight], [out_bytes], saves=[x, weight], flops=flops)[0]

    def train(self, last: str) -> tuple[TrainGraph, Costs]:
        loss, logs = self.forward("loss", [last], [4, self.size[last]], saves_made=[1])
        del logs
        grads: dict[str, str] = {loss: self.make("one", [], [4], phase=Phase.BACKWARD)[0]}
        batch = {value.name for value in self.values if value.role is Role.BATCH}
        for kind, wrt, made, kept, flops, layer in reversed(self.tape):
            if made[0] not in grads:
                continue
            self.layer = layer[0]
            targets = [name for name in wrt if name not in batch]
            if kind == "add":
                sums = dict.fromkeys(targets, grads[made[0]])
            else:
                sizes = [self.size[name] for name in targets]
                pieces = self.make(
                    kind + "_back", [grads[made[0]], *kept], sizes, flops=2 * flops, phase=Phase.BACKWARD
                )
                sums = dict(zip(targets, pieces, strict=True))
            for name, piece in sums.items():
                if name in grads:
                    piece = self.make("sum", [grads[name], piece], [self.size[name]], phase=Phase.BACKWARD)[0]  # noqa: PLW2901
                grads[name] = piece
        for name in self.params:
            self.op(f"update_{name}", [name, name + ".momentum", grads[name]], writes=[name, name + ".momentum"],
                    phase=Phase.UPDATE, repeatable=False)  # fmt: skip
            self.seconds.append(LAUNCH_SECONDS + 5 * self.size[name] / BYTES_PER_SECOND)
            self.scratch.append(0)
        for buffer, statistics in self.commits:
            self.op(f"commit_{buffer}", [buffer, *statistics], writes=[buffer], phase=Phase.UPDATE, repeatable=False)
            self.seconds.append(LAUNCH_SECONDS)
            self.scratch.append(0)
        return self.graph(loss), Costs(tuple(self.seconds), tuple(self.scratch))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), batch: int = 8, side: int = 224) -> tuple[TrainGraph, Costs]:
    """Bottleneck ResNet; (3, 4, 6, 3) is ResNet-50."""
    net = Net("resnet")

    def conv(x: str, cin: int, cout: int, kernel: int, size: int) -> str:
        net.layer = f"conv{len(net.params)}"
        flops = 2.0 * batch * size * size * cin * cout * kernel * kernel
        y = net.conv(x, 4 * batch * cout * size * size, 4 * cin * cout * kernel * kernel, flops)
        net.layer = f"norm{len(net.params)}"
        return net.norm(y, cout)

    x = net.batch("x", 4 * batch * 3 * side * side)
    size = side // 2
    x = net.relu(conv(x, 3, 64, 7, size))
    size //= 2
    pooled = 4 * batch * 64 * size * size
    x = net.forward("pool", [x], [pooled, 2 * pooled], saves=[x], saves_made=[1])[0]
    cin = 64
    for stage, depth in enumerate(blocks):
        width = 64 << stage
        for block in range(depth):
            if stage and not block:
                size //= 2
            y = net.relu(conv(x, cin, width, 1, size * (2 if stage and not block else 1)))
            y = net.relu(conv(y, width, width, 3, size))
            y = conv(y, width, 4 * width, 1, size)
            if not block:
                x = conv(x, cin, 4 * width, 1, size)
            cin = 4 * width
            net.layer = f"join{stage}.{block}"
            x = net.relu(net.add(y, x))
    x = net.forward("mean", [x], [4 * batch * cin])[0]
    x = net.linear(x, 4 * batch * 1000, 4 * cin * 1000, 2.0 * batch * cin * 1000)
    return net.train(x)


def gpt(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    tokens: int = 256,
    *,
    batch: int = 8,
    vocabulary: int = 8192,
    dropout: bool = True,
) -> tuple[TrainGraph, Costs]:
    """Decoder with unfused attention; masks of dropout are drawn by ops of their own."""
    net = Net("gpt")
    rows = batch * tokens
    full, scores = 4 * rows * width, 4 * batch * heads * tokens * tokens

    def linear(x: str, cin: int, cout: int) -> str:
        return net.linear(x, 4 * rows * cout, 4 * cin * cout, 2.0 * rows * cin * cout)

    def drop(x: str) -> str:
        return net.dropout(x) if dropout else x

    tokens_in = net.batch("tokens", 8 * rows)
    table = net.param("table", 4 * vocabulary * width)
    x = drop(net.forward("embed", [tokens_in, table], [full], saves=[tokens_in], wrt=[table])[0])
    for layer in range(layers):
        net.layer = f"attention{layer}"
        y = net.norm(x, rows, statistics=False)
        q, k, v = (linear(y, width, width) for _ in range(3))
        flops = 2.0 * batch * tokens * tokens * width
        s = net.forward("score", [q, k], [scores], saves=[q, k], flops=flops)[0]
        s = net.forward("softmax", [s], [scores], saves_made=[0])[0]
        s = drop(s)
        y = net.forward("mix", [s, v], [full], saves=[s, v], flops=flops)[0]
        x = net.add(x, drop(linear(y, width, width)))
        net.layer = f"mlp{layer}"
        y = net.norm(x, rows, statistics=False)
        y = linear(y, width, 4 * width)
        y = net.forward("gelu", [y], [4 * full], saves=[y])[0]
        x = net.add(x, drop(linear(y, 4 * width, width)))
    x = net.norm(x, rows, statistics=False)
    return net.train(linear(x, width, vocabulary))


def lstm(steps: int = 60, width: int = 384, batch: int = 32, vocabulary: int = 8192) -> tuple[TrainGraph, Costs]:
    """A loop over one LSTM cell: every step reads the same two weights, whose gradients are summed."""
    net = Net("lstm")
    state = 4 * batch * width
    x_weight = net.param("x_weight", 16 * width * width)
    h_weight = net.param("h_weight", 16 * width * width)
    h = net.batch("h0", state)
    c = net.batch("c0", state)
    tops = []
    flops = 2.0 * batch * width * 4 * width
    for step in range(steps):
        net.layer = f"step{step}"
        x = net.batch(f"x{step}", state)
        a = net.forward("x_linear", [x, x_weight], [4 * state], saves=[x, x_weight], flops=flops)[0]
        b = net.forward("h_linear", [h, h_weight], [4 * state], saves=[h, h_weight], flops=flops)[0]
        gates = net.add(a, b)
        # sigmoid and tanh of the four gates keep their results for the gradient
        i = net.forward("gate_i", [gates], [state], saves_made=[0])[0]
        f = net.forward("gate_f", [gates], [state], saves_made=[0])[0]
        g = net.forward("gate_g", [gates], [state], saves_made=[0])[0]
        o = net.forward("gate_o", [gates], [state], saves_made=[0])[0]
        kept = net.forward("keep", [f, c], [state], saves=[f, c])[0]
        new = net.forward("new", [i, g], [state], saves=[i, g])[0]
        c = net.add(kept, new)
        t = net.forward("tanh", [c], [state], saves_made=[0])[0]
        h = net.forward("out", [o, t], [state], saves=[o, t])[0]
        tops.append(h)
    net.layer = "head"
    x = net.forward("stack", tops, [steps * state])[0]
    weight_bytes = 4 * width * vocabulary
    x = net.linear(x, 4 * steps * batch * vocabulary, weight_bytes, 2.0 * steps * batch * width * vocabulary)
    return net.train(x)
