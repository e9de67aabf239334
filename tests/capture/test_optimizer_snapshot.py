"""An optimizer's content returns into the same objects, inner optimizers and counters included."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from autotune.capture.optimizers.optimizer_copy import collect_state_tensors, iter_mutable_objects
from autotune.capture.optimizers.optimizer_snapshot import OptimizerSnapshot
from autotune.capture.optimizers.trial_state import fingerprint
from autotune.measure.spec import Spec
from autotune.measure.worker.eager import EagerWorkload
from autotune.runtime.train_step import TrainStep
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.optimizers import ACROSS
from tests.support.small import make, mlp

EVERY: dict[str, Any] = {**ACROSS, "adamw": torch.optim.AdamW, "momentum": lambda p: torch.optim.SGD(p, momentum=0.9)}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", EVERY)
def test_steps_leave_no_trace_after_a_restore(name: str, steps: int):
    workload = make(mlp, optimizer=EVERY[name])
    for _ in range(steps):
        eager_step(workload)
    names = {id(p): name for name, p in workload.model.named_parameters()}
    objects = [id(thing) for thing in iter_mutable_objects(workload.optimizer)]
    before = fingerprint(vars(workload.optimizer), names)
    kept = OptimizerSnapshot(workload.optimizer)
    for _ in range(2):
        eager_step(workload)
        eager_step(workload)
        kept.restore()
        assert fingerprint(vars(workload.optimizer), names) == before
        assert [id(thing) for thing in iter_mutable_objects(workload.optimizer)] == objects


@dataclass(slots=True)
class Count:
    steps: int = 0


class Pair(NamedTuple):
    first: int
    second: int


class Counting(torch.optim.SGD):
    """Optimizer with objects that have no dictionary, in one of which it counts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count, self.pair = Count(), Pair(1, 2)

    def step(self, closure: Any = None) -> Any:
        self.count.steps += 1
        return super().step(closure)


def test_an_object_with_slots_returns_to_its_content() -> None:
    workload = make(mlp, optimizer=Counting)
    kept = OptimizerSnapshot(workload.optimizer)
    eager_step(workload)
    assert workload.optimizer.count.steps == 1
    kept.restore()
    assert workload.optimizer.count.steps == 0


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


KINDS_OF_STATE = ("global count", "langevin", "python noise", "lookahead", "shared step")


@pytest.mark.parametrize(
    "name", [name if name in KINDS_OF_STATE else pytest.param(name, marks=pytest.mark.slow) for name in ACROSS]
)
def test_a_verified_step_of_an_optimizer_across_parameters_equals_eager(name: str):
    workload, other = make(mlp, optimizer=ACROSS[name]), make(mlp, optimizer=ACROSS[name])
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, verify=True) as step:
        for seed in range(3):
            seed_all(seed)
            loss = step(workload.batch)
            seed_all(seed)
            assert torch.equal(loss, eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def across(name: str) -> Workload:
    return make(mlp, optimizer=ACROSS[name])


@pytest.mark.parametrize("name", ["global count", "muon and adamw", "lookahead"])
def test_a_measured_process_goes_back_to_the_optimizer_of_the_factory(name: str, tmp_path: Path):
    own = EagerWorkload(Spec(WorkloadRef(f"{Path(__file__)}:across", {"name": name}), tmp_path, scratch=tmp_path))
    own.restore()
    static = own.static_bytes()
    losses = []
    for _ in range(2):
        own.restore()
        losses.append([own.step()[0] for _ in range(3)])
    assert all(map(torch.equal, *losses))
    held = sum(tensor.untyped_storage().nbytes() for tensor in collect_state_tensors(own.workload.optimizer))
    assert own.static_bytes() >= held
    own.restore()
    assert own.static_bytes() == static
