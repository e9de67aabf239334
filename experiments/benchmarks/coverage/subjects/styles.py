"""Plain torch: unusual ways to write a model, a batch or a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from experiments.benchmarks.coverage.subject import Optimizer, Subject, adamw, sgd
from experiments.benchmarks.coverage.subjects.layers import (
    CLASSES,
    ROWS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Layers,
    classify,
    labelled,
    regress,
    valued,
    worded,
)
from experiments.benchmarks.coverage.subjects.training import make_layers


@dataclass
class _Output:
    logits: Tensor
    hidden: list[Tensor]


def _give_everything(self: Any, inputs: Tensor) -> Any:
    hidden = [self.first(inputs)]
    hidden.append(hidden[-1].relu())
    return {"outputs": _Output(self.last(hidden[-1]), hidden), "sizes": tuple(inputs.shape)}


def _read_output(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    result = model(batch[0])
    output = result["outputs"]
    loss = F.cross_entropy(output.logits, batch[1]) + 1e-3 * sum(part.square().mean() for part in output.hidden)
    return loss, {"logits": output.logits, "sizes": result["sizes"]}


class _Sample(NamedTuple):
    parts: list[Tensor]
    labels: Tensor


def _draw_nested(generator: torch.Generator) -> Any:
    parts = [torch.randn(ROWS, 4, generator=generator) for _ in range(4)]
    sample = _Sample(parts, torch.randint(CLASSES, (ROWS,), generator=generator))
    return {"samples": [sample], "weights": (torch.rand(ROWS, generator=generator), None), "scale": 0.5, "name": "a"}


def _read_nested(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    (sample,) = batch["samples"]
    losses = F.cross_entropy(model(torch.cat(sample.parts, 1)), sample.labels, reduction="none")
    return (losses * batch["weights"][0]).mean() * batch["scale"]


class _Lazy(nn.Module):
    """Model whose layers get their shapes, and one of its layers its existence, in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES)
        self(torch.zeros(2, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(inputs)).relu())
        return outputs


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    model = make_layers()
    parametrize.register_parametrization(model[3], "weight", _Symmetric())
    parametrizations.weight_norm(model[0])
    return model


class _Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4 for _ in range(3)])
        self.scales = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.full((WIDTH,), 0.5)})
        self.heads = nn.ModuleDict({"left": nn.Linear(WIDTH, CLASSES), "right": nn.Linear(WIDTH, CLASSES)})

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.weights:
            inputs = torch.tanh(inputs @ weight) * self.scales["a"]
        outputs: Tensor = sum(head(inputs * self.scales["b"]) for head in self.heads.values())  # type: ignore[assignment]
        return outputs


class _Statistics(nn.Module):
    """Layer that changes buffers in place, and reads them in the same step."""

    count: Tensor
    mean: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers(dropout=0.0)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.zeros(CLASSES, 2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        self.mean.lerp_(inputs.detach().mean(0), 1.0 / 8)
        outputs: Tensor = self.layers(inputs - self.mean) / self.count
        self.table[:, 0].add_(outputs.detach().mean(0))
        self.table.index_add_(0, torch.tensor([1, 2]), torch.ones(2, 2))
        return outputs + self.table[:, 0] * 1e-2


def _call_functionally(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    scaled = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, scaled, (batch[0],)), batch[1])


def _call_ensemble(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    def run(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(batch[0] @ weight) @ bias

    outputs = torch.vmap(run)(model.weights, model.biases).mean(0)
    return F.cross_entropy(outputs, batch[1])


class _Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, 8) / 4)
        self.biases = nn.Parameter(torch.randn(3, 8, CLASSES) / 4)


def _penalize_samples(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss with the norms of the gradients of each row, by `vmap` over `grad`."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (row[None],)), label[None])

    gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, *batch)
    return classify(model, batch) * gradients["0.weight"].flatten(1).norm(dim=1).mean().detach()


def _contract(self: Any, inputs: Tensor) -> Tensor:
    keys, values = self.first(inputs).unflatten(-1, (2, 4, 4)).unbind(-3)
    scores = torch.einsum("bthd,bshd->bhts", keys, keys).softmax(-1)
    mixed = torch.einsum("bhts,bshd->bthd", scores, values).flatten(-2)
    outputs: Tensor = self.last(torch.einsum("btd,t->bd", mixed, self.mix.weight[0]))
    return outputs


