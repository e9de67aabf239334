"""The numerical gate: decide whether a tensor equals its reference up to rounding, relative to that tensor alone.

Tensors that are equal bit for bit pass. The error of any other tensor `x` is bounded by eager's own rounding error:

    max|x - center| <= NOISE * noise + EPS * eps * max|center| + carried

`noise` is the largest distance of eager to its witnesses: the same step in float64, and eager steps from weights that are
moved by one rounding. `center` is the float64 result, or eager's own if float64 is not the same computation. `eps` is
that of the tensor's dtype. Integers, bools and non-finite elements must be equal.

`carried` is 0 for results and gradients of the first step. After an update it is the distance that eager moves if each
gradient element is moved towards 0 by the gradient's admitted error. Adam's first update is nearly the sign of the
gradient, so an element of pure rounding error may move by twice the learning rate.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

NOISE = 4.0
"""Ratio of the admitted error to eager's own rounding error."""
EPS = 16.0
"""Roundings admitted in addition, because eager's own error may be small by chance, as for a scalar loss."""
STRICT_EPS = 64.0
"""Roundings admitted if eager's own error is unknown."""
_CHUNK = 1 << 18
"""Elements that are compared at a time: their float64 copies stay in a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The admitted error of one tensor."""

    admitted: float
    """Largest absolute difference to the center."""
    center: str = ""
    """Name of the witness that the tensor is compared with; empty for eager's own tensor."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Distance of a witness's tensor from eager's, with the sizes that it is judged by."""

    distance: float
    """Largest absolute difference; infinity where the tensors cannot be compared."""
    size: float
    """Largest absolute value of the witness's tensor."""
    eager_size: float
    """Largest absolute value of eager's tensor."""
    eps: float
    """`epsilon` of eager's tensor."""


def deviation(witness: torch.Tensor, eager: torch.Tensor) -> Deviation:
    """Return how far a witness's tensor is from eager's."""
    return Deviation(difference(witness, eager), magnitude(witness), magnitude(eager), epsilon(eager))


def epsilon(tensor: torch.Tensor) -> float:
    """Return the distance from 1 to the next larger number of the tensor's dtype; 0 for integers and bools."""
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return torch.finfo(tensor.dtype).eps if inexact else 0.0


def witness_distance(eps: float) -> float:
    """Return the largest relative distance between eager and a witness of the same computation.

    In float32 a gradient that is wrong by 0.1 % exceeds `NOISE` times this distance.
    """
    return max(math.sqrt(eps) / 4, 16 * eps)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference; infinity if shapes, non-finite elements or integers differ."""
    exact = not (epsilon(actual) and epsilon(expected))
    if actual.shape != expected.shape or (exact and actual.dtype != expected.dtype):
        return math.inf
    worst = 0.0
    for a, b in _chunks(actual, expected):
        if exact:
            if not torch.equal(a, b):
                return math.inf
            continue
        gap = (a - b).abs_().max().item()
        if not math.isfinite(gap):  # some elements are not finite: they have to be the same
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a - b).abs()).max().item()
        if not math.isfinite(gap):
            return math.inf
        worst = max(worst, gap)
    return worst


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of the finite elements; 0 if there are none."""
    worst = 0.0
    for (piece,) in _chunks(tensor):
        part = piece.double()  # integers and bools, too
        largest = part.abs().max().item()
        if not math.isfinite(largest):
            largest = torch.where(part.isfinite(), part, 0.0).abs().max().item()
        worst = max(worst, largest)
    return worst


def strict_bound(eager: torch.Tensor, moved: float = 0.0) -> Bound:
    """Return the bound of a tensor without witnesses; `moved` as in `bound_from`."""
    return Bound(STRICT_EPS * epsilon(eager) * magnitude(eager) + _finite(moved))


