"""Results of a few steps by name, and their distance to a reference."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from autotune.measure.messages import Comparison, RoundingWitness
from autotune.measure.worker.eager import EagerWorkload, OnGradient, shifted
from autotune.measure.worker.reference import Reference, Writer
from autotune.runtime.verification import gates
from autotune.runtime.verification.witness import float64, move_weights, to_double
from autotune.workloads.batch import map_batch

COMPARED_STEPS = 2
"""Number of steps whose results are compared: the second runs on what the first wrote."""


class Step(Protocol):
    """A training step of the workload's batch: returns its results, and calls `on_gradient` for each gradient."""

    def __call__(self, on_gradient: OnGradient | None = None) -> list[torch.Tensor]: ...


_BOUNDS = "bounds.json"
_DEVIATIONS = "deviations.json"
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
    eager.varies = True
    try:
        for number in range(COMPARED_STEPS):
            batch = map_batch(partial(shifted, by=number), first)
            eager.workload.batch = map_batch(to_double, batch) if double else batch
            outputs = step(partial(_record_gradient, record, number))
            for index, tensor in enumerate(outputs):
                record(f"step {number}.result {index}", tensor)
            del outputs
    finally:
        eager.workload.batch, eager.varies = first, False
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


def write_witness(eager: EagerWorkload, directory: Path, witness: RoundingWitness) -> None:
    """Run plain eager steps as a witness, and write how far each tensor is from eager's in a directory.

    Tensors in float64 are written, too: plans are compared with them.
    """
    workload = eager.workload
    reference = Reference(directory)
    deviations: dict[str, gates.Deviation] = {}

    def record(name: str, tensor: torch.Tensor) -> None:
        if name in reference.names:
            deviations[name] = gates.deviation(tensor, reference.load(name))

    place = witness_directory(directory, witness)
    if witness is RoundingWitness.FLOAT64:
        with closing(Writer(place)) as writer, float64(workload.model, workload.optimizer, workload.loss_fn):

            def record_exact(name: str, tensor: torch.Tensor) -> None:
                record(name, tensor)
                writer.add(name, tensor)

            record_results(eager, eager.step, record_exact, double=True)
    else:
        draw = (RoundingWitness.MOVED_0, RoundingWitness.MOVED_1).index(witness)
        begin = partial(move_weights, workload.model, draw, workload.loss_fn)
        record_results(eager, eager.step, record, begin=begin)
    place.mkdir(parents=True, exist_ok=True)
    rows = {name: [each.distance, each.size, each.eager_size, each.eps] for name, each in deviations.items()}
    (place / _DEVIATIONS).write_text(json.dumps(rows), encoding="utf-8")


def write_bounds(eager: EagerWorkload, directory: Path, reasons: dict[str, str]) -> str:
    """Derive the bound of each tensor from eager's results in a directory and the witnesses' deviations.

    `reasons` holds the reason why a witness is missing; unusable witnesses are added. Returns a description of how tensors
    are compared.
    """
    reference = Reference(directory)
    names = sorted(reference.names)
    witnesses = {
        str(name): _read_deviations(witness_directory(directory, name))
        for name in RoundingWitness
        if name.value not in reasons
    }
    for name, witness in list(witnesses.items()):
        if differs := _find_different_computation(names, witness):
            reasons[name] = f"{differs} is another in it"
            del witnesses[name]
    center = RoundingWitness.FLOAT64.value if RoundingWitness.FLOAT64 in witnesses else ""

    def bound(name: str, moved: float = 0.0) -> gates.Bound:
        found = {key: witness[name] for key, witness in witnesses.items() if name in witness}
        return gates.bound_from(found, center, moved) or gates.strict_bound(reference.load(name), moved)

    bounds = {name: bound(name) for name in names if name.startswith(_STAGES[0])}
    moved = _carry(eager, bounds, reference)
    bounds |= {name: bound(name, moved.get(name, 0.0)) for name in names if name not in bounds}
    for name in RoundingWitness:
        if name != center:
            shutil.rmtree(witness_directory(directory, name), ignore_errors=True)
    (directory / _BOUNDS).write_text(
        json.dumps({name: [each.admitted, each.center] for name, each in bounds.items()}), encoding="utf-8"
    )
    return gates.describe_gate(
        float64=bool(center), moved=bool(witnesses), reason=reasons.get(RoundingWitness.FLOAT64, "")
    )


def _carry(eager: EagerWorkload, bounds: dict[str, gates.Bound], reference: Reference) -> dict[str, float]:
    """Run eager with gradients moved by the error admitted in the first step; return how far each later tensor moves."""
    moved: dict[str, float] = {}

    def record(name: str, tensor: torch.Tensor) -> None:
        if name in reference.names and name not in bounds:
            moved[name] = gates.difference(tensor, reference.load(name))

    def step(on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
        def move(name: str, gradient: torch.Tensor) -> None:
            gradient.copy_(gates.move_towards_zero(gradient, bounds[f"{_STAGES[0]}gradient {name}"].admitted))
            if on_gradient is not None:
                on_gradient(name, gradient)

        return eager.step(move)

    record_results(eager, step, record)
    return moved


def witness_directory(directory: Path, name: str) -> Path:
    """Return the directory of a witness's results, beside eager's."""
    return directory.with_name(f"{directory.name}-{name.replace(' ', '-')}")


def _find_different_computation(names: Sequence[str], witness: Mapping[str, gates.Deviation]) -> str:
    """Return a tensor of the first step that shows the witness to be another computation; empty if none does."""
    first = [name for name in names if name.startswith(_STAGES[0])]
    if missing := next((name for name in first if name not in witness), ""):
        return missing
    gradients = {name: witness[name] for name in first if ".gradient " in name}
    return gates.find_mismatch({name: witness[name] for name in first if name not in gradients}, gradients)


def _read_deviations(directory: Path) -> dict[str, gates.Deviation]:
    rows = json.loads((directory / _DEVIATIONS).read_text(encoding="utf-8"))
    return {name: gates.Deviation(*row) for name, row in rows.items()}


def _read_bounds(directory: Path) -> dict[str, gates.Bound]:
    path = directory / _BOUNDS
    if not path.exists():
        return {}
    return {name: gates.Bound(*bound) for name, bound in json.loads(path.read_text(encoding="utf-8")).items()}


def _record_gradient(record: OnGradient, number: int, name: str, gradient: torch.Tensor) -> None:
    record(f"step {number}.gradient {name}", gradient)
