"""Models for Echo: a translator of LSTMs with attention, and a stack of products with cheap ops between them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Translator(nn.Module):
    """Encoder and decoder of one LSTM layer each, with attention over all encoder states at every word.

    The scores are those of Bahdanau et al. 2014: a sum and a tanh as wide as the states for every pair of words. The
    attended state feeds the next step (Luong et al. 2015).
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder, self.decoder = nn.LSTMCell(width, width), nn.LSTMCell(2 * width, width)
        self.keys, self.query = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        words = self.source(source)
        blank = words.new_zeros(words.shape[0], words.shape[2])
        hidden, cell, states = blank, blank, []
        for word in words.unbind(1):
            hidden, cell = self.encoder(word, (hidden, cell))
            states.append(hidden)
        memory = torch.stack(states, 1)
        keys, attended, outputs = self.keys(memory), blank, []
        for word in self.target(target).unbind(1):
            hidden, cell = self.decoder(torch.cat((word, attended), 1), (hidden, cell))
            scores = self.score(torch.tanh(keys + self.query(hidden).unsqueeze(1)))
            context = (F.softmax(scores, 1) * memory).sum(1)
            attended = torch.tanh(self.join(torch.cat((context, hidden), 1)))
            outputs.append(attended)
        return self.head(torch.stack(outputs, 1))


def translation_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of every next word."""
    source, target, following = batch
    return F.cross_entropy(model(source, target).flatten(0, 1), following.flatten())


def products(width: int, depth: int) -> nn.Module:
    """Make fully-connected layers with GELU between them, whose gradient reads its own input."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, width))
