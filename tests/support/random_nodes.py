"""Nodes of random models, as lines of Python: `x` is the value read, `y` one of the same shape, `z` any one, `out` the new
one. A node is text, or a function of the `Draft` that returns text, or None where the shape does not suit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.random_models import Draft

CLASSES = 4
Maker = str | Callable[["Draft"], str | None]


def heads_of(width: int) -> int:
    """Number of attention heads for a width."""
    return next(count for count in (4, 2, 1) if width % count == 0)


def groups_of(*widths: int) -> int:
    """Largest of 3, 2 and 1 that divides all of these."""
    return next(count for count in (3, 2, 1) if all(width % count == 0 for width in widths))


def conv(d: "Draft") -> str:
    images, channels, width = len(d.shape) == 4, d.shape[1], d.width()
    name = d.rng.choice(("Conv", "Conv", "ConvTranspose")) + ("2d" if images else "1d")
    groups = groups_of(channels, width) if d.rng.random() < 0.4 else 1
    kernel, stride, padding = d.rng.choice(((3, 1, 1), (3, 2, 1), (1, 1, 0), (2, 2, 0), (3, 1, 0)))
    bias = d.rng.random() < 0.7
    arguments = f"{channels}, {width}, {kernel}, stride={stride}, padding={padding}, groups={groups}, bias={bias}"
    return f"out = {d.module(f'nn.{name}({arguments})')}(x)"


def norm(d: "Draft") -> str:
    channels, rank = d.shape[1], {2: "1d", 3: "1d", 4: "2d"}[len(d.shape)]
    choices = [
        f"nn.BatchNorm{rank}({channels})",
        f"nn.BatchNorm{rank}({channels}, track_running_stats=False)",
        f"nn.BatchNorm{rank}({channels}, affine=False, momentum=0.3)",
        f"nn.GroupNorm({groups_of(channels)}, {channels})",
        f"nn.LayerNorm({d.shape[-1]})",
        f"nn.RMSNorm({d.shape[-1]})",
    ]
    if rank == "2d" or len(d.shape) == 3:
        choices += [f"nn.InstanceNorm{rank}({channels}, affine=True)"]
        choices += [f"nn.InstanceNorm{rank}({channels}, track_running_stats=True)"]
    return f"out = {d.module(d.rng.choice(choices))}(x)"


def attention(d: "Draft") -> str:
    width = d.shape[-1]
    made = d.module(f"nn.MultiheadAttention({width}, {heads_of(width)}, dropout={d.chance()}, batch_first=True)")
    weights = d.rng.choice((True, False))
    return f"out = {made}(x, y, y, need_weights={weights})[0]"


def scaled_dot_product(d: "Draft") -> str:
    width, dropout = d.shape[-1], d.rng.choice((0.0, 0.0, 0.1))
    mask = d.rng.choice(("", "", ", is_causal=True", ", attn_mask=(x @ x.transpose(-1, -2) > 0).unsqueeze(1)"))
    query = f"x.unflatten(-1, ({heads_of(width)}, -1)).transpose(1, 2)"
    other = query.replace("x", "y")
    if mask.startswith(", attn_mask"):
        mask = f", attn_mask=torch.ones({d.shape[1]}, {d.shape[1]}, dtype=torch.bool).tril()"
    return (
        f"out = F.scaled_dot_product_attention({query}, {other}, {other}{mask}, dropout_p={dropout})"
        ".transpose(1, 2).flatten(2)"
    )


def encoder_layer(d: "Draft") -> str:
    width, first = d.shape[-1], d.rng.random() < 0.5
    arguments = f"{width}, {heads_of(width)}, {2 * width}, dropout={d.chance()}, norm_first={first}, batch_first=True"
    return f"out = {d.module(f'nn.TransformerEncoderLayer({arguments})')}(x)"


def recurrent(d: "Draft") -> str:
    name, layers = d.rng.choice(("RNN", "GRU", "LSTM")), d.rng.randint(1, 2)
    dropout = d.rng.choice((0.0, 0.3)) if layers > 1 else 0.0
    bidirectional = d.rng.random() < 0.3
    arguments = f"{d.shape[-1]}, {d.width()}, {layers}, dropout={dropout}, bidirectional={bidirectional}"
    return f"out = {d.module(f'nn.{name}({arguments}, batch_first=True)')}(x)[0]"


def linear(d: "Draft") -> str:
    return f"out = {d.module(f'nn.Linear({d.shape[-1]}, {d.width()}, bias={d.rng.random() < 0.8})')}(x)"


def twice(d: "Draft") -> str:
    made = d.module(f"nn.Linear({d.shape[-1]}, {d.shape[-1]})")
    return f"out = {made}(torch.tanh({made}(x)))"


def tied(d: "Draft") -> str:
    first, last = (d.module(f"nn.Linear({d.shape[-1]}, {d.shape[-1]}, bias=False)") for _ in range(2))
    d.modules.append(f"{last}.weight = {first}.weight")
    return f"out = {last}(F.gelu({first}(x)))"


def tied_functional(d: "Draft") -> str:
    made = d.module(f"nn.Linear({d.shape[-1]}, {d.width()})")
    return f"out = F.linear({made}(x), {made}.weight.t())"


def parameter(d: "Draft") -> str:
    made = d.module(f"nn.Parameter(torch.randn({d.shape[-1]}))", "p")
    return d.rng.choice((f"out = x * {made}", f"out = x + {made}.exp().clamp(max=3)", f"out = x + {made}.expand_as(x)"))


def buffer(d: "Draft") -> str:
    made = d.module("nn.Buffer(torch.zeros(()))", "b")
    change = d.rng.choice(
        (f"{made}.mul_(0.9).add_(x.detach().mean())", f"{made}.copy_(0.5 * {made} + x.mean().detach())")
    )
    return f"with torch.no_grad():\n    {change}\nout = x + {made}"


def embedding(d: "Draft") -> str:
    made = d.module(f"nn.Embedding(9, {d.shape[-1]}, padding_idx={d.rng.choice((None, 0))})")
    if len(d.shape) == 3 and d.rng.random() < 0.5:
        return f"out = torch.cat([x, {made}(tokens)], 1)"
    return f"out = x + {made}(tokens).mean(1).view({d.shape[0]}, *[1] * {len(d.shape) - 2}, {d.shape[-1]})"


def bilinear(d: "Draft") -> str:
    return f"out = {d.module(f'nn.Bilinear({d.shape[-1]}, {d.shape[-1]}, {d.width()})')}(x, y)"


def dropout(d: "Draft") -> str:
    kinds = ["nn.Dropout", "nn.Dropout", "nn.AlphaDropout", "nn.FeatureAlphaDropout"]
    kinds += {2: [], 3: ["nn.Dropout1d"], 4: ["nn.Dropout2d", "nn.Dropout2d"]}[len(d.shape)]
    return f"out = {d.module(f'{d.rng.choice(kinds)}({d.chance()})')}(x)"


def dropout_in_place(d: "Draft") -> str:
    return f"out = F.dropout(x * 1.5, {d.chance()}, inplace=True)"


def prelu(d: "Draft") -> str:
    return f"out = {d.module(f'nn.PReLU({d.rng.choice((1, d.shape[1]))})')}(x)"


def slice_assignment(d: "Draft") -> str:
    dim = d.rng.randrange(1, len(d.shape))
    start = ", ".join([":"] * dim)
    k, source = d.below(d.shape[dim]), d.rng.choice(("x.clone()", "x * 1.0", "torch.zeros_like(x)", "torch.tanh(x)"))
    change = d.rng.choice((
        f"out[{start}, :{k}] = x[{start}, :{k}] * 0.3",
        f"out[{start}, {k}:] = y[{start}, {k}:]",
        f"out[{start}, ::2] = y[{start}, ::2].tanh()",
        f"out[{start}, :{k}] = 0.5",
        f"out[{start}, :{k}] = y[{start}, :1]",
        f"out[{start}, 0] = y.mean()",
        f"out[{start}, -1] = x[{start}, 0]",
        f"out[{start}, :{k}] = y[{start}, :{k}].double()",
        f"out[{start}, :{k}][{start}, ::2] = 0.25",
        f"out[{start}, :{k}][{start}, :1] += y[{start}, :1]",
        f"out[{start}, [0, -1]] = y[{start}, [-1, 0]]",
        f"out[{start}, :{k}] *= 0.5",
        "out[out > 0.5] = 0.5",
        "out[x > 0] = -0.5",
    ))  # fmt: skip
    return f"out = {source}\n{change}"


def in_place(d: "Draft") -> str:
    k = d.below(d.shape[1])
    change = d.rng.choice((
        "{}.add_(0.5)", "{}.mul_(0.7)", "{}.masked_fill_(y > 0.5, 0.1)", "{}.add_(y)", "{}.relu_()", "{}.clamp_(-1, 1)",
        "{}.sub_(y.detach())", f"{{}}[:, :{k}].mul_(0.5)", f"{{}}[:, :{k}] = 0.5", "{}.tanh_()", "{}.index_fill_(1, torch.tensor([0]), 0.3)",
        f"{{}}.narrow(1, 0, {k}).add_(1)", "{}.copy_(y * 0.5)", "{}.zero_().add_(y)",
    ))  # fmt: skip
    target, after = d.rng.choice((("x", "out = x + 0.1"), ("x", "out = x * y"), ("out", "")))
    before = "" if target == "x" else d.rng.choice(("out = x * 0.9\n", "out = x + y\n", "out = x.clone()\n"))
    return f"{before}{change.format(target)}\n{after}".rstrip()


def part(d: "Draft") -> str:
    dim = d.rng.randrange(1, len(d.shape))
    size = d.shape[dim]
    k = d.below(size)
    return d.rng.choice((
        f"out = x.narrow({dim}, 0, {k})",
        f"out = x.split([{k}, {size - k}], {dim})[{d.rng.randrange(2)}]",
        f"a, b = x.chunk(2, {dim})\nout = a.sigmoid() * b",
        f"out = x.chunk(2, {dim})[0] + 1",
        f"out = x.unfold({dim}, {min(2, size)}, {d.rng.randint(1, 2)})",
        f"out = x.index_select({dim}, torch.tensor([0, {size - 1}, 0]))",
        f"out = x.flip({dim})",
        f"out = x.roll(1, {dim})",
        f"out = torch.cat([x[(slice(None),) * {dim} + (slice({k}, None),)], x], {dim})",
        f"out = x.repeat_interleave(2, {dim})",
        f"out = x.cumsum({dim}) * 0.3",
        f"out = x.softmax({dim})",
        f"out = x - x.logsumexp({dim}, keepdim=True)",
        f"out = x - x.amax({dim}, keepdim=True)",
        f"out = x.max({dim}, keepdim=True).values + y",
        f"out = x.sort({dim}).values",
        f"out = x.topk({k}, {dim}).values",
        f"out = x / (1 + x.std({dim}, keepdim=True))" if size > 1 else "out = x + 1",
        f"out = x.gather({dim}, y.argsort({dim}))",
    ))  # fmt: skip


def join(d: "Draft") -> str:
    dim = d.rng.randrange(1, len(d.shape))
    return d.rng.choice((
        f"out = torch.cat([x, y], {dim})", f"out = torch.cat([x, y.detach(), x * 2], {dim})",
        f"out = torch.stack([x, y], {dim}).mean({dim})", "out = x + y", "out = x * torch.sigmoid(y)", "out = x - 0.5 * y",
        "out = x / (1 + y.abs())", "out = torch.where(y > 0, x, 0.1 * y)", "out = torch.maximum(x, y)", "out = x.lerp(y, 0.3)",
        "out = torch.addcmul(x, x, y, value=0.1)", "out = x * torch.sigmoid(z.mean())", "out = x + z.std().detach()",
        "out = x * F.one_hot(y.argmax(-1), y.shape[-1])", "out = x.masked_fill(y > 0.3, -0.3)",
    ))  # fmt: skip


def resize(d: "Draft") -> str:
    scale = d.rng.choice(("scale_factor=2", f"size=({d.rng.randint(3, 9)}, {d.rng.randint(3, 9)})", "scale_factor=0.7"))
    mode = d.rng.choice(("'nearest'", "'bilinear'", "'bilinear', align_corners=True", "'area'", "'bicubic'"))
    return f"out = F.interpolate(x, {scale}, mode={mode})"


POINTWISE: list[Maker] = [
    "out = torch.relu(x)", "out = F.gelu(x)", "out = F.gelu(x, approximate='tanh')", "out = F.silu(x)", "out = F.elu(x)",
    "out = torch.sigmoid(x)", "out = torch.tanh(x)", "out = F.softplus(x)", "out = F.leaky_relu(x, 0.1)", "out = F.hardswish(x)",
    "out = x.clamp(-1, 1)", "out = F.relu6(x)", "out = (x.abs() + 0.1).sqrt()", "out = x.clamp(max=2).exp()", "out = F.mish(x)",
    "out = F.normalize(x, dim=-1)", "out = x.log_softmax(-1)", "out = F.selu(x)", "out = F.logsigmoid(x)", "out = x.sin()",
    "out = F.hardtanh(x)", "out = F.celu(x)", "out = x.square() * 0.3", "out = (x.abs() + 0.5).log()", "out = x.erf()",
    "out = F.glu(torch.cat([x, y], 1), 1)", "out = F.relu(x * 1.0, inplace=True)", "out = F.silu(x + 0.0, inplace=True)",
    "out = F.leaky_relu(x + y, 0.2, inplace=True)", "out = F.hardswish(x * 2.0, inplace=True)", "out = F.elu(x * 1.1, inplace=True)",
    "out = x.bfloat16().float()", "out = x.double().mul(0.5).float()", "out = x.half().float() * 0.5", "out = F.softsign(x)",
    "out = x.detach() + 0.1 * x", "out = x + torch.arange(x.shape[-1]).to(x.dtype)", "out = x + torch.rand_like(x) * 0.1",
    "out = x + torch.randn(x.shape) * 0.1", "out = x * torch.bernoulli(torch.full_like(x, 0.7))", prelu, parameter, buffer,
]  # fmt: skip

VIEWS: list[Maker] = [
    "out = x.transpose(-1, -2)", "out = x.unsqueeze(1)", "out = x.unsqueeze(1).expand(-1, 3, *x.shape[1:])", "out = x.flatten(1)",
    "out = x.transpose(-1, -2).contiguous()", "out = x.reshape(x.shape[0], -1)", "out = x[:, ::2]", "out = x[..., :1]",
    "out = x.unflatten(-1, (2, -1))", "out = x.movedim(-1, 1)", "out = x.view_as(x)", "out = x[:, None, ..., 1:]", part, part,
]  # fmt: skip

NODES: list[tuple[tuple[int, ...], list[Maker]]] = [
    ((2, 3, 4), POINTWISE),
    ((2, 3, 4), [linear, linear, norm, norm, twice, tied, tied_functional, bilinear]),
    ((2, 3, 4), [join]),
    ((2, 3, 4), VIEWS),
    ((2, 3, 4), [slice_assignment, in_place]),
    ((2, 3, 4), [dropout, dropout, dropout_in_place, embedding]),
    ((3, 4), [conv]),
    ((3,), [attention, scaled_dot_product, scaled_dot_product, recurrent, recurrent, encoder_layer, "out = x @ y.transpose(1, 2)"]),
    ((3,), ["out = x.mean(1)", "out = x[:, -1]", "out = F.max_pool1d(x, 2)", "out = F.avg_pool1d(x, 2)", "out = F.pad(x, (1, 0, 0, 1))"]),
    ((4,), ["out = F.max_pool2d(x, 2)", "out = F.avg_pool2d(x, 2)", "out = F.adaptive_avg_pool2d(x, 2)", "out = x.mean((2, 3))",
            "out = x.flatten(2).transpose(1, 2)", "out = F.pad(x, (1, 1, 1, 1), mode='reflect')", "out = F.adaptive_max_pool2d(x, 2)",
            "out = F.pixel_unshuffle(x, 2)", "out = F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2)", "out = F.pad(x, (1, 2, 0, 1))",
            "out = F.local_response_norm(x, 2)", "out = F.unfold(x, 2)", resize, resize]),
]  # fmt: skip
"""Groups of nodes with the numbers of dimensions that they suit; each group is as likely as the others."""

HOT = f"F.one_hot(labels, {CLASSES}).to(p.dtype)"
LOSSES = [
    "loss = F.cross_entropy(p, labels)",
    "loss = F.cross_entropy(p, labels, label_smoothing=0.1)",
    f"loss = F.cross_entropy(p, labels, weight=torch.linspace(0.5, 1.5, {CLASSES}))",
    "loss = F.nll_loss(p.log_softmax(1), labels)",
    "loss = p.square().mean()",
    f"loss = F.mse_loss(p, {HOT})",
    f"loss = F.smooth_l1_loss(p, {HOT})",
    f"loss = F.huber_loss(p, {HOT})",
    f"loss = F.binary_cross_entropy_with_logits(p, {HOT})",
    f"loss = F.binary_cross_entropy(p.sigmoid(), {HOT})",
    "loss = F.kl_div(p.log_softmax(1), p.detach().roll(1, 0).softmax(1), reduction='batchmean')",
    "loss = F.cross_entropy(p, labels) + 0.1 * v.float().square().mean()",
    "loss = F.cross_entropy(p, p.detach().flip(0).softmax(1))",
]
EXTRAS = [
    "loss",
    "loss",
    "(loss, p)",
    "(loss, {'p': p, 'hits': (p.argmax(1) == labels).sum()})",
    "(loss, v.detach().mean(), 3)",
]
_GROUPS = (
    "[{'params': [p for p in model.parameters() if p.dim() > 1], 'weight_decay': 0.1}, "
    "{'params': [p for p in model.parameters() if p.dim() < 2], 'lr': 0.02}]"
)
OPTIMIZERS = [
    "torch.optim.SGD(model.parameters(), lr=0.05)",
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)",
    f"torch.optim.SGD({_GROUPS}, lr=0.05, momentum=0.9, dampening=0.1)",
    "torch.optim.AdamW(model.parameters(), lr=0.01)",
    "torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, foreach=True)",
    f"torch.optim.AdamW({_GROUPS}, lr=0.01, foreach=False)",
    "torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5, centered=True)",
    f"torch.optim.RMSprop({_GROUPS}, lr=0.005)",
    "torch.optim.NAdam(model.parameters(), lr=0.01)",
    f"torch.optim.NAdam({_GROUPS}, lr=0.01)",
]
