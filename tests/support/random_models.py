"""Random small training steps, drawn from a seed as Python source: `print(draw(17))` shows the seventeenth.

To add a node, add a line to one of the tables in `tests/support/random_nodes.py`.
"""

import linecache
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.workloads.workload import Workload
from tests.support.random_nodes import CLASSES, EXTRAS, LOSSES, NODES, OPTIMIZERS

FEWEST, MOST = 4, 25
"""Nodes of a model."""
LARGEST = 6000
"""Elements of a value, at most."""
NAMESPACE = {"torch": torch, "F": F, "nn": nn}


@dataclass(frozen=True)
class Node:
    """One value of the model: the lines that make it, the modules they call, and its shape."""

    out: str
    lines: tuple[str, ...]
    modules: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A training step as text; `str` of it is a module with `Model`, `loss_fn` and `make_optimizer`."""

    seed: int
    attempt: int
    shape: tuple[int, ...]
    nodes: tuple[Node, ...]
    heads: tuple[str, ...]
    frozen: tuple[str, ...]
    loss: str
    extras: str
    optimizer: str
    autocast: bool

    def __str__(self) -> str:
        widths = {"v0": self.shape} | {node.out: node.shape for node in self.nodes}
        modules = [line for node in self.nodes for line in node.modules]
        forward = [line for node in self.nodes for line in node.lines]
        logits = []
        for number, head in enumerate(self.heads):
            width = torch.Size(widths[head][1:]).numel()
            modules.append(f"self.head{number} = nn.Linear({width}, {CLASSES})")
            logits.append(f"self.head{number}({head}.flatten(1))")
        modules += [f"{one}.requires_grad_(False)" for one in self.frozen]
        context = "torch.autocast('cpu', dtype=torch.bfloat16)" if self.autocast else ""
        call = ["p, v = model(x, tokens)"]
        lines = [
            f"# seed {self.seed}, inputs {self.shape}",
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in modules),
            "",
            "    def forward(self, x, tokens):",
            "        v0 = x",
            *(f"        {line}" for line in forward),
            f"        return {' + '.join(logits)}, {self.heads[0]}",
            "",
            "def loss_fn(model, batch):",
            "    x, tokens, labels = batch",
            *([f"    with {context}:", f"        {call[0]}"] if context else [f"    {call[0]}"]),
            *(["    p = p.float()"] if context else []),
            *(f"    {line}" for line in self.loss.splitlines()),
            f"    return {self.extras}",
            "",
            "def make_optimizer(model):",
            f"    return {self.optimizer}",
        ]
        return "\n".join(lines) + "\n"

    def workload(self) -> Workload:
        """Make the step; two calls give twins."""
        name = f"random_model_{self.seed}.py"
        text = str(self)
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # errors quote the line
        scope: dict[str, Any] = dict(NAMESPACE)
        exec(compile(text, name, "exec"), scope)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = scope["Model"]()
        return Workload(model, scope["loss_fn"], scope["make_optimizer"](model), self.batch(0))

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, tokens and labels of one step."""
        drawn = torch.Generator().manual_seed(1000 * self.seed + number)
        count = self.shape[0]
        labels = torch.randint(CLASSES, (count,), generator=drawn)
        return torch.randn(self.shape, generator=drawn), torch.randint(9, (count, 4), generator=drawn), labels


