"""The gate of compiled regions: compare each kernel with the region's ops in float64, on the inputs that the step has.

A gate on the whole step cannot distinguish an error from a difference in rounding if the model has thresholds: one changed
sign of a ReLU's operand moves every later value.
A single region has the same inputs as its reference, so no error is carried from
another region. Inputs whose elements are all equal, such as the zeros of a new bias, are varied in a further comparison: a
term that is missing would not show otherwise. Of each output, every element must fulfil

    |x - center| <= NOISE * jumps + NOISE * noise + EPS * eps * max|center|

`center` is the float64 result. `jumps` is the change of this element by decisions whose operands lie within rounding of their
thresholds (`region_reference`); it is 0 where none does. `noise` is the largest distance to the center, beyond the jumps, of
the region's ops run one by one, or of the float64 result if every value is moved by one rounding. `eps` is that of the
output's dtype. Elements of other dtypes and non-finite ones must be equal unless a decision changes them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autotune.capture.program import Program
from autotune.kernels.compiled_region import CompiledRegion
from autotune.runtime.verification.gates import EPS, NOISE, STRICT_EPS, epsilon, magnitude, witness_distance
from autotune.runtime.verification.region_reference import OutputValues, RegionReference
from autotune.runtime.verification.witness import to_double

VARIATION = 0.1
"""Largest number that is added to elements which are all equal."""


@dataclass
class RegionGate:
    """The comparison of all compiled regions that a program runs.

    Examples:
        >>> from autotune.capture.tracer import capture
        >>> from autotune.kernels.region_program import fuse
        >>> from autotune.workloads.workload import Workload
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Tanh())
        >>> step = capture(Workload(model, lambda model, x: model(x).sin().sum(), None, torch.ones(2, 4)))
        >>> gate = RegionGate()
        >>> checked = gate.watch(fuse(step))
        >>> gate.max_share
        0.0
    """

    max_share: float = 0.0
    """Largest error of an output so far, as a share of its bound; above 1 the kernel is wrong."""
    detail: str = ""
    """Region and output of the largest error; empty while all are equal to the reference."""
    _references: dict[str, RegionReference] = field(default_factory=dict)

    def watch(self, program: Program) -> Program:
        """Return a program whose compiled regions are compared at each call. It computes the same values."""
        return _with_targets(program, lambda region, name: partial(self.run, region, name))

    def run(self, region: CompiledRegion, name: str, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run a region's kernel, compare its outputs, and return them."""
        if region.signature not in self._references:
            self._references[region.signature] = RegionReference(region.region, tensors)
            varied = [_vary(tensor, number) for number, tensor in enumerate(tensors)]
            is_other = any(new is not tensor for new, tensor in zip(varied, tensors, strict=True))
            # varied inputs outside of an op's domain (non-finite results) do not test the kernel
            if is_other and all(output.isfinite().all() for output in region.region(*varied)):
                self._compare(region, f"{name} on varied inputs", varied)
        return self._compare(region, name, tensors)

    def _compare(self, region: CompiledRegion, name: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        before = [tensor.clone() for tensor in tensors]
        plain = region.region(*before)
        reference = self._references[region.signature]
        values = reference.evaluate(before)
        outputs = region(*tensors)
        for number, (output, each, expected) in enumerate(zip(outputs, values, plain, strict=True)):
            share = 0.0 if number in reference.undefined else output_share(output, each, expected, reference.epsilon)
            self._record(share, f"output {number} of {name}")
        for number, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
            if _distances(tensor, old).any():
                self._record(math.inf, f"input {number} of {name}")
        return outputs

    def _record(self, share: float, name: str) -> None:
        if share > self.max_share or math.isnan(share):
            self.max_share = math.inf if math.isnan(share) else share
            self.detail = f"{name} is off by {self.max_share:.3g} of its bound"


def one_by_one(program: Program) -> Program:
    """Return a program whose regions run their ops one by one, with eager's kernels."""
    return _with_targets(program, lambda region, _: region.region)


def output_share(actual: torch.Tensor, values: OutputValues, plain: torch.Tensor, coarsest: float = 0.0) -> float:
    """Return the error of a region's output as a share of its bound.

    Args:
        actual: The kernel's output.
        values: The output in float64.
        plain: The output of the region's ops, run one by one.
        coarsest: The coarsest rounding inside of the region, if not that of the output's dtype.
    """
    if (actual.shape, actual.dtype) != (plain.shape, plain.dtype):
        return math.inf
    center, jumps = values.center, values.jumps
    if not epsilon(actual):
        return 0.0 if _excess(actual, center, jumps) == 0.0 else math.inf
    eps, size = epsilon(actual), magnitude(center)
    moved, error = _excess(values.moved, center, jumps), _excess(plain, center, jumps)
    if error <= max(witness_distance(max(eps, coarsest)) * size, STRICT_EPS * moved):
        admitted = NOISE * max(error, moved) + EPS * eps * size
    else:  # eager's own ops are far from float64, so they are the reference instead
        center, admitted = plain, STRICT_EPS * eps * magnitude(plain)
    excess = _excess(actual, center, jumps)
    if excess == 0.0:
        return 0.0
    return excess / admitted if admitted > 0.0 else math.inf


def _vary(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a tensor of other elements if all are equal, else the tensor itself."""
    if not tensor.dtype.is_floating_point or not tensor.numel() or not tensor.eq(tensor.flatten()[0]).all():
        return tensor
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(tensor).copy_(tensor + VARIATION * noise.to(tensor.device))


def _excess(tensor: torch.Tensor, center: torch.Tensor, jumps: torch.Tensor | None) -> float:
    """Return the largest distance of an element to the center, beyond the change that decisions may cause."""
    distances = _distances(tensor, center)
    if jumps is not None:
        distances = (distances - NOISE * jumps).clamp_(min=0.0)
    return float(distances.max().item()) if distances.numel() else 0.0


def _distances(tensor: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """Return the distance of each element; infinity where only one of both is finite."""
    wide, middle = to_double(tensor).double(), center.double()
    equal = (wide == middle) | (wide.isnan() & middle.isnan())
    gap = torch.where(equal, 0.0, (wide - middle).abs())
    return torch.where(gap.isfinite(), gap, math.inf)


def _with_targets(program: Program, wrap: Callable[[CompiledRegion, str], Callable[..., Any]]) -> Program:
    """Return a program with other callables behind its compiled regions."""
    calls = tuple(
        replace(call, target=wrap(call.target, op.name)) if isinstance(call.target, CompiledRegion) else call
        for op, call in zip(program.graph.ops, program.calls, strict=True)
    )
    return replace(program, calls=calls)
