"""Plain torch: layers, tensor operations and losses, each in a small model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.coverage.subject import Subject, adamw, sgd

ROWS, WIDTH, TOKENS, VOCABULARY, CLASSES = 8, 16, 12, 40, 4


class Layers(nn.Module):
    """Model of named layers whose forward is a function of the module and the inputs."""

    def __init__(self, run: Callable[[Any, Any], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, inputs: Any) -> Tensor:
        return self._run(self, inputs)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of the model's outputs."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def regress(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of the model's outputs, summed over their last dimension."""
    inputs, targets = batch
    return F.mse_loss(model(inputs).flatten(1).sum(1), targets)


def labelled(*shape: int) -> Callable[[torch.Generator], Any]:
    """Return a function that draws inputs of a shape, and a class for each row."""
    return lambda generator: (
        torch.randn(shape, generator=generator),
        torch.randint(CLASSES, shape[:1], generator=generator),
    )


def valued(*shape: int) -> Callable[[torch.Generator], Any]:
    """Return a function that draws inputs of a shape, and a number for each row."""
    return lambda generator: (torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator))


def worded(generator: torch.Generator) -> Any:
    """Return token ids of shape (8, 12), and a class for each row."""
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    return ids, torch.randint(CLASSES, (ROWS,), generator=generator)


def make_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.BatchNorm2d(16), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 8, 3, padding=1), nn.GroupNorm(2, 8),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def _volumes_back() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, stride=2, padding=1), nn.InstanceNorm3d(4, affine=True), nn.ReLU(),
        nn.ConvTranspose3d(4, 4, 2, stride=2), nn.BatchNorm3d(4), nn.ReLU(), nn.ConvTranspose3d(4, 1, 3, padding=1),
    )  # fmt: skip


def _norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.LeakyReLU(0.1), nn.LocalResponseNorm(3), nn.Flatten(), nn.Linear(8 * 64, 16), nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _transposed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.BatchNorm2d(8), nn.PReLU(8), nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
        nn.Hardswish(), nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(scale_factor=0.5, mode="bilinear"), nn.Tanh(),
    )  # fmt: skip


def _dilated() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(WIDTH, 16, 1)]
    for power in range(4):
        layers += [
            nn.Conv1d(16, 16, 3, padding=2**power, dilation=2**power, padding_mode="circular"),
            nn.GLU(1),
            nn.Conv1d(8, 16, 1),
            nn.Softplus(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES))


def _recurrent(kind: Any, **settings: Any) -> nn.Module:
    directions = 2 if settings.get("bidirectional") else 1
    layers = {
        "words": nn.Embedding(VOCABULARY, WIDTH),
        "cells": kind(WIDTH, WIDTH, batch_first=True, **settings),
        "head": nn.Linear(directions * WIDTH, CLASSES),
    }
    return Layers(lambda self, ids: self.head(self.cells(self.words(ids))[0].mean(1)), **layers)


