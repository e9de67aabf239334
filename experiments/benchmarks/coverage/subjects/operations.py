"""Plain torch: operations on tensors, random numbers, parametrized weights, losses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.coverage.subject import Subject, adamw
from experiments.benchmarks.coverage.subjects.layers import (
    CLASSES,
    ROWS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Layers,
    classify,
    labelled,
    make_mlp,
)


def _run_spectrum(self: Any, signal: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(self.before(signal)) * self.filter.weight[0]
    filtered = torch.fft.irfft(spectrum, n=32)
    windows = torch.stft(filtered, 8, return_complex=True, window=torch.hann_window(8)).abs().mean((1, 2))
    outputs: Tensor = self.head(filtered + windows[:, None])
    return outputs


def _spectrum() -> nn.Module:
    return Layers(_run_spectrum, before=nn.Linear(WIDTH, 32), filter=nn.Embedding(1, 17), head=nn.Linear(32, CLASSES))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        turned = torch.polar(torch.ones_like(inputs), inputs) @ self.weight
        turned = turned * turned.conj().roll(1, -1) + torch.complex(inputs, -inputs)
        outputs: Tensor = self.head(torch.view_as_real(turned).flatten(1))
        return outputs


def _run_scatter(self: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    nodes, sources, targets = batch
    hidden = self.entry(nodes)
    messages = self.edge(torch.cat([hidden[sources], hidden[targets]], 1)).relu()
    summed = torch.zeros_like(hidden).index_add(0, targets, messages)
    largest = torch.full_like(hidden, -9.0).scatter_reduce(0, targets[:, None].expand_as(messages), messages, "amax")
    hidden = summed + largest.index_put((sources[:3],), summed[:3], accumulate=True)
    first = hidden.gather(1, hidden.argsort(1)[:, :WIDTH])
    kept = hidden.topk(4, dim=1).values.repeat(1, WIDTH // 4).cumsum(1) * 0.1
    outputs: Tensor = self.head(first + kept)
    return outputs


def _scatter() -> nn.Module:
    return Layers(
        _run_scatter, entry=nn.Linear(5, WIDTH), edge=nn.Linear(2 * WIDTH, WIDTH), head=nn.Linear(WIDTH, CLASSES)
    )


def _draw_graph(generator: torch.Generator) -> Any:
    ends = torch.randint(ROWS, (2, 24), generator=generator)
    return (torch.randn(ROWS, 5, generator=generator), ends[0], ends[1]), torch.randint(
        CLASSES, (ROWS,), generator=generator
    )


def _run_written(self: Any, inputs: Tensor) -> Tensor:
    hidden = self.first(inputs)
    hidden[:, : WIDTH // 2] *= 2
    hidden[1::2, 0] = hidden[::2, 1]
    hidden.add_(1).clamp_(-3, 3)
    flipped = hidden.flip(1).masked_fill(hidden > 2, 0.5)
    windows = flipped.unfold(1, 4, 2).sum(-1)
    outputs: Tensor = self.head(
        torch.cat([flipped.tril(), F.pad(windows, (0, 1)), torch.einsum("ij,kj->ik", flipped, hidden)], 1)
    )
    return outputs


def _written() -> nn.Module:
    return Layers(_run_written, first=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH + 8 + ROWS, CLASSES))


def _run_sampled(self: Any, images: Tensor) -> Tensor:
    turned = F.affine_grid(self.place(images.flatten(1)).view(-1, 2, 3).tanh(), list(images.shape), align_corners=False)
    sampled = F.grid_sample(images, turned, align_corners=False)
    pooled, places = F.max_pool2d(self.entry(sampled), 2, return_indices=True)
    columns = F.fold(F.unfold(F.max_unpool2d(pooled, places, 2), 2, stride=2), (8, 8), 2, stride=2)
    outputs: Tensor = self.head(F.interpolate(columns, size=(5, 5), mode="bicubic").flatten(1))
    return outputs


def _sampled() -> nn.Module:
    return Layers(_run_sampled, place=nn.Linear(3 * 64, 6), entry=nn.Conv2d(3, 4, 1), head=nn.Linear(100, CLASSES))


def _run_chance(self: Any, inputs: Tensor) -> Tensor:
    hidden = F.feature_alpha_dropout(self.first(inputs)[..., None], 0.2, self.training)[..., 0]
    hidden = F.rrelu(hidden, training=self.training) + 0.1 * torch.randn_like(hidden)
    chosen = F.gumbel_softmax(hidden, hard=True)
    kept = F.alpha_dropout(hidden, 0.1, self.training) * torch.bernoulli(torch.full_like(hidden, 0.9))
    outputs: Tensor = self.head(chosen + F.dropout1d(kept[None], 0.2, self.training)[0] + torch.rand(hidden.shape[1]))
    return outputs


def _chance() -> nn.Module:
    return Layers(_run_chance, first=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, CLASSES))


def _normed(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(
        wrap(nn.Linear(WIDTH, 32)), nn.Tanh(), wrap(nn.Linear(32, 32)), nn.Tanh(), nn.Linear(32, CLASSES)
    )


def _run_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    outputs = model(inputs)
    other = outputs.flip(0)
    chances = outputs.softmax(1)
    parts = [
        F.smooth_l1_loss(outputs, other.detach()), F.huber_loss(outputs, other), F.kl_div(chances.log(), other.softmax(1).detach(), reduction="batchmean"),
        F.binary_cross_entropy_with_logits(outputs, F.one_hot(labels, CLASSES).float(), pos_weight=torch.arange(1.0, CLASSES + 1)),
        F.binary_cross_entropy(chances, F.one_hot(labels, CLASSES).float()), F.nll_loss(chances.log(), labels, ignore_index=1),
        F.triplet_margin_loss(outputs, other, outputs.roll(1, 0)), F.cosine_embedding_loss(outputs, other, labels.sign() * 2 - 1), F.poisson_nll_loss(outputs, labels[:, None].float()),
        F.multi_margin_loss(outputs, labels), F.margin_ranking_loss(outputs[:, 0], other[:, 0], torch.ones(ROWS)),
        F.cross_entropy(outputs, labels, label_smoothing=0.1, weight=torch.arange(1.0, CLASSES + 1)), F.soft_margin_loss(outputs, labels[:, None].sign() * 2.0 - 1),
        F.cross_entropy(outputs, chances.detach()), F.l1_loss(outputs, other.detach()), F.hinge_embedding_loss(outputs, labels[:, None].sign() * 2 - 1),
    ]  # fmt: skip
    return torch.stack(parts).sum()


def _estimate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = model(batch[0])
    return F.gaussian_nll_loss(outputs, batch[0][:, :CLASSES], outputs.exp())


def _transcribe(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    scores = model(inputs).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, labels, torch.full((ROWS,), TOKENS), torch.full((ROWS,), 4))


def _draw_spoken(generator: torch.Generator) -> Any:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=generator), torch.randint(
        1, CLASSES, (ROWS, 4), generator=generator
    )


def _adapt(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    loss: Tensor = model.head(model.first(inputs), labels).loss
    return loss


def _adaptive() -> nn.Module:
    return Layers(
        lambda self, inputs: self.head.log_prob(self.first(inputs)),
        first=nn.Linear(WIDTH, WIDTH),
        head=nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, [8, 20]),
    )


def _draw_rare(generator: torch.Generator) -> Any:
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(VOCABULARY, (ROWS,), generator=generator)


def _run_bilinear(self: Any, inputs: Tensor) -> Tensor:
    left, right = inputs.chunk(2, 1)
    distance = torch.cdist(left, right).mean(1, keepdim=True)
    inverse = torch.linalg.solve(left.T @ left + 10 * torch.eye(8), self.first(left, right).T[:8]).T
    outputs: Tensor = self.head(
        torch.cat([inverse, distance, torch.linalg.vector_norm(inputs, dim=1, keepdim=True)], 1)
    )
    return outputs


def _bilinear() -> nn.Module:
    return Layers(_run_bilinear, first=nn.Bilinear(8, 8, 8), head=nn.Linear(10, CLASSES))


def _subject(name: str, what: str, make: Callable[[], nn.Module], draw: Any, loss: Any = classify, *, follows_data: bool = False, optimizer: Any = adamw) -> Subject:  # fmt: skip
    return Subject(name, what, make, draw, loss, optimizer, follows_data=follows_data)


SUBJECTS: tuple[Subject, ...] = (
    _subject("fft", "FFT, STFT, a filter that is trained", _spectrum, labelled(ROWS, WIDTH)),
    _subject("complex", "complex parameters", _Complex, labelled(ROWS, WIDTH)),
    _subject("scatter", "graph network: index_add, scatter_reduce, gather, topk", _scatter, _draw_graph),
    _subject("slices", "parts of tensors written in place", _written, labelled(ROWS, WIDTH)),
    _subject("sampling", "grid_sample, unpooling, unfold and fold", _sampled, labelled(ROWS, 3, 8, 8)),
    _subject("random_numbers", "every kind of dropout, noise, Gumbel softmax", _chance, labelled(ROWS, WIDTH)),
    _subject("weight_norm", "weight norm", partial(_normed, torch.nn.utils.parametrizations.weight_norm), labelled(ROWS, WIDTH)),
    _subject("spectral_norm", "spectral norm", partial(_normed, torch.nn.utils.parametrizations.spectral_norm), labelled(ROWS, WIDTH)),
    _subject("orthogonal", "orthogonal weights", partial(_normed, torch.nn.utils.parametrizations.orthogonal), labelled(ROWS, WIDTH)),
    _subject("losses", "sixteen losses of torch", make_mlp, labelled(ROWS, WIDTH), _run_losses),
    _subject("gaussian_loss", "Gaussian loss, which checks its variances", make_mlp, labelled(ROWS, WIDTH), _estimate),
    _subject("ctc_loss", "CTC loss", lambda: nn.Linear(WIDTH, CLASSES), _draw_spoken, _transcribe),
    _subject("adaptive_softmax", "AdaptiveLogSoftmaxWithLoss", _adaptive, _draw_rare, _adapt, follows_data=True),
    _subject("bilinear", "bilinear layer, distances, a linear solve", _bilinear, labelled(ROWS, WIDTH)),
)  # fmt: skip