class _Route(torch.autograd.Function):
    """Function with arguments that are no tensors, two results, and one result without a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, mode: str, options: dict[str, float]) -> tuple[Tensor, Tensor]:
        largest, places = inputs.topk(2, dim=1)
        ctx.save_for_backward(places)
        ctx.mode, ctx.scale, ctx.width = mode, options["scale"], inputs.shape[1]
        ctx.mark_non_differentiable(places)
        return largest * options["scale"], places

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        gradient = torch.zeros(places.shape[0], ctx.width).scatter(1, places, gradients[0] * ctx.scale)
        return (gradient.abs() if ctx.mode == "absolute" else gradient), None, None


def _route(self: Any, inputs: Tensor) -> Tensor:
    largest, places = _Route.apply(self.first(inputs), "absolute", {"scale": 2.0})
    outputs: Tensor = self.last(largest) + F.one_hot(places[:, 0], 32).float() @ self.table.weight
    return outputs


def _thaw(model: nn.Sequential) -> nn.Sequential:
    """Freeze a layer in the middle, and a bias; the norms are trained."""
    model[3].requires_grad_(False)
    model[0].bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


def _run_checkpoints(self: Any, inputs: Tensor) -> Any:
    hidden = self.first(inputs)
    hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
    if self.reentrant:
        return self.stack(hidden)
    hidden = checkpoint(lambda x, factor: self.block(x) * factor, hidden, 0.5, use_reentrant=False)
    return checkpoint_sequential(self.stack, 2, hidden, use_reentrant=False)


def _checkpoints(*, reentrant: bool) -> nn.Module:
    model: Any = Layers(
        _run_checkpoints,
        first=nn.Linear(WIDTH, 32),
        block=nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()),
        stack=nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
    )
    model.reentrant = reentrant
    return model


def _quantize(self: Any, inputs: Tensor) -> Tensor:
    weight = self.first.weight
    scale = weight.detach().abs().amax(1) / 127
    zero = torch.zeros(weight.shape[0], dtype=torch.int32)
    quantized = torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -128, 127)
    hidden = F.linear(inputs, quantized, self.first.bias)
    outputs: Tensor = self.last(torch.fake_quantize_per_tensor_affine(hidden.relu(), 0.05, 0, 0, 255))
    return outputs


def _observe() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    observer = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), observer(), nn.Linear(32, CLASSES))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True, bias=False, add_bias_kv=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        mixed, weights = self.attention(words, words, words, key_padding_mask=ids == 0, need_weights=True)
        outputs: Tensor = self.head(mixed.mean(1)) + weights.var(-1).mean()
        return outputs


class _Spectral(nn.Module):
    """Fourier layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.cfloat) / 4)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        modes = torch.fft.rfft2(images)
        low = torch.zeros_like(modes)
        low[..., :4, :5] = modes[..., :4, :5] * self.weight
        images = torch.fft.irfft2(low, s=images.shape[-2:])
        angles = torch.view_as_real(low).square().sum((-1, -2, -3))
        outputs: Tensor = self.head(images.mean((-1, -2)) + 1e-2 * angles.sqrt())
        return outputs


def _upscale() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 3, stride=2, output_padding=1, groups=1), nn.SyncBatchNorm(8).eval(), nn.ELU(inplace=True),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1, dilation=1), nn.Hardswish(inplace=True), nn.AdaptiveMaxPool2d(4), nn.Upsample(scale_factor=2, mode="bicubic"),
    )  # fmt: skip


class _Averaged(nn.Module):
    """Student with a teacher whose weights follow the student's within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = make_layers(), make_layers().requires_grad_(False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                ours.mul_(0.99).add_(theirs, alpha=0.01)
            target = self.teacher(inputs)
        return self.student(inputs), target


def _follow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs, target = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + F.mse_loss(outputs, target)


class _Uncertain(nn.Module):
    """Loss of several parts, weighted by parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()
        self.deviations = nn.Parameter(torch.zeros(3))


def _weigh(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
    outputs = model.layers(batch[0])
    losses = {
        "classes": F.cross_entropy(outputs, batch[1]),
        "size": outputs.square().mean(),
        "entropy": -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean(),
    }
    total = sum(torch.exp(-s) * part + s for s, part in zip(model.deviations, losses.values(), strict=True))
    return total, {name: part.detach() for name, part in losses.items()}


def _run_repeatedly(self: Any, inputs: Tensor) -> Tensor:
    """Run one layer to a fixed point without gradients, then one step with them: a deep equilibrium model."""
    state = torch.zeros(inputs.shape[0], 32)
    with torch.no_grad():
        for _ in range(5):
            state = torch.tanh(self.layer(state) + self.entry(inputs))
    outputs: Tensor = self.last(torch.tanh(self.layer(state.detach()) + self.entry(inputs)))
    return outputs


def _pool_tiny() -> nn.Module:
    """Return convolutions down to 1 x 1 pixels with norms over the last dimension, in other memory layouts."""
    return Layers(
        lambda self, images: self.head(self.mix(self.norm(self.down(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))),
        down=nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 16, 2, stride=2)),
        norm=nn.LayerNorm(16),
        mix=nn.Sequential(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 1)),
        head=nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES)),
    )


def _recur_by_hand(self: Any, ids: Tensor) -> Tensor:
    words, state, gates = self.words(ids), torch.zeros(ids.shape[0], 16), []
    for word in words.unbind(1):
        update, reset = torch.sigmoid(self.gates(torch.cat([word, state], 1))).chunk(2, 1)
        state = torch.lerp(state, torch.tanh(self.new(torch.cat([word, state * reset], 1))), update)
        gates.append(update)
    outputs: Tensor = self.last(torch.stack(gates).mean(0) + state)
    return outputs