def bound(
    eager: torch.Tensor,
    witnesses: Mapping[str, torch.Tensor],
    center: str = "",
    carried: torch.Tensor | None = None,
) -> Bound:
    """Return the bound of a tensor from its witnesses.

    Args:
        eager: The tensor of the eager step.
        witnesses: The tensor in each witness, by the witness's name.
        center: Name of the float64 witness; empty without one.
        carried: The tensor after eager steps whose gradients were moved towards 0; None before the first update.
    """
    deviations = {name: deviation(witness, eager) for name, witness in witnesses.items()}
    moved = 0.0 if carried is None else difference(carried, eager)
    return bound_from(deviations, center, moved) or strict_bound(eager, moved)


def bound_from(deviations: Mapping[str, Deviation], center: str = "", moved: float = 0.0) -> Bound | None:
    """Return the bound of a tensor from the deviations of its witnesses; None where they give none.

    `moved` is the distance that eager moves if its gradients are moved towards 0.
    """
    finite = {name: each for name, each in deviations.items() if math.isfinite(each.distance)}
    first = next(iter(finite.values()), None)
    if first is None or not first.eps:
        return None
    if center not in finite:  # eager overflows and float64 does not, so only eager has the right infinities
        center = ""
    size = finite[center].size if center else first.eager_size
    noise = max(each.distance for each in finite.values())
    return Bound(NOISE * noise + EPS * first.eps * size + _finite(moved), center)


@torch.no_grad()
def move_towards_zero(gradient: torch.Tensor, admitted: float) -> torch.Tensor:
    """Move each element of a gradient towards 0 by its admitted error; smaller elements change their sign."""
    return gradient - admitted * gradient.sgn() if epsilon(gradient) else gradient


def error_share(actual: torch.Tensor, center: torch.Tensor, admitted: float) -> float:
    """Return a tensor's error as a share of the admitted error; above 1 the tensor is refused."""
    distance = difference(actual, center)
    if distance == 0.0:
        return 0.0
    return distance / admitted if admitted > 0.0 else math.inf


def name_mismatch(
    results: Mapping[str, tuple[torch.Tensor, torch.Tensor]], gradients: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> str:
    """Return the name of a tensor by which a witness is another computation; empty if it is the same.

    Both mappings hold pairs of eager's tensor and the witness's, see `find_mismatch`.
    """
    results_apart, gradients_apart = (
        {name: deviation(witness, eager) for name, (eager, witness) in pairs.items()} for pairs in (results, gradients)
    )
    return find_mismatch(results_apart, gradients_apart)


def find_mismatch(results: Mapping[str, Deviation], gradients: Mapping[str, Deviation]) -> str:
    """Return the name of a tensor by which a witness is another computation; empty if it is the same.

    A gradient far smaller than the largest one, as of a bias before a norm, is pure rounding error: its distance is
    compared with the largest gradient.
    """
    largest = max((each.eager_size for each in gradients.values()), default=0.0)
    for name, each in (*results.items(), *gradients.items()):
        vanishing = STRICT_EPS * each.eps * largest if name in gradients else 0.0
        if each.distance > max(witness_distance(each.eps) * each.eager_size, vanishing):
            return name
    return ""


def describe_gate(*, float64: bool, moved: bool, reason: str = "") -> str:
    """Return a description of the comparison; `reason` states why float64 could not be used."""
    if float64:
        return "relative gate against float64"
    because = f"; float64 cannot be used: {reason}" if reason else ""
    return f"{'relative' if moved else 'strict relative'} gate against eager{because}"


def worst_tensor(shares: Mapping[str, float], stages: Iterable[str] = ()) -> str:
    """Return the name of the tensor with the largest share; if tensors are refused, of the earliest stage among those.

    `stages` are prefixes of names, in order: a wrong gradient makes later tensors wrong too, possibly by more.
    """
    refused = {name for name, part in shares.items() if not part <= 1.0}
    for stage in stages:
        if early := [name for name in refused if name.startswith(stage)]:
            return max(early, key=lambda name: shares[name])
    return max(shares, key=lambda name: shares[name])


def _finite(moved: float) -> float:
    return moved if math.isfinite(moved) else 0.0


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield pieces of flat tensors on the CPU, inexact ones in float64: whole copies might not fit."""
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
