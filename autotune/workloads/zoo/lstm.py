"""LSTM language model (Zaremba et al. 2014), as a loop over cells with visible ops, or fused."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.workloads.workload import Workload
from autotune.workloads.zoo.assembly import Drawn, Dtype, OptimizerName, assemble, require_at_least, require_probability


def lstm(
    *,
    batch: int = 32,
    tokens: int = 60,
    depth: int = 2,
    width: int = 384,
    vocabulary: int = 8192,
    dtype: Dtype = "float32",
    dropout: float = 0.0,
    optimizer: OptimizerName = "adamw",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return an LSTM language model as a loop over `nn.LSTMCell`; by default 2 layers, 384 wide, 60 steps.

    `dropout` applies before, between and after the layers.
    """
    draw = _language_model(
        Looped, batch=batch, tokens=tokens, depth=depth, width=width, vocabulary=vocabulary, dropout=dropout
    )
    return assemble(draw, next_token_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)


def lstm_fused(
    *,
    batch: int = 32,
    tokens: int = 60,
    depth: int = 2,
    width: int = 384,
    vocabulary: int = 8192,
    dtype: Dtype = "float32",
    dropout: float = 0.0,
    optimizer: OptimizerName = "adamw",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """Return the model, weights and batch of `lstm` with one fused `nn.LSTM`."""
    draw = _language_model(
        Fused, batch=batch, tokens=tokens, depth=depth, width=width, vocabulary=vocabulary, dropout=dropout
    )
    return assemble(draw, next_token_loss, dtype=dtype, optimizer=optimizer, seed=seed, device=device)


class Looped(nn.Module):
    """LSTM cells that run one after the other, step by step."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequence: Tensor) -> Tensor:
        blank = sequence.new_zeros(sequence.shape[0], sequence.shape[2])
        return self.run(sequence, [(blank, blank) for _ in self.cells])[0]

    def run(self, sequence: Tensor, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the outputs of all steps, (batch, steps, width), and the final states of all layers."""
        states, outputs = list(states), []
        for inputs in sequence.unbind(1):
            hidden = inputs
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(hidden if layer == 0 else self.dropout(hidden), states[layer])
                hidden = states[layer][0]
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), states


class Fused(nn.Module):
    """LSTM that runs all steps of all layers in one call."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        # one layer has nothing to drop between: torch warns
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=dropout if depth > 1 else 0.0)

    def forward(self, sequence: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(sequence)[0]
        return outputs


class LanguageModel(nn.Module):
    """Language model that returns the logits of the next token for every token."""

    def __init__(self, body: nn.Module, width: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = body
        self.head = nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


def _language_model(
    body: Callable[[int, int, float], nn.Module],
    *,
    batch: int,
    tokens: int,
    depth: int,
    width: int,
    vocabulary: int,
    dropout: float,
) -> Callable[[], Drawn]:
    """Check the arguments and return a function that draws the model and its batch."""
    require_at_least(1, batch=batch, tokens=tokens, depth=depth, width=width)
    require_at_least(2, vocabulary=vocabulary)
    require_probability(dropout=dropout)

    def draw() -> Drawn:
        model = LanguageModel(body(width, depth, dropout), width, vocabulary, dropout)
        text = torch.randint(vocabulary, (batch, tokens + 1))
        return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return draw


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), following.flatten())
