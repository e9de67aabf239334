"""Where plans are compared with eager: at the workload's own batch, or where that does not fit, at a smaller one."""

from dataclasses import dataclass, replace
from typing import Any

from autotune.errors import CaptureError, ConfigError, NumericsError
from autotune.ir.plan import Plan
from autotune.measure.children import Children
from autotune.measure.messages import WITNESSES, Failed
from autotune.records.json_codec import to_json
from autotune.records.measurement import Outcome
from autotune.workloads.reference import WorkloadRef


def plan_tolerance(device_kind: str) -> float:
    """Largest `max_error` accepted of a plan: on a CPU plans run the same kernels, so that every bit must agree."""
    return 1.0 if device_kind == "cuda" else 0.0


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which workload's results plans are compared with, and what those lie in."""

    arguments: dict[str, Any]
    reference: str
    """A directory."""
    capture_error: float = 0.0
    """Largest error of the captured step against eager, as a share of what the gate admits; 0 if every bit agrees."""
    how: str = ""
    """How the captured step was compared."""
    gate: str = ""
    """How tensors that are not equal bit for bit are compared; empty where none is admitted."""


def find_numerics(
    children: Children, workload: WorkloadRef, traced: Plan, *, reference: str, device_kind: str
) -> tuple[Numerics | None, int | None]:
    """Where eager and the traced plan both fit; and the floor of the process that found out, if that runs the workload.

    `reference` holds eager's results at the workload's own batch, empty where eager does not fit. None where eager fits
    at no batch that the factory takes. Raises NumericsError where the captured step differs from eager.
    """

    def compare(child: str, at: Numerics) -> tuple[Numerics, int]:
        return _compare(children, traced, at, child=child, workload=workload, device_kind=device_kind)

    if reference:
        try:
            return compare("bytes", Numerics(workload.arguments, reference))
        except Failed as failure:
            if failure.outcome is not Outcome.OUT_OF_MEMORY:
                raise failure.ours() or CaptureError(f"{workload}: the captured step fails: {failure.detail}") from None
    for batch in _smaller_batches(children, workload):
        arguments = {**workload.arguments, "batch": batch}
        reference = str(children.scratch / f"eager-{batch}")
        try:
            children.ask("eager", {"do": "baseline_bytes", "reference": reference}, arguments=arguments)
            children.end("eager")
            same = children.ask("numerics", {"do": "wiring"}, arguments=arguments)
            if same == children.ask("bytes", {"do": "wiring"}):
                return compare("numerics", Numerics(arguments, reference))[0], None
            children.end("numerics")
        except Failed as failure:
            children.end("numerics")
            if failure.error == ConfigError.__name__:
                break  # the factory takes no batch
    return None, None


def _compare(
    children: Children, traced: Plan, at: Numerics, *, child: str, workload: WorkloadRef, device_kind: str
) -> tuple[Numerics, int]:
    request = {"do": "plan_bytes", "plan": to_json(traced), "reference": at.reference, "tolerance": float("inf")}
    found = children.ask(child, request, arguments=at.arguments)
    how, gate = "bit-equal to eager", ""
    if found["max_error"] > 0 or device_kind == "cuda":
        gate = _bounds(children, at)
        found = children.ask(child, request, arguments=at.arguments)
        if not found["max_error"] <= 1.0:
            raise NumericsError(
                f"the captured step of {workload} differs from eager: {found['detail']} ({gate}); "
                "leave out what breaks it, or report the model"
            )
        if found["max_error"] > 0:
            how = f"{gate}, worst {found['max_error']:.2g} of the bound"
    error, reference = float(found["max_error"]), at.reference
    if error > 0 and device_kind == "cpu":
        reference = f"{reference}-traced"
        children.ask(child, {"do": "trace", "reference": reference}, arguments=at.arguments)
    return replace(at, reference=reference, capture_error=error, how=how, gate=gate), int(found["floor_bytes"])


def _bounds(children: Children, at: Numerics) -> str:
    """Measure eager's own rounding error, which bounds what may differ; how the gate compares then."""
    reasons: dict[str, str] = {}
    for name in WITNESSES:
        try:
            children.ask("eager", {"do": "witness", "reference": at.reference, "name": name}, arguments=at.arguments)
        except Failed as failure:
            reasons[name] = failure.detail.partition("\n")[0]
    request = {"do": "bounds", "reference": at.reference, "reasons": reasons}
    how = children.ask("eager", request, arguments=at.arguments)["how"]
    children.end("eager")
    return str(how)


def _smaller_batches(children: Children, workload: WorkloadRef) -> list[int]:
    found = children.try_to_ask("bytes", {"do": "batch_size"})
    if found is None:
        return []
    batch = int(workload.arguments.get("batch", found["batch"]))
    return [batch >> halvings for halvings in range(1, batch.bit_length())]
