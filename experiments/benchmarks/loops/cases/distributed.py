"""Two processes with gloo."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from autotune import errors
from autotune.errors import AutotuneError
from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, run, state
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]
RANKS = 2


def _on_ranks(case: Callable[[Way, int], Tensors], way: Way) -> Tensors:
    """Run a case on two ranks; yield what each yields."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (case, way, folder), nprocs=RANKS)
        for rank in range(RANKS):
            yielded, error = torch.load(Path(folder) / f"{rank}.pt")
            yield from yielded
            if error:
                kind, text = error
                known = getattr(errors, kind, None)
                raise known(text) if isinstance(known, type) else RuntimeError(f"{kind}: {text}")


def _run_rank(rank: int, case: Callable[[Way, int], Tensors], way: Way, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.manual_seed(5)
    yielded: list[torch.Tensor] = []
    error = None
    try:
        yielded.extend(part.detach().clone() for part in case(way, rank))
    except (AutotuneError, RuntimeError, AttributeError, TypeError) as raised:
        error = type(raised).__name__, str(raised)
    torch.save((yielded, error), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


class _LossModule(nn.Module):
    """The plain counterpart of a planned loss in DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        return loss_fn(self.model, batch)


def _plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def _in_ddp(way: Way, rank: int, accumulate: int) -> Tensors:
    model = _plain_net()
    inner = way.loss(model, loss_fn) if way.is_planned else _LossModule(model)
    wrapped = DistributedDataParallel(inner)
    optimizer = adamw(model)
    for number, batch in enumerate(batches(8)[rank::RANKS]):
        updates = number % accumulate == accumulate - 1
        with nullcontext() if updates else wrapped.no_sync():
            (wrapped(batch) / accumulate).backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
    yield from state(model, optimizer)


def _ddp_of_a_loss(way: Way, rank: int) -> Tensors:
    yield from _in_ddp(way, rank, 1)


def drop_in_loss_ddp_gloo_2(way: Way) -> Tensors:
    """Train a loss in DistributedDataParallel."""
    yield from _on_ranks(_ddp_of_a_loss, way)


def _ddp_without_sync(way: Way, rank: int) -> Tensors:
    yield from _in_ddp(way, rank, 2)


def ddp_no_sync_gloo_2(way: Way) -> Tensors:
    """Accumulate with `no_sync` in DistributedDataParallel."""
    yield from _on_ranks(_ddp_without_sync, way)


def _ddp_in_a_step(way: Way, rank: int) -> Tensors:
    wrapped = DistributedDataParallel(_plain_net())
    data = batches(6)[rank::RANKS]
    yield from run(way.step(wrapped, loss_fn, adamw(wrapped), data[0]), data)
    yield from state(wrapped)


def ddp_gloo_2(way: Way) -> Tensors:
    """Pass DistributedDataParallel to a step."""
    yield from _on_ranks(_ddp_in_a_step, way)


def _inner_module(way: Way, rank: int) -> Tensors:
    wrapped = DistributedDataParallel(_plain_net())
    data = batches(6)[rank::RANKS]
    model = wrapped.module if way.is_planned else wrapped
    yield from run(way.step(model, loss_fn, adamw(wrapped), data[0]), data)
    yield from state(wrapped)


def ddp_inner_module_passed_gloo_2(way: Way) -> Tensors:
    """Pass the module within DistributedDataParallel to a step, and reduce nothing."""
    yield from _on_ranks(_inner_module, way)


def _reduced(way: Way, rank: int) -> Tensors:
    model, data = _plain_net(), batches(6)[rank::RANKS]

    def reduce() -> None:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= RANKS

    optimizer = adamw(model)
    yield from run(way.step(model, loss_fn, optimizer, data[0], before_update=reduce), data)
    yield from state(model, optimizer)


def ddp_inner_module_all_reduce_in_before_update_gloo_2(way: Way) -> Tensors:
    """Reduce gradients by hand in `before_update`."""
    yield from _on_ranks(_reduced, way)


def _sharded(way: Way, rank: int) -> Tensors:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_plain_net(), mesh=init_device_mesh("cpu", (RANKS,)))
    data = batches(4)[rank::RANKS]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield from run(way.step(model, loss_fn, optimizer, data[0]), data)


def fsdp2_gloo_2(way: Way) -> Tensors:
    """Pass a model under FSDP2 to a step."""
    yield from _on_ranks(_sharded, way)


def _sharded_loss(way: Way, rank: int) -> Tensors:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_plain_net(), mesh=init_device_mesh("cpu", (RANKS,)))
    loss_of = way.loss(model, loss_fn)
    for batch in batches(4)[rank::RANKS]:
        loss = loss_of(batch)
        loss.backward()
        yield loss


def fsdp2_with_a_loss_gloo_2(way: Way) -> Tensors:
    """Pass a model under FSDP2 to a planned loss."""
    yield from _on_ranks(_sharded_loss, way)


def _ddp_within_a_loss(way: Way, rank: int) -> Tensors:
    wrapped = DistributedDataParallel(_plain_net())
    loss_of = way.loss(wrapped, loss_fn)
    for batch in batches(6)[rank::RANKS]:
        loss_of(batch).backward()
        yield from (p.grad for p in wrapped.parameters())


def ddp_within_a_loss_gloo_2(way: Way) -> Tensors:
    """Pass DistributedDataParallel to a planned loss, instead of the loss to it."""
    yield from _on_ranks(_ddp_within_a_loss, way)


def _unwrapped_loss(way: Way, rank: int) -> Tensors:
    wrapped = DistributedDataParallel(_plain_net())
    loss_of = way.loss(wrapped.module, loss_fn)
    for batch in batches(6)[rank::RANKS]:
        loss_of(batch).backward()
        yield from (p.grad for p in wrapped.parameters())


def ddp_inner_module_passed_to_a_loss_gloo_2(way: Way) -> Tensors:
    """Compute the loss of the module within DistributedDataParallel, which reduces nothing in either way."""
    yield from _on_ranks(_unwrapped_loss, way)


CASES = (
    drop_in_loss_ddp_gloo_2, ddp_no_sync_gloo_2, ddp_gloo_2, ddp_inner_module_passed_gloo_2,
    ddp_inner_module_all_reduce_in_before_update_gloo_2, fsdp2_gloo_2, fsdp2_with_a_loss_gloo_2, ddp_within_a_loss_gloo_2,
    ddp_inner_module_passed_to_a_loss_gloo_2,
)  # fmt: skip