def _run_packed(self: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
    ids, lengths = inputs
    packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
    hidden: Tensor = self.cells(packed)[1][0]
    outputs: Tensor = self.head(hidden[-1])
    return outputs


def _packed() -> nn.Module:
    return Layers(
        _run_packed,
        words=nn.Embedding(VOCABULARY, WIDTH),
        cells=nn.LSTM(WIDTH, WIDTH, batch_first=True),
        head=nn.Linear(WIDTH, CLASSES),
    )


def _draw_lengths(generator: torch.Generator) -> Any:
    ids, labels = worded(generator)
    return (ids, torch.randint(2, TOKENS + 1, (ROWS,), generator=generator)), labels


def _run_cells(self: Any, ids: Tensor) -> Tensor:
    words = self.words(ids)
    state, memory = torch.zeros(ids.shape[0], WIDTH), torch.zeros(ids.shape[0], WIDTH)
    for position in range(TOKENS):
        state, memory = self.long(words[:, position], (state, memory))
        state = self.gated(words[:, position], state)
    outputs: Tensor = self.head(state)
    return outputs


def _cells() -> nn.Module:
    return Layers(
        _run_cells,
        words=nn.Embedding(VOCABULARY, WIDTH),
        long=nn.LSTMCell(WIDTH, WIDTH),
        gated=nn.GRUCell(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, CLASSES),
    )


def _run_bags(self: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, offsets, numbers = batch
    parts = [self.sums(ids, offsets), self.means(ids, offsets), self.most(ids, offsets), self.dense(numbers)]
    pairs = torch.stack(parts, 1)
    crossed = torch.bmm(pairs, pairs.transpose(1, 2)).flatten(1)
    outputs: Tensor = self.head(torch.cat([crossed, *parts], 1))
    return outputs


def _bags() -> nn.Module:
    bags = {
        mode: nn.EmbeddingBag(VOCABULARY, WIDTH, mode=kind)
        for mode, kind in (("sums", "sum"), ("means", "mean"), ("most", "max"))
    }
    return Layers(_run_bags, **bags, dense=nn.Linear(5, WIDTH), head=nn.Linear(16 + 4 * WIDTH, CLASSES))


def _draw_bags(generator: torch.Generator) -> Any:
    ids = torch.randint(VOCABULARY, (ROWS * 3,), generator=generator)
    numbers = torch.randn(ROWS, 5, generator=generator)
    return (ids, torch.arange(0, ROWS * 3, 3), numbers), torch.randint(CLASSES, (ROWS,), generator=generator)


def _run_transformer(self: Any, batch: Tensor) -> Tensor:
    words = self.words(batch)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    outputs: Tensor = self.head(self.blocks(words, words, tgt_mask=mask).mean(1))
    return outputs


def _transformer() -> nn.Module:
    blocks = nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.1, batch_first=True)
    return Layers(
        _run_transformer, words=nn.Embedding(VOCABULARY, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, CLASSES)
    )


def _run_padded(self: Any, ids: Tensor) -> Tensor:
    padding = ids < VOCABULARY // 4
    padding[:, 0] = False
    outputs: Tensor = self.head(self.blocks(self.words(ids), src_key_padding_mask=padding)[:, 0])
    return outputs


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    return Layers(
        _run_padded,
        words=nn.Embedding(VOCABULARY, WIDTH),
        blocks=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(WIDTH, CLASSES),
    )


def _run_attention(self: Any, ids: Tensor) -> Tensor:
    words = self.words(ids)
    attended, weights = self.attention(words, words, words, need_weights=True)
    heads = self.queries(words).unflatten(-1, (2, -1)).transpose(1, 2)
    causal = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
    outputs: Tensor = self.head(attended.mean(1) + causal.transpose(1, 2).flatten(2).mean(1) + weights.mean())
    return outputs


def _attention() -> nn.Module:
    return Layers(
        _run_attention, words=nn.Embedding(VOCABULARY, WIDTH), attention=nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
        queries=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def _subject(name: str, what: str, make: Callable[[], nn.Module], draw: Any, loss: Any = classify, *, follows_data: bool = False, optimizer: Any = adamw) -> Subject:  # fmt: skip
    return Subject(name, what, make, draw, loss, optimizer, follows_data=follows_data)


SUBJECTS: tuple[Subject, ...] = (
    _subject("mlp", "MLP with dropout", make_mlp, labelled(ROWS, WIDTH)),
    _subject("convolutions", "convolutions, batch norms, in-place ReLU", _convolutions, labelled(ROWS, 3, 16, 16), optimizer=sgd),
    _subject("convolutions_3d", "3D convolutions, batch and group norm", _volumes, labelled(4, 1, 8, 8, 8)),
    _subject("convolutions_3d_transposed", "transposed 3D convolutions, instance norm", _volumes_back, valued(4, 1, 8, 8, 8), regress),
    _subject("convolutions_transposed", "transposed convolutions, pixel shuffle, PReLU", _transposed, valued(4, 3, 16, 16), regress),
    _subject("convolutions_dilated", "dilated 1D convolutions, gates", _dilated, labelled(ROWS, WIDTH, TOKENS)),
    _subject("norms", "group, instance, layer, RMS and local response norms", _norms, labelled(ROWS, 3, 8, 8)),
    _subject("lstm", "LSTM of two layers with dropout", partial(_recurrent, nn.LSTM, num_layers=2, dropout=0.2), worded),
    _subject("lstm_bidirectional", "LSTM in both directions, projected", partial(_recurrent, nn.LSTM, bidirectional=True), worded),
    _subject("lstm_packed", "LSTM over packed sequences", _packed, _draw_lengths, follows_data=True),
    _subject("gru", "GRU of two layers with dropout", partial(_recurrent, nn.GRU, num_layers=2, dropout=0.2), worded),
    _subject("gru_bidirectional", "GRU in both directions", partial(_recurrent, nn.GRU, bidirectional=True), worded),
    _subject("rnn", "RNN of two layers with dropout", partial(_recurrent, nn.RNN, num_layers=2, dropout=0.2, nonlinearity="relu"), worded),
    _subject("cells", "LSTM and GRU cells in a Python loop", _cells, worded),
    _subject("embedding_bags", "EmbeddingBags of every mode, as in DLRM", _bags, _draw_bags),
    _subject("nn_transformer", "nn.Transformer with its causal mask", _transformer, worded),
    _subject("transformer_encoder", "nn.TransformerEncoder with padding", _encoder, worded),
    _subject("attention", "nn.MultiheadAttention, causal attention with dropout", _attention, worded),
)  # fmt: skip
