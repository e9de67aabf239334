"""Choice of the results that plans are compared with: eager's at the workload's batch, or at a smaller one that fits."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import CaptureError, ConfigError, NumericsError, StoreError
from autotune.ir.plan import Plan
from autotune.measure.children import Children, ChildRole, refuse_killed
from autotune.measure.messages import (
    BatchSizeRequest,
    BoundsRequest,
    ChildError,
    Comparison,
    EagerPeakRequest,
    PlanCheck,
    PlanCheckRequest,
    RegionComparison,
    RegionsRequest,
    RoundingWitness,
    TracedResultsRequest,
    WiringRequest,
    WitnessRequest,
    WorkProgress,
)
from autotune.measure.spec import Spec
from autotune.records.measurement import Outcome


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """Results that plans are compared with."""

    arguments: dict[str, Any]
    """Arguments of the workload's factory that produced them."""
    directory: Path
    capture_error: float = 0.0
    """Largest error of the captured step against eager, as a share of the gate's bound; 0 if every bit agrees."""
    method: str = ""
    """Method by which the captured step was compared."""
    gate: str = ""
    """Comparison of tensors that are not bit-equal; empty before one was."""


def find_expected_results(
    children: Children, spec: Spec, traced: Plan, eager_results: Path | None
) -> tuple[ExpectedResults | None, int | None]:
    """Find a batch at which eager and the traced plan both fit, and compare the two there.

    `eager_results` holds eager's results at the workload's own batch; None where eager does not fit. Returns the results
    to compare with, None where no batch fits. Returns also the floor bytes of the process that ran the traced plan at the
    workload's own batch, else None. Raises NumericsError where the captured step differs from eager.
    """
    workload = spec.workload
    if eager_results is not None:
        try:
            expected = ExpectedResults(workload.arguments, eager_results)
            return _compare_traced(children, spec, traced, expected, ChildRole.PLAN_BYTES)
        except ChildError as error:
            refuse_killed(error, workload, "the captured step")
            if error.outcome is Outcome.DISK_FULL:
                raise StoreError(
                    f"{workload}: the results of the captured step could not be written: {error.detail}; free space on "
                    "the disk of the run directory, or name another one with runs"
                ) from error
            if error.outcome is not Outcome.OUT_OF_MEMORY:
                raise error.as_autotune_error() or CaptureError(
                    f"{workload}: the captured step fails: {error.detail}"
                ) from error
    for batch in _smaller_batches(children, spec):
        arguments = {**workload.arguments, spec.batch_argument: batch}
        results = children.scratch / f"eager-{batch}"
        try:
            children.ask(ChildRole.EAGER, EagerPeakRequest(results), arguments=arguments)
            children.end(ChildRole.EAGER)
            wiring = children.ask(ChildRole.NUMERICS, WiringRequest(), arguments=arguments)
            if wiring == children.ask(ChildRole.PLAN_BYTES, WiringRequest()):
                expected = ExpectedResults(arguments, results)
                return _compare_traced(children, spec, traced, expected, ChildRole.NUMERICS)[0], None
            children.end(ChildRole.NUMERICS)
        except ChildError as error:
            children.end(ChildRole.NUMERICS)
            if error.error == ConfigError.__name__:
                break  # the factory has no such argument
    return None, None


def check_plan(
    children: Children,
    expected: ExpectedResults | None,
    role: ChildRole,
    plan: Plan,
    *,
    tolerance: float,
    compares: bool,
) -> tuple[PlanCheck, ExpectedResults | None]:
    """Compare a plan's results if it `compares`, and measure its bytes.

    Returns the check, and the expected results with a gate if the plan is the first one that is not bit-equal: only then
    the bounds are derived. With a tolerance of 0 no gate is needed.
    """
    if not compares or expected is None:
        return children.ask(role, PlanCheckRequest(plan, None, tolerance)), expected
    request = PlanCheckRequest(plan, expected.directory, tolerance)
    check = children.ask(role, request, arguments=expected.arguments)
    assert check.comparison is not None
    if check.comparison.max_error > 0 and tolerance and not expected.gate:
        expected = replace(expected, gate=_derive_bounds(children, expected))
        check = children.ask(role, request, arguments=expected.arguments)
    return check, expected


def describe_comparison(expected: ExpectedResults | None, spec: Spec, error: float) -> str:
    """Describe how a plan whose error is within the gate was compared; empty where nothing could be."""
    if expected is None:
        return ""
    method = expected.method
    if spec.device_kind == "cuda" and error:
        method = f"{expected.gate}, worst {error:.2g} of the bound"
    elif spec.device_kind == "cpu" and expected.capture_error:
        method = f"bit-equal to the captured step, and that within the {method}"
    if expected.arguments == spec.workload.arguments:
        return method
    return f"{method}; compared at batch {expected.arguments[spec.batch_argument]}"


