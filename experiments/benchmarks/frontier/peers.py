"""PyTorch's own ways to run one training step with less memory, by name.

A peer changes the model's forwards, or the loss function, of a workload. The step around it is the same for all:
gradients dropped, forward, loss, backward, the optimizer's step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autotune.errors import ConfigError
from autotune.workloads.memory_format import convert_batch, convert_model
from autotune.workloads.workload import LossFn, Workload
from autotune.workloads.zoo.lstm import Looped
from experiments.benchmarks.frontier.models import FACTORIES

BLOCKS = (
    "ResNetBasicLayer",
    "ResNetBottleNeckLayer",
    "MobileNetV2InvertedResidual",
    "GPT2Block",
    "BertLayer",
    "ViTLayer",
    "LlamaDecoderLayer",
    "T5Block",
    "UNetBlock",
)
"""Classes whose instances form a model's chain of blocks: of `transformers`, and the U-Net's."""
CHUNK_STEPS = 10
"""Time steps of the LSTM's loop that form a block."""
aten = torch.ops.aten
SAVED = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default]
"""Operators whose results selective checkpoint keeps."""

Forwards = list[tuple[torch.nn.Module, Callable[..., Any]]]


@dataclass
class PeerStep:
    """Loss function and forwards of a workload as a peer runs it."""

    loss_fn: LossFn
    forwards: Forwards

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the model's forwards inside, and restore them afterwards."""
        for module, forward in self.forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self.forwards:
                del module.__dict__["forward"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`torch.utils.checkpoint` around every block; results of the operators in `saved` are kept."""

    saved: tuple[Any, ...] = ()

    def build(self, workload: Workload) -> PeerStep:
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
        if self.saved:
            run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, list(self.saved)))
        forwards: Forwards = [(block, partial(run, block.forward)) for block in blocks(workload.model)]
        for loop in loops(workload.model):
            forwards.append((loop, partial(_in_chunks, loop, run)))
        return _changed(workload, forwards)


@dataclass(frozen=True, slots=True)
class Compiled:
    """`torch.compile` of forward and loss, with `activation_memory_budget` for what their backward keeps."""

    backend: str
    budget: float

    def build(self, workload: Workload) -> PeerStep:
        assert workload.loss_fn is not None
        torch._inductor.config.compile_threads = 1  # a pool's processes would be charged, and would linger
        torch._inductor.config.fallback_random = True  # eager's random numbers: masks can be compared
        compile_graph = torch._dynamo.lookup_backend(self.backend)

        def backend(graph: Any, inputs: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=self.budget):
                return compile_graph(graph, inputs)

        loss_fn = workload.loss_fn

        def step(model: torch.nn.Module, batch: Any) -> Any:
            return loss_fn(model, batch)

        return PeerStep(torch.compile(step, backend=backend, fullgraph=True, dynamic=False), [])


Peer = Checkpoint | Compiled

PEERS: dict[str, Peer] = {
    "checkpoint": Checkpoint(),
    "selective": Checkpoint(tuple(SAVED)),
    "aot_eager 0.5": Compiled("aot_eager", 0.5),
    "aot_eager 0.1": Compiled("aot_eager", 0.1),
    "inductor 1": Compiled("inductor", 1.0),
    "inductor 0.5": Compiled("inductor", 0.5),
    "inductor 0.3": Compiled("inductor", 0.3),
    "inductor 0.1": Compiled("inductor", 0.1),
}
"""Peers by name."""

ROUNDED = "eager, rounded"
"""Eager with every parameter off by at most one ulp, which shows the effect of rounding on a gradient."""


def workload(peer: str, model: str, *, still: bool = False, memory_format: str = "", **arguments: Any) -> Workload:
    """Make a workload that always runs like this peer, in a memory format; `still`: updates leave the parameters as they are.

    After one update of a net with batch normalization, gradients that differ by an ulp have nothing in common. So the
    results to compare with eager's must come before any update.
    """
    base = FACTORIES[model](**arguments)
    convert_model(base.model, base.optimizer, memory_format)
    base.batch = convert_batch(base.batch, memory_format)
    if still:
        disable_updates(base)
    if peer == ROUNDED:
        _round(base.model)
    if peer in ("eager", ROUNDED):
        return base
    peer_step = PEERS[peer].build(base)
    for module, forward in peer_step.forwards:
        module.__dict__["forward"] = forward
    return replace(base, loss_fn=peer_step.loss_fn)


def disable_updates(workload: Workload) -> None:
    """Set the learning rate to 0, so that the optimizer's step leaves the parameters as they are."""
    assert workload.optimizer is not None
    for group in workload.optimizer.param_groups:
        group["lr"] = 0.0


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of the model's chain in order."""
    return [module for module in model.modules() if type(module).__name__ in BLOCKS]


def loops(model: torch.nn.Module) -> list[Looped]:
    """Return the model's loops over time steps."""
    return [module for module in model.modules() if isinstance(module, Looped)]


def _round(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            direction = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.copy_(torch.nextafter(parameter, parameter + direction))


def _changed(workload: Workload, forwards: Forwards) -> PeerStep:
    if not forwards:
        name = type(workload.model).__name__
        raise ConfigError(f"{name} has no block to checkpoint; known: {', '.join(BLOCKS)}, Looped")
    assert workload.loss_fn is not None
    return PeerStep(workload.loss_fn, forwards)


def _in_chunks(loop: Looped, run: Any, sequence: torch.Tensor) -> torch.Tensor:
    """Run the loop over all time steps, and keep only the states between chunks of `CHUNK_STEPS`."""
    blank = sequence.new_zeros(sequence.shape[0], sequence.shape[2])
    states = [blank] * (2 * len(loop.cells))
    outputs = []
    for inputs in sequence.split(CHUNK_STEPS, dim=1):
        output, *states = run(_chunk, loop, inputs, *states)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _chunk(loop: Looped, sequence: torch.Tensor, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outputs, states = loop.run(sequence, list(zip(flat[::2], flat[1::2], strict=True)))
    return outputs, *(part for state in states for part in state)
