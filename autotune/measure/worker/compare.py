"""Results of a few steps by name, and their distance to a reference."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from autotune.measure.messages import Comparison, RoundingWitness
from autotune.measure.worker.eager import EagerWorkload, OnGradient
from autotune.measure.worker.reference import Reference, Writer
from autotune.runtime.verification import gates
from autotune.runtime.verification.witness import to_double
from autotune.workloads.batch import map_batch

COMPARED_STEPS = 2
"""Number of steps whose results are compared: the second runs on what the first wrote."""
CARRIED = "carried"
"""Name of a run of eager whose gradients are moved by the error that the gate admits."""


class Step(Protocol):
    """A training step of the workload's batch: returns its results, and calls `on_gradient` for each gradient."""

    def __call__(self, on_gradient: OnGradient | None = None) -> list[torch.Tensor]: ...


_BOUNDS = "bounds.json"
_STAGES = tuple(f"step {number}." for number in range(COMPARED_STEPS))


def record_results(
    eager: EagerWorkload,
    step: Step,
    record: OnGradient,
    *,
    begin: Callable[[], object] = lambda: None,
    double: bool = False,
) -> None:
    """Run the compared steps from the initial state, each on another batch, and record each result by name.

    `begin` is called once the initial state is restored. `double`: run on batches in float64.
    """
    eager.restore()
    begin()
    first = eager.workload.batch
    try:
        for number in range(COMPARED_STEPS):
            batch = map_batch(partial(_shifted, by=number), first)
            eager.workload.batch = map_batch(to_double, batch) if double else batch
            outputs = step(partial(_record_gradient, record, number))
            for index, tensor in enumerate(outputs):
                record(f"step {number}.result {index}", tensor)
            del outputs
    finally:
        eager.workload.batch = first
    for name, tensor in eager.named_tensors():
        record(name, tensor)


def compare(eager: EagerWorkload, step: Step, directory: Path) -> Comparison:
    """Return the largest error against the reference in a directory, as a share of its bounds, and the worst tensor."""
    reference, bounds = Reference(directory), _read_bounds(directory)
    centers = {
        center: Reference(witness_directory(directory, center))
        for center in {bound.center for bound in bounds.values()} - {""}
    }
    shares: dict[str, float] = {}

    def record(name: str, tensor: torch.Tensor) -> None:
        share = 0.0
        if not reference.equals(name, tensor):
            share = float("inf")
            if reference.comparable(name, tensor):
                bound = bounds.get(name) or gates.strict_bound(reference.load(name))
                center = centers[bound.center] if bound.center else reference
                share = gates.error_share(tensor, center.load(name), bound.admitted)
        shares[name] = max(shares.get(name, 0.0), share)

    record_results(eager, step, record)
    missing = reference.names - shares.keys()
    shares |= dict.fromkeys(missing, float("inf"))
    worst = gates.worst_tensor(shares, _STAGES)
    detail = f"{worst} {'was never made' if worst in missing else f'is off by {shares[worst]:.3g} of its bound'}"
    return Comparison(shares[worst], detail if shares[worst] else "")


def write_bounds(eager: EagerWorkload, directory: Path, reasons: dict[str, str]) -> str:
    """Derive the bound of each tensor from eager's results in a directory and the witnesses' beside it.

    `reasons` holds the reason why a witness is missing; unusable witnesses are added. Witnesses that no bound needs are
    removed. Returns a description of how tensors are compared.
    """
    reference = Reference(directory)
    witnesses = {
        str(name): Reference(witness_directory(directory, name))
        for name in RoundingWitness
        if name.value not in reasons
    }
    for name, witness in list(witnesses.items()):
        if differs := _find_different_computation(reference, witness):
            reasons[name] = f"{differs} is another in it"
            del witnesses[name]
    center = RoundingWitness.FLOAT64.value if RoundingWitness.FLOAT64 in witnesses else ""

    def bound(name: str, carried: Reference | None = None) -> gates.Bound:
        tensors = {key: witness.load(name) for key, witness in witnesses.items() if name in witness.names}
        moved = carried.load(name) if carried is not None and name in carried.names else None
        return gates.bound(reference.load(name), tensors, center, moved)

    bounds = {name: bound(name) for name in sorted(reference.names) if name.startswith(_STAGES[0])}
    carried = _carry(eager, bounds, witness_directory(directory, CARRIED))
    bounds |= {name: bound(name, carried) for name in sorted(reference.names - bounds.keys())}
    for name in (*RoundingWitness, CARRIED):
        if name != center:
            shutil.rmtree(witness_directory(directory, name), ignore_errors=True)
    (directory / _BOUNDS).write_text(
        json.dumps({name: [each.admitted, each.center] for name, each in bounds.items()}), encoding="utf-8"
    )
    return gates.describe_gate(
        float64=bool(center), moved=bool(witnesses), reason=reasons.get(RoundingWitness.FLOAT64, "")
    )


def _carry(eager: EagerWorkload, bounds: dict[str, gates.Bound], directory: Path) -> Reference:
    """Run eager with gradients moved by the error admitted in the first step, and return its results."""

    def step(on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
        def move(name: str, gradient: torch.Tensor) -> None:
            gradient.copy_(gates.move_towards_zero(gradient, bounds[f"{_STAGES[0]}gradient {name}"].admitted))
            if on_gradient is not None:
                on_gradient(name, gradient)

        return eager.step(move)

    with closing(Writer(directory)) as writer:
        record_results(eager, step, writer.add)
    return Reference(directory)


def witness_directory(directory: Path, name: str) -> Path:
    """Return the directory of a witness's results, beside eager's."""
    return directory.with_name(f"{directory.name}-{name.replace(' ', '-')}")


def _find_different_computation(reference: Reference, witness: Reference) -> str:
    """Return a tensor of the first step that shows the witness to be another computation; empty if none does."""
    first = [name for name in sorted(reference.names) if name.startswith(_STAGES[0])]
    if missing := next((name for name in first if name not in witness.names), ""):
        return missing
    pairs = {name: (reference.load(name), witness.load(name)) for name in first}
    gradients = {name: pair for name, pair in pairs.items() if ".gradient " in name}
    return gates.name_mismatch({name: pair for name, pair in pairs.items() if name not in gradients}, gradients)


def _read_bounds(directory: Path) -> dict[str, gates.Bound]:
    path = directory / _BOUNDS
    if not path.exists():
        return {}
    return {name: gates.Bound(*bound) for name, bound in json.loads(path.read_text(encoding="utf-8")).items()}


def _record_gradient(record: OnGradient, number: int, name: str, gradient: torch.Tensor) -> None:
    record(f"step {number}.gradient {name}", gradient)


def _shifted(leaf: torch.Tensor, by: int) -> torch.Tensor:
    """Return another batch of the same shape, so that a step which remembers the first one's data is detected."""
    if not leaf.ndim or not by:
        return leaf
    return torch.empty_like(leaf).copy_(leaf.roll(by, 0))