def _compare_traced(
    children: Children, spec: Spec, traced: Plan, expected: ExpectedResults, role: ChildRole
) -> tuple[ExpectedResults, int]:
    def check() -> tuple[Comparison, int]:
        request = PlanCheckRequest(traced, expected.directory, tolerance=float("inf"))
        reply = children.ask(role, request, arguments=expected.arguments)
        assert reply.comparison is not None
        assert reply.memory is not None
        return reply.comparison, reply.memory.floor_bytes

    gate, directory = "", expected.directory
    if spec.kernels and not spec.exact:  # compiled kernels round in another way
        gate = _derive_bounds(children, expected)
    comparison, floor_bytes = check()
    if comparison.max_error > 0 and not gate:
        gate = _derive_bounds(children, expected)
        comparison, floor_bytes = check()
    if comparison.max_error > 0 and spec.device_kind == "cpu":
        directory = directory.with_name(f"{directory.name}-traced")
        children.ask(role, TracedResultsRequest(directory), arguments=expected.arguments)
    if comparison.max_error > 0 and spec.kernels and not spec.exact:
        error, method = _compare_regions(children, spec, expected, directory, comparison, traced=traced, gate=gate)
    else:
        error, method = comparison.max_error, _describe_step(spec, comparison, gate)
    expected = replace(expected, directory=directory, capture_error=error, method=method, gate=gate)
    return expected, floor_bytes


def _describe_step(spec: Spec, comparison: Comparison, gate: str) -> str:
    """Describe a captured step that the gate accepts; raise NumericsError for one that it refuses."""
    if spec.exact and comparison.max_error > 0:
        raise NumericsError(
            f"the captured step of {spec.workload} does not have eager's bits: {comparison.detail} ({gate}); "
            "leave exact out (--exact, exact: or exact=) to accept rounding"
        )
    if not comparison.max_error <= 1.0:
        raise NumericsError(
            f"the captured step of {spec.workload} differs from eager: {comparison.detail} ({gate}); "
            "leave out what breaks it, or report the model"
        )
    if comparison.max_error > 0:
        return f"{gate}, worst {comparison.max_error:.2g} of the bound"
    # another format may take other kernels, and threads add in another order: eager's own results may differ by rounding
    threads = f" on {spec.threads} thread{'s' * (spec.threads != 1)}" if spec.threads else ""
    return f"bit-equal to eager{f' in {spec.memory_format}' if spec.memory_format else ''}{threads}"


def _compare_regions(
    children: Children,
    spec: Spec,
    expected: ExpectedResults,
    directory: Path,
    comparison: Comparison,
    *,
    traced: Plan,
    gate: str,
) -> tuple[float, str]:
    """Compare each compiled region with float64, and the region graph, its ops run one by one, with eager.

    A step whose regions all pass is accepted even where the whole step exceeds its bound: rounding may change the sign of
    a ReLU's operand, and every later value moves with it. `comparison` is that of the whole step, whose results are
    in `directory`. Returns the largest error as a share of its bound, and a description.

    Raises NumericsError where a region or the graph differs.
    """
    request = RegionsRequest(traced, expected.directory, directory if directory != expected.directory else None)
    children.report(WorkProgress("comparing compiled regions with float64"))
    try:
        # without a memory limit: float64 takes twice the bytes
        reply = children.ask(
            ChildRole.KERNELS, request, arguments=expected.arguments, seconds=spec.prepare_limit_seconds
        )
    except ChildError as error:
        if (raised := error.as_autotune_error()) is not None:
            raise raised from error
        method = _describe_step(spec, comparison, gate)
        return comparison.max_error, f"{method}; regions were not compared one by one: {error.summary()}"
    finally:
        children.end(ChildRole.KERNELS)
    _refuse_wrong_regions(spec, reply, gate)
    each = f"each region within the relative gate against float64, worst {reply.regions.max_error:.2g} of the bound"
    if comparison.max_error <= 1.0:
        errors = comparison.max_error, reply.regions.max_error
        return max(errors), f"{_describe_step(spec, comparison, gate)}; {each}"
    if not math.isfinite(comparison.max_error):  # a tensor is missing, or an integer differs: no rounding
        _describe_step(spec, comparison, gate)
    step = f"rounding that changes signs moves the whole step by {comparison.max_error:.2g} of its bound"
    return max(reply.regions.max_error, reply.step.max_error), f"{each}; {step}"


def _refuse_wrong_regions(spec: Spec, reply: RegionComparison, gate: str) -> None:
    if not reply.step.max_error <= 1.0:
        _describe_step(spec, reply.step, gate)
    wrong = reply.differs or ("" if reply.regions.max_error <= 1.0 else reply.regions.detail)
    if wrong:
        raise NumericsError(
            f"compiled kernels of {spec.workload} differ from eager's: {wrong} (relative gate against float64, on the same "
            "inputs); use --kernels aten, and report the model"
        )


def _derive_bounds(children: Children, expected: ExpectedResults) -> str:
    """Measure eager's own rounding error, which bounds each difference; return a description of the gate."""
    reasons: dict[str, str] = {}
    for witness in RoundingWitness:
        try:
            request = WitnessRequest(expected.directory, witness)
            children.ask(ChildRole.EAGER, request, arguments=expected.arguments)
        except ChildError as error:
            reasons[witness] = error.detail.partition("\n")[0]
    bounds = BoundsRequest(expected.directory, reasons)
    gate = children.ask(ChildRole.EAGER, bounds, arguments=expected.arguments).text
    children.end(ChildRole.EAGER)
    return gate


def _smaller_batches(children: Children, spec: Spec) -> list[int]:
    """Return the workload's batch size halved again and again, down to 1; empty where the size is unknown."""
    reply = children.try_to_ask(ChildRole.PLAN_BYTES, BatchSizeRequest())
    if reply is None:
        return []
    batch = int(spec.workload.arguments.get(spec.batch_argument, reply.batch))
    return [batch >> halvings for halvings in range(1, batch.bit_length())]