def _scan(self: Any, inputs: Tensor) -> Tensor:
    """Run a linear recurrence by cumulative sums of logarithms, and sort its result."""
    decay = F.logsigmoid(self.first(inputs))
    state = torch.logcumsumexp(decay.cumsum(1) + inputs.abs().log1p(), 1)
    ranked, order = state.sort(1, descending=True)
    outputs: Tensor = self.last(ranked.cummax(1).values + torch.take_along_dim(state, order.argsort(1), 1))
    return outputs


def _with_hooks() -> nn.Module:
    """Return a model with forward hooks that change inputs and outputs."""
    model: Any = make_layers()
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda _, args, output: output + args[0])
    return model


def _muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
    "asgd": partial(torch.optim.ASGD, lr=1e-2, t0=2),
    "sgd_nesterov": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "muon": _muon,
}
"""Optimizers of the MLP, beyond those of `training`."""


def _subject(name: str, what: str, make: Callable[[], nn.Module], loss: Any = classify, draw: Any = None, *, optimizer: Optimizer = adamw, follows_data: bool = False) -> Subject:  # fmt: skip
    return Subject(name, what, make, draw or labelled(ROWS, WIDTH), loss, optimizer, follows_data=follows_data)


def _two(run: Callable[[Any, Any], Tensor], width: int = WIDTH, **others: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Layers(run, first=nn.Linear(width, 32), last=nn.Linear(32, CLASSES), **others)


SUBJECTS: tuple[Subject, ...] = (
    _subject("outputs_nested", "outputs in a dict, a dataclass and a list", lambda: Layers(_give_everything, first=nn.Linear(WIDTH, 32), last=nn.Linear(32, CLASSES)), _read_output),
    _subject("batch_nested", "batch of dicts, lists, namedtuples, numbers and words", make_layers, _read_nested, _draw_nested),
    _subject("lazy", "lazy layers", _Lazy),
    _subject("parametrized", "parametrized weights: symmetric, and weight norm", _parametrized),
    _subject("collections", "ParameterList, ParameterDict and ModuleDict", _Collections),
    _subject("statistics", "buffers changed in place and read in one step", _Statistics),
    _subject("functional_call", "functional_call with scaled weights", make_layers, _call_functionally),
    _subject("ensemble", "vmap over an ensemble", _Ensemble, _call_ensemble),
    _subject("sample_gradients", "gradients of each row, by vmap over grad", partial(make_layers, dropout=0.0), _penalize_samples),
    _subject("einsum", "attention by einsum", lambda: Layers(_contract, first=nn.Linear(WIDTH, 32), mix=nn.Linear(TOKENS, 1), last=nn.Linear(16, CLASSES)), draw=labelled(ROWS, TOKENS, WIDTH)),
    _subject("autograd_function_options", "custom autograd function with a word, a dict and two results", lambda: Layers(_route, first=nn.Linear(WIDTH, 32), last=nn.Linear(2, CLASSES), table=nn.Linear(CLASSES, 32))),
    _subject("frozen_middle", "a frozen layer between trained ones", lambda: _thaw(make_layers())),
    _subject("checkpoints_sequential", "checkpoints with arguments, checkpoint_sequential", partial(_checkpoints, reentrant=False)),
    _subject("checkpoints_reentrant", "reentrant checkpoint", partial(_checkpoints, reentrant=True)),
    _subject("fake_quantized", "fake quantization of weights and activations", _two(_quantize)),
    _subject("fake_quantize_observers", "FakeQuantize with moving averages", _observe, follows_data=True),
    _subject("attention_weights", "MultiheadAttention with need_weights and padding", _Attention, draw=worded),
    _subject("fourier", "Fourier layer with complex weights", _Spectral, draw=labelled(4, 3, 8, 8)),
    _subject("upscale", "transposed convolutions, SyncBatchNorm in eval, bicubic", _upscale, regress, valued(4, 3, 6, 6)),
    _subject("averaged_teacher", "teacher that follows the student within the step", _Averaged, _follow),
    _subject("weighted_losses", "losses weighted by parameters", _Uncertain, _weigh),
    _subject("equilibrium", "fixed point without gradients, one step with them", lambda: Layers(_run_repeatedly, entry=nn.Linear(WIDTH, 32), layer=nn.Linear(32, 32), last=nn.Linear(32, CLASSES))),
    _subject("tiny_images", "images of one pixel between norms and convolutions", _pool_tiny, draw=labelled(ROWS, 3, 8, 8)),
    _subject("recurrence", "recurrence by hand over unbound tokens", lambda: Layers(_recur_by_hand, words=nn.Embedding(VOCABULARY, 16), gates=nn.Linear(32, 32), new=nn.Linear(32, 16), last=nn.Linear(16, CLASSES)), draw=worded),
    _subject("scan", "cumulative sums, sort, take_along_dim", lambda: Layers(_scan, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, CLASSES))),
    _subject("forward_hooks", "forward hooks that change inputs and outputs", _with_hooks),
    _subject("double", "weights in float64", lambda: make_layers().double(), draw=lambda g: (torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64), torch.randint(CLASSES, (ROWS,), generator=g)), optimizer=sgd),
    *(_subject(f"optimizer_{name}", f"MLP with {name}", make_layers, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()),
)  # fmt: skip
