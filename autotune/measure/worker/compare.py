"""What a few steps leave behind, by name, and how far that is from a reference."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.measure.messages import CARRIED, FLOAT64, WITNESSES
from autotune.measure.worker.eager import Eager, OnGradient
from autotune.measure.worker.reference import Reference, Writer
from autotune.runtime.verification import gates
from autotune.runtime.verification.witness import in_double

STEPS = 2
"""Steps whose results are compared: the second runs on what the first wrote."""

Step = Callable[[], list[torch.Tensor]]
HookedStep = Callable[[OnGradient], list[torch.Tensor]]

_BOUNDS = "bounds.json"
_STAGES = tuple(f"step {number}." for number in range(STEPS))


def tell_results(
    own: Eager, step: HookedStep, tell: OnGradient, *, begin: Callable[[], object] = lambda: None, double: bool = False
) -> None:
    """Run the compared steps from the initial state, each on another batch, and tell each result by name.

    `begin` is called once the initial state is restored. `double`: run on batches in float64.
    """
    own.restore()
    begin()
    first = own.workload.batch
    try:
        for number in range(STEPS):
            batch = pytree.tree_map(partial(_shifted, by=number), first)
            own.workload.batch = in_double(batch) if double else batch
            made = step(partial(_tell_gradient, tell, number))
            for index, tensor in enumerate(made):
                tell(f"step {number}.result {index}", tensor)
            del made
    finally:
        own.workload.batch = first
    for name, tensor in own.named_tensors():
        tell(name, tensor)


def compare(own: Eager, step: HookedStep, directory: Path) -> dict[str, Any]:
    """The largest error against the reference in a directory, as a share of what its bounds admit, and where it is."""
    reference, bounds = Reference(directory), _read_bounds(directory)
    centers = {
        center: Reference(witness_directory(directory, center))
        for center in {one.center for one in bounds.values()} - {""}
    }
    shares: dict[str, float] = {}

    def tell(name: str, tensor: torch.Tensor) -> None:
        found = 0.0
        if not reference.equals(name, tensor):
            found = float("inf")
            if reference.comparable(name, tensor):
                bound = bounds.get(name) or gates.strict(reference.load(name))
                center = centers[bound.center] if bound.center else reference
                found = gates.share(tensor, center.load(name), bound.admitted)
        shares[name] = max(shares.get(name, 0.0), found)

    tell_results(own, step, tell)
    missing = reference.names - shares.keys()
    shares |= dict.fromkeys(missing, float("inf"))
    worst = gates.worst(shares, _STAGES)
    where = f"{worst} {'was never made' if worst in missing else f'is off by {shares[worst]:.3g} of its bound'}"
    return {"max_error": shares[worst], "detail": where if shares[worst] else ""}


def write_bounds(own: Eager, directory: Path, reasons: dict[str, str]) -> str:
    """Derive the bound of each tensor from eager's results in a directory and the witnesses' beside it.

    `reasons` holds why a witness was not made. Witnesses that are not needed any more are removed. The answer describes
    how tensors are compared.
    """
    eager = Reference(directory)
    witnesses = {name: Reference(witness_directory(directory, name)) for name in WITNESSES if name not in reasons}
    for name, witness in list(witnesses.items()):
        if differs := _unlike(eager, witness):
            reasons[name] = f"{differs} is another in it"
            del witnesses[name]
    center = FLOAT64 if FLOAT64 in witnesses else ""

    def bound(name: str, carried: Reference | None = None) -> gates.Bound:
        made = {key: one.load(name) for key, one in witnesses.items() if name in one.names}
        moved = carried.load(name) if carried is not None and name in carried.names else None
        return gates.bound(eager.load(name), made, center, moved)

    found = {name: bound(name) for name in sorted(eager.names) if name.startswith(_STAGES[0])}
    carried = _carry(own, found, witness_directory(directory, CARRIED))
    found |= {name: bound(name, carried) for name in sorted(eager.names - found.keys())}
    for name in (*WITNESSES, CARRIED):
        if name != center:
            shutil.rmtree(witness_directory(directory, name), ignore_errors=True)
    (directory / _BOUNDS).write_text(json.dumps({name: [one.admitted, one.center] for name, one in found.items()}))
    return gates.how(float64=bool(center), moved=bool(witnesses), reason=reasons.get(FLOAT64, ""))


def _carry(own: Eager, bounds: dict[str, gates.Bound], directory: Path) -> Reference:
    """Run eager with gradients moved by what is admitted of them in the first step; its results."""

    def step(tell: OnGradient) -> list[torch.Tensor]:
        def move(name: str, gradient: torch.Tensor) -> None:
            gradient.copy_(gates.towards_zero(gradient, bounds[f"{_STAGES[0]}gradient {name}"].admitted))
            tell(name, gradient)

        return own.step(move)

    with closing(Writer(directory)) as writer:
        tell_results(own, step, writer.add)
    return Reference(directory)


def witness_directory(directory: Path, name: str) -> Path:
    """Name the directory of a witness's results, beside eager's."""
    return directory.with_name(f"{directory.name}-{name.replace(' ', '-')}")


def _unlike(eager: Reference, witness: Reference) -> str:
    """Name a tensor of the first step that shows the witness to be another computation; empty if none does."""
    first = [name for name in sorted(eager.names) if name.startswith(_STAGES[0])]
    if missing := next((name for name in first if name not in witness.names), ""):
        return missing
    pairs = {name: (eager.load(name), witness.load(name)) for name in first}
    gradients = {name: pair for name, pair in pairs.items() if ".gradient " in name}
    return gates.unlike({name: pair for name, pair in pairs.items() if name not in gradients}, gradients)


def _read_bounds(directory: Path) -> dict[str, gates.Bound]:
    path = directory / _BOUNDS
    if not path.exists():
        return {}
    return {name: gates.Bound(*bound) for name, bound in json.loads(path.read_text()).items()}


def _tell_gradient(tell: OnGradient, number: int, name: str, gradient: torch.Tensor) -> None:
    tell(f"step {number}.gradient {name}", gradient)


def _shifted(leaf: Any, by: int) -> Any:
    """Another batch of the same look: a step that remembers the first one's data shows itself."""
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim or not by:
        return leaf
    return torch.empty_like(leaf).copy_(leaf.roll(by, 0))
