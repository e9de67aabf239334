"""What one run of an integration leaves: losses, hashes of all results, and the bytes that the kernel charged."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import xxhash

from autotune.measure.meters.rss import RssMeter
from autotune.measure.worker.reference import digest
from autotune.runtime import malloc

STEPS = 50
"""Number of optimizer steps of a run."""
UNMEASURED_STEPS = 5
"""Steps before memory counts: the plan's step is captured, and its arena records two steps."""
BUDGET = "65%"
"""Budget of the plans, as a share of the traced step's bytes."""


@dataclass(frozen=True, slots=True)
class Record:
    """Results of one run of `STEPS` steps in a process of its own."""

    losses: tuple[float, ...]
    """Loss of each step, as the framework reports it."""
    norms: tuple[float, ...]
    """Norm of all gradients of each step, as the framework reports it."""
    gradients: str
    """Hash of every gradient of every step."""
    state: dict[str, str]
    """Hash of each parameter, buffer and tensor of the optimizer at the end, by name."""
    charged_bytes: int
    """Highest resident bytes of the process in a measured step."""
    floor_bytes: int
    """Resident bytes of the idle process, without the tensors that stay between steps."""

    @property
    def step_bytes(self) -> int:
        """Bytes that the step is charged above the idle process."""
        return self.charged_bytes - self.floor_bytes


@dataclass
class Recorder:
    """Collector of a run's losses and gradients.

    The integration calls `begin_step` before each step, `add_gradients` before each update, and `add_loss` after it.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    _steps: int = 0
    _hash: "xxhash.xxh3_128" = field(default_factory=xxhash.xxh3_128)
    _meter: RssMeter = field(default_factory=RssMeter)

    def begin_step(self) -> None:
        """Count a step; the meter starts before the first measured one."""
        if self._steps == UNMEASURED_STEPS:
            gc.collect()
            malloc.trim()
            self._meter.__enter__()
        self._steps += 1

    def add_gradients(self, model: torch.nn.Module) -> None:
        """Add the hash of all gradients, which are complete and not yet cleared."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._hash.update(f"{name} {digest(parameter.grad)}".encode())

    def finish(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Record:
        """Return the record, after the training and after the plan's memory is released."""
        self._meter.__exit__(None, None, None)
        model.zero_grad(set_to_none=True)
        gc.collect()
        malloc.trim()
        tensors = {name: tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
        for number, state in enumerate(optimizer.state.values()):
            tensors |= {f"state {number} {name}": part for name, part in state.items() if torch.is_tensor(part)}
        floor_bytes = self._meter.now_bytes() - _storage_bytes([*tensors.values(), *model.buffers()])
        return Record(
            tuple(self.losses), tuple(self.norms), self._hash.hexdigest(),
            {name: digest(tensor) for name, tensor in tensors.items()}, self._meter.peak_bytes, floor_bytes,
        )  # fmt: skip


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
