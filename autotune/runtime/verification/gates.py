"""The numerical gate: decide whether a tensor equals its reference up to rounding, relative to that tensor alone.

Tensors that are equal bit for bit pass. Any other tensor `x` is held to eager's own rounding error on the same inputs:

    max|x - center| <= NOISE * noise + EPS * eps * max|center| + carried

`noise` is the largest distance of eager to its witnesses: the same step in float64, and eager steps from weights that are
moved by one rounding. `center` is the float64 result, or eager's own where float64 is not the same computation. `eps` is
that of the tensor's dtype. Integers, bools and non-finite places must be equal.

`carried` is 0 for results and gradients of the first step. For everything after an update it is how far eager moves when
each element of each gradient is moved towards 0 by what is admitted of that gradient: Adam's first update is nearly the
sign of the gradient, so an element that is all rounding may move by twice the learning rate.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

NOISE = 4.0
"""Factor between eager's own rounding error and the error that is admitted."""
EPS = 16.0
"""Roundings admitted where eager's own error is smaller by chance, as of a loss, which is a single number."""
STRICT_EPS = 64.0
"""Roundings admitted where eager's own error is unknown."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Bound:
    """The error that one tensor may have."""

    admitted: float
    """Largest absolute difference to the center."""
    center: str = ""
    """Name of the witness that the difference is taken to; empty for eager's own tensor."""


def epsilon(tensor: torch.Tensor) -> float:
    """Distance from 1 to the next larger number of the tensor's dtype; 0 for integers and bools."""
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return torch.finfo(tensor.dtype).eps if inexact else 0.0


def near(eps: float) -> float:
    """Largest relative distance between eager and a witness of the same computation.

    A gradient that is wrong by 0.1 % stays outside of `NOISE` times this bound in float32.
    """
    return max(math.sqrt(eps) / 4, 16 * eps)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute the largest absolute difference; infinity where shapes, non-finite places, or integers differ."""
    exact = not (epsilon(found) and epsilon(expected))
    if found.shape != expected.shape or (exact and found.dtype != expected.dtype):
        return math.inf
    worst = 0.0
    for a, b in _chunks(found, expected):
        if exact:
            if not torch.equal(a, b):
                return math.inf
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs()).max().item()
        if not math.isfinite(gap):
            return math.inf
        worst = max(worst, gap)
    return worst


def magnitude(tensor: torch.Tensor) -> float:
    """Compute the largest absolute value of the finite elements; 0 if there are none."""
    worst = 0.0
    for (part,) in _chunks(tensor):
        worst = max(worst, torch.where(part.isfinite(), part, 0.0).abs().max().item())
    return worst


def strict(eager: torch.Tensor) -> Bound:
    """Make the bound of a tensor without witnesses."""
    return Bound(STRICT_EPS * epsilon(eager) * magnitude(eager))


def bound(
    eager: torch.Tensor,
    witnesses: Mapping[str, torch.Tensor],
    center: str = "",
    carried: torch.Tensor | None = None,
) -> Bound:
    """Make the bound of a tensor from its witnesses; `center` names the one in float64, if that is one of them.

    `carried` is the tensor of eager steps whose gradients were moved towards 0.
    """
    moved = 0.0 if carried is None else difference(carried, eager)
    distances = {name: difference(witness, eager) for name, witness in witnesses.items()}
    finite = {name: distance for name, distance in distances.items() if math.isfinite(distance)}
    moved = moved if math.isfinite(moved) else 0.0
    if not finite or not epsilon(eager):
        return Bound(strict(eager).admitted + moved)
    if center not in finite:  # eager overflows where float64 does not: only eager says where
        center = ""
    size = magnitude(witnesses[center] if center else eager)
    return Bound(NOISE * max(finite.values()) + EPS * epsilon(eager) * size + moved, center)


@torch.no_grad()
def towards_zero(gradient: torch.Tensor, admitted: float) -> torch.Tensor:
    """Move each element of a gradient by what is admitted of it, through 0 where it is smaller than that."""
    return gradient - admitted * gradient.sgn() if epsilon(gradient) else gradient


def share(found: torch.Tensor, center: torch.Tensor, admitted: float) -> float:
    """Compute a tensor's error as a share of what is admitted: above 1 it is refused."""
    distance = difference(found, center)
    if distance == 0.0:
        return 0.0
    return distance / admitted if admitted > 0.0 else math.inf


def unlike(
    results: Mapping[str, tuple[torch.Tensor, torch.Tensor]], gradients: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> str:
    """Name a tensor of the first step that shows a witness to be another computation; empty if none does.

    Both hold pairs of eager's tensor and the witness's. A gradient that vanishes beside the largest one, as of a bias
    before a norm, is all rounding: there the distance is compared with the largest gradient.
    """
    largest = max((magnitude(eager) for eager, _ in gradients.values()), default=0.0)
    for name, (eager, witness) in (*results.items(), *gradients.items()):
        distance, eps = difference(witness, eager), epsilon(eager)
        vanishing = STRICT_EPS * eps * largest if name in gradients else 0.0
        if distance > max(near(eps) * magnitude(eager), vanishing):
            return name
    return ""


def how(*, float64: bool, moved: bool, reason: str = "") -> str:
    """Describe what tensors were compared with; `reason` holds why float64 could not be used."""
    if float64:
        return "relative gate against float64"
    because = f"; float64 cannot be used: {reason}" if reason else ""
    return f"{'relative' if moved else 'strict relative'} gate against eager{because}"


def worst(shares: Mapping[str, float], stages: Iterable[str] = ()) -> str:
    """Name the tensor with the largest share; of refused ones the largest of the earliest stage, a prefix of the name.

    What follows from a wrong gradient is wrong too, and may be further off than the cause.
    """
    refused = {name for name, part in shares.items() if not part <= 1.0}
    for stage in stages:
        if early := [name for name in refused if name.startswith(stage)]:
            return max(early, key=lambda name: shares[name])
    return max(shares, key=lambda name: shares[name])


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of flat tensors on the CPU, the inexact ones in doubles: as a whole these might not fit."""
    flat = [_flat(tensor) for tensor in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield tuple(_wide(part[start : start + _CHUNK]) for part in flat)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    plain = torch.view_as_real(plain.resolve_conj()) if plain.dtype.is_complex else plain
    return plain.cpu().reshape(-1)


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.double() if part.dtype.is_floating_point else part