@dataclass
class Draft:
    """A model while it is drawn; each line has already run once, so shapes are those of real tensors."""

    rng: random.Random
    shape: tuple[int, ...]
    """Of the value that the next node reads."""
    scope: dict[str, Any]
    values: dict[str, tuple[int, ...]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    """Of the next node."""
    count: int = 0

    def module(self, code: str, kind: str = "m") -> str:
        """Name a module, parameter or buffer of the model that is made by this code."""
        self.count += 1
        self.modules.append(f"self.{kind}{self.count} = {code}")
        return f"self.{kind}{self.count}"

    def width(self) -> int:
        """Draw a number of channels or features."""
        return self.rng.choice((3, 4, 6, 8))

    def chance(self) -> float:
        """Draw a dropout probability; the ends behave differently in torch."""
        return self.rng.choice((0.0, 0.1, 0.5, 1.0))

    def below(self, size: int) -> int:
        """Draw a number from 1 to size - 1, or 1."""
        return self.rng.randint(1, max(1, size - 1))


def random_workload(seed: int) -> Workload:
    """Make the training step of a seed; two calls give twins."""
    return draw(seed).workload()


@lru_cache(maxsize=512)
def draw(seed: int, nodes: int | None = None) -> Source:
    """Draw a step that runs in eager and stays finite, of so many nodes or a random number of them."""
    for attempt in range(20):
        source = _draw(seed, attempt, nodes)
        if runs_in_eager(source):
            return source
    raise AssertionError(f"seed {seed}: none of 20 models runs in eager")


def _draw(seed: int, attempt: int, nodes: int | None) -> Source:
    rng = random.Random(f"{seed}.{attempt}")
    count = rng.choice((1, 2, 3, 4))
    shape = rng.choice((
        (count, rng.randint(3, 12)),
        (count, rng.randint(2, 7), rng.choice((4, 6, 8))),
        (count, rng.randint(1, 6), rng.randint(4, 9), rng.randint(4, 9)),
    ))  # fmt: skip
    wanted = rng.randint(FEWEST, MOST)
    blank = Source(seed, attempt, shape, (), (), (), "", "loss", "", rng.random() < 0.1)
    made = tuple(_nodes(rng, blank, nodes or wanted))
    usable = [node.out for node in made if node.shape[0] == count]
    heads = list(dict.fromkeys([*usable[-1:], *rng.choices(usable, k=rng.randint(0, 3))])) if usable else ["v0"]
    own = [line.split(" = ")[0] for node in made for line in node.modules if " = nn." in line]
    frozen = tuple(one for one in own if rng.random() < 0.08)
    return replace(
        blank, nodes=made, heads=tuple(heads), frozen=frozen, loss=rng.choice(LOSSES), extras=rng.choice(EXTRAS),
        optimizer=rng.choice(OPTIMIZERS),
    )  # fmt: skip


def _nodes(rng: random.Random, blank: Source, wanted: int) -> Iterator[Node]:
    """Draw nodes one after the other: the first of a larger model are those of a smaller one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(blank.seed)
        inputs, tokens, _ = blank.batch(0)
        draft = Draft(rng, blank.shape, {**NAMESPACE, "self": nn.Module(), "x": inputs, "tokens": tokens})
        draft.scope["v0"] = inputs
        draft.values["v0"] = blank.shape
        made: list[Node] = []
        while len(made) < wanted:
            node = _node(draft, f"v{len(made) + 1}")
            if node is not None and _still_runs(blank, [*made, node]):
                made.append(node)
                draft.values[node.out] = node.shape
                yield node
            elif node is not None:
                del draft.scope[node.out]


def _node(draft: Draft, out: str) -> Node | None:
    """Draw a node and run its lines; None where it does not apply to the value that was drawn."""
    rng, names = draft.rng, list(draft.values)
    read = rng.choice(names[-2:] if rng.random() < 0.8 else names)
    draft.shape, draft.modules = draft.values[read], []
    group = rng.choice([group for (ranks, group) in NODES if len(draft.shape) in ranks])
    maker = rng.choice(group)
    text = maker if isinstance(maker, str) else maker(draft)
    if text is None:
        return None
    alike = [name for name in names if draft.values[name] == draft.shape]
    reads = {"x": read, "y": rng.choice(alike), "z": rng.choice(names), "out": out}
    lines = re.sub(r"(?<!\.)\b(x|y|z|out)\b(?!=)", lambda found: reads[found[0]], text).splitlines()
    scope = dict(draft.scope)
    try:
        exec("\n".join([*draft.modules, *lines]), scope)
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError, NotImplementedError):
        return None
    value = scope[out]
    if not 2 <= value.dim() <= 4 or not 0 < value.numel() <= LARGEST or not value.is_floating_point():
        return None
    draft.scope[out] = value
    return Node(out, tuple(lines), tuple(draft.modules), tuple(value.shape))


IN_PLACE = re.compile(r"\w_\(|\] = |out=")


def _still_runs(blank: Source, nodes: list[Node]) -> bool:
    """Whether backward is still possible; only what changes something in place can hinder it."""
    if not any(IN_PLACE.search(line) for line in nodes[-1].lines):
        return True
    usable = tuple(node.out for node in nodes if node.shape[0] == blank.shape[0])
    if not usable:
        return True
    return runs_in_eager(replace(blank, nodes=tuple(nodes), heads=usable, loss=LOSSES[0], optimizer=OPTIMIZERS[0]), 1)


def runs_in_eager(source: Source, steps: int = 2) -> bool:
    """Whether the step runs in plain PyTorch, changes nothing of its batch, trains something and stays finite."""
    try:
        workload = source.workload()
        assert workload.loss_fn is not None
        assert workload.optimizer is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for number in range(steps):
                batch = source.batch(number)
                made = workload.loss_fn(workload.model, batch)
                loss = made[0] if isinstance(made, tuple) else made
                loss.backward()
                workload.optimizer.step()
                workload.optimizer.zero_grad()
                if not all(map(torch.equal, batch, source.batch(number))):
                    return False
        return all(bool(part.isfinite().all()) for part in (loss, *workload.model.state_dict().values()))
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError, NameError, AttributeError):
        return False


def shrink(source: Source, fails: Callable[[Source], bool]) -> Source:
    """Leave out nodes, heads and extras, one after the other, as long as the step runs in eager and fails the same way."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(source):
            if runs_in_eager(candidate) and fails(candidate):
                source, smaller = candidate, True
                break
    return source


def _smaller(source: Source) -> Iterator[Source]:
    for head in source.heads if len(source.heads) > 1 else ():
        yield replace(source, heads=tuple(one for one in source.heads if one != head))
    for at in reversed(range(len(source.nodes))):
        node = source.nodes[at]
        before = [earlier.out for earlier in reversed(source.nodes[:at]) if earlier.shape == node.shape]
        before += ["v0"] * (source.shape == node.shape)
        for instead in [node.out, *before[:2]]:
            kept = source.nodes[:at] + tuple(_renamed(later, node.out, instead) for later in source.nodes[at + 1 :])
            heads = tuple(dict.fromkeys(instead if head == node.out else head for head in source.heads))
            if {node.out, "v0"}.isdisjoint(heads):
                yield replace(source, nodes=kept, heads=heads)
    if source.extras != "loss":
        yield replace(source, extras="loss")
    if source.autocast:
        yield replace(source, autocast=False)
    if source.frozen:
        yield replace(source, frozen=())
    if source.optimizer != OPTIMIZERS[0]:
        yield replace(source, optimizer=OPTIMIZERS[0])
    if source.loss != LOSSES[0]:
        yield replace(source, loss=LOSSES[0])


def _renamed(node: Node, old: str, new: str) -> Node:
    return replace(node, lines=tuple(re.sub(rf"\b{old}\b", new, line) for line in node.lines))
