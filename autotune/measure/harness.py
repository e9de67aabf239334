"""The harness: prepare a workload, then measure its baseline and its plans in child processes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from autotune.ir.plan import Plan
from autotune.measure.children import Children, ChildRole, refuse_killed
from autotune.measure.interleaving import PlanTiming, TimedSide, describe_mismatch, time_beside_eager
from autotune.measure.limits import available_bytes
from autotune.measure.messages import (
    ChildError,
    CompileRequest,
    DigestsRequest,
    EagerPeakRequest,
    EagerResultsRequest,
    PlanCheck,
    WorkProgress,
    record_failure,
)
from autotune.measure.meters.cgroup import remove_stale
from autotune.measure.numerics import ExpectedResults, check_plan, describe_comparison, find_expected_results
from autotune.measure.spec import PATIENCE_SECONDS, Spec
from autotune.measure.survey import (
    PreparedWorkload,
    WorkloadSurvey,
    explain_eager_failure,
    explain_survey_failure,
    plan_tolerance,
)
from autotune.records.device import Device
from autotune.records.machine_load import explain_disturbance
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.workloads.reference import check_reference

BASELINE_PROCESSES = 2
"""Number of new processes in which the baseline's charge is measured; their range is the spread to allow for."""
HOPELESS_EXCESS = 0.03
"""Share of the budget above which a plan's charge makes its exact time useless: it cannot be planned a little lower."""
KEEPING_FACTOR = 3
"""Available memory at which processes keep theirs between two steps, as a multiple of eager's charge."""


class Harness:
    """Measures the plans of one workload; a context manager that ends its processes.

    Use it from one thread, and only from a thread that lives until `close`: the children die with the thread that
    started them. This side imports no torch. ConfigError where the file or the zoo workload does not exist.
    """

    def __init__(self, spec: Spec) -> None:
        check_reference(spec.workload.reference)
        self._spec = spec
        self._children = Children(spec)
        self._baseline: Measurement | None = None
        self._baseline_error: ChildError | None = None
        self._recorded: tuple[Measurement, Device] | None = None
        self._eager_results: Path | None = None
        self._surveyed: WorkloadSurvey | None = None
        self._prepared: PreparedWorkload | None = None
        self._expected: ExpectedResults | None = None
        self._digests: Mapping[str, str] | None = None
        self._bytes: dict[Plan, Measurement] = {}
        self._free_bytes: int | None = None
        remove_stale()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all children and remove all temporary files; the logs stay."""
        self._children.close()

    def renew(self) -> None:
        """End all children: the next measurement uses new processes."""
        self._children.end_all()

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        """Use a recorded baseline if this is the same device with the same threads, and it was not disturbed."""
        self._recorded = (measurement, device)

    def listen(self, report: Callable[[WorkProgress], None]) -> None:
        """Report the progress of capture, profile and baseline to a function."""
        self._children.report = report

    def baseline(self) -> Measurement:
        """Measure plain eager steps once, in processes of their own; a step that does not fit is an Outcome."""
        if self._baseline is None:
            self._baseline = self._reuse_recorded() or replace(self._measure_baseline(), limit=self._children.limit)
        return self._baseline

    def survey(self) -> WorkloadSurvey:
        """Capture the step and profile its ops on synthetic tensors; no step runs."""
        if self._surveyed is None:
            self._surveyed = self._survey()
            self._free_bytes = self._free_bytes or self._surveyed.free_bytes
        return self._surveyed

    def prepare(self) -> PreparedWorkload:
        """Survey the workload, measure the baseline, and compare the captured step with eager."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
        """Compare a plan's results, then measure its seconds beside eager, then its bytes.

        `budget_bytes` limits the charge of the step itself, without the floor. `beat` is a ratio to eager's time; a plan
        whose steps all stay above it is stopped early. The charge is measured with the seconds, the peak only of a plan
        within the budget whose time ratio is at most `beat`. A failure of the plan is an Outcome, and so is a full disk.
        Raises the child's PlanError, ConfigError or any other StoreError.
        """
        return replace(
            self._measure(plan, budget_bytes, beat), limit=self._children.limit, device=self.prepare().device
        )

    def _measure(self, plan: Plan, budget_bytes: int | None, beat: float | None) -> Measurement:
        self.prepare()
        measurement = Measurement(Outcome.OK)
        try:
            if self._digests is not None:
                return self._measure_seconds_first(plan, self._digests, budget_bytes, beat)
            measurement = self._check_results_and_bytes(plan, measurement)
            if measurement.outcome is Outcome.OK:
                measurement = apply_budget(self._measure_seconds(plan, measurement, beat), budget_bytes)
        except ChildError as error:
            return record_failure(measurement, error)
        return measurement

    def _measure_seconds_first(
        self, plan: Plan, digests: Mapping[str, str], budget_bytes: int | None, beat: float | None
    ) -> Measurement:
        """Compare the plan's bits in the process that times it; measure the bytes once, of a plan that may lead."""
        measurement = Measurement(
            Outcome.OK, max_error=0.0, verified=describe_comparison(self._expected, self._spec, 0.0)
        )
        try:
            measurement = self._measure_seconds(plan, measurement, beat, digests, budget_bytes)
        except ChildError as error:
            if error.outcome is not Outcome.WRONG_RESULT:
                raise
            checked = self._check_results_and_bytes(plan, Measurement(Outcome.OK))  # it knows by how much
            return record_failure(replace(checked, verified=""), error) if checked.outcome is Outcome.OK else checked
        measurement = apply_budget(measurement, budget_bytes)
        if measurement.outcome is not Outcome.OK or (beat is not None and (measurement.time_ratio or 0.0) > beat):
            return measurement
        checked = self._bytes.get(plan) or self._check_results_and_bytes(plan, Measurement(Outcome.OK))
        if checked.outcome is Outcome.OK:
            self._bytes[plan] = checked
        floor_bytes = measurement.floor_bytes if checked.floor_bytes is None else checked.floor_bytes
        return replace(
            measurement,
            outcome=checked.outcome,
            detail="; ".join(filter(None, (measurement.detail, checked.detail))),
            max_error=checked.max_error,
            verified=checked.verified,
            peak_bytes=checked.peak_bytes,
            floor_bytes=floor_bytes,
            charged_bytes=(measurement.step_charged_bytes or 0) + (floor_bytes or 0),
        )

    def _hash_traced(self, traced: Plan, *, baseline_fits: bool) -> Mapping[str, str] | None:
        """Return the hashes of the captured step that every plan has to equal; None where plans need not be bit-equal.

        They are of the workload's own batch, so they are missing where eager does not fit.
        """
        expected = self._expected
        if self._spec.device_kind != "cpu" or expected is None or not baseline_fits:
            return None
        if expected.arguments != self._spec.workload.arguments:
            return None
        reply = self._children.try_to_ask(ChildRole.PLAN_BYTES, DigestsRequest(traced))
        return None if reply is None else reply.digests

    def _reuse_recorded(self) -> Measurement | None:
        """Return the recorded baseline, with eager's results computed again to compare plans with; None if it is not valid."""
        measurement, device = self._recorded or (None, None)
        if measurement is None or measurement.outcome is not Outcome.OK or measurement.disturbed:
            return None
        if self.survey().device != device:
            return None
        results = self._children.scratch / "eager"
        if self._children.try_to_ask(ChildRole.EAGER, EagerResultsRequest(results)) is None:
            return None
        self._children.end(ChildRole.EAGER)
        self._eager_results = results
        return measurement

    def _measure_baseline(self) -> Measurement:
        measurement = Measurement(Outcome.OK)
        results = self._children.scratch / "eager"
        try:
            self._children.report(WorkProgress("importing the workload and measuring the baseline's bytes"))
            self._children.start_early(ChildRole.EAGER, ChildRole.EAGER_SECONDS)
            peak = self._children.ask(ChildRole.EAGER, EagerPeakRequest(results))
            measurement = replace(
                measurement,
                peak_bytes=peak.peak_bytes,
                floor_bytes=peak.floor_bytes,
                meter=peak.meter,
                max_error=0.0,
            )
            self._children.end(ChildRole.EAGER)
            self._eager_results, self._free_bytes = results, peak.free_bytes
            self._children.report(WorkProgress("timing the baseline"))
            rests = self._spec.device_kind == "cpu" or not self._can_keep_memory(peak.peak_bytes)
            timing = self._time(TimedSide(partial(self._children.ask, ChildRole.EAGER_SECONDS)), rests=rests)
            if self._disturbance(timing):
                timing = self._time(TimedSide(partial(self._children.ask, ChildRole.EAGER_SECONDS)), rests=rests)
        except ChildError as error:
            self._children.end(ChildRole.EAGER_SECONDS)
            refuse_killed(error, self._spec.workload, "the baseline")
            self._baseline_error = error
            return record_failure(measurement, error)
        charges = (timing.step_charged_bytes, *self._repeat_charge())
        return replace(
            measurement,
            charged_bytes=timing.step_charged_bytes + peak.floor_bytes,
            process_charged_bytes=tuple(charge + peak.floor_bytes for charge in charges),
            step_seconds=timing.step_seconds,
            baseline_seconds=timing.step_seconds,
            load=timing.load,
            disturbed=self._disturbance(timing),
        )

    def _repeat_charge(self) -> list[int]:
        """Return the charge of an eager step, above the floor, in each further process; empty where one ends."""
        charges = []
        for _ in range(1, BASELINE_PROCESSES):
            self._children.end(ChildRole.EAGER_SECONDS)
            self._children.start_early(*([] if self._surveyed else [ChildRole.SURVEY]))
            eager = TimedSide(partial(self._children.ask, ChildRole.EAGER_SECONDS))
            try:
                eager.begin()
                charged_bytes = eager.run_block().charged_bytes
                charges.append(charged_bytes - eager.finish().floor_bytes)
            except ChildError:
                break
        return charges

    def _prepare(self) -> PreparedWorkload:
        baseline = self.baseline()
        if baseline.outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY):
            raise explain_eager_failure(self._spec.workload, baseline) from self._baseline_error
        surveyed = self.survey()
        traced = Plan.traced(surveyed.graph)
        self._children.report(WorkProgress("comparing the captured step with eager"))
        self._children.start_early(ChildRole.PLAN_SECONDS)
        self._expected, floor = find_expected_results(self._children, self._spec, traced, self._eager_results)
        baseline_fits = baseline.outcome is Outcome.OK
        self._digests = self._hash_traced(traced, baseline_fits=baseline_fits)
        return PreparedWorkload(
            graph=surveyed.graph,
            costs=surveyed.costs,
            device=surveyed.device,
            floor_bytes=surveyed.floor_bytes if floor is None else floor,
            baseline_fits=baseline_fits,
            capture_error=self._expected.capture_error if self._expected is not None else None,
            verified=describe_comparison(self._expected, self._spec, 0.0),
            loop=surveyed.loop,
        )

    def _survey(self) -> WorkloadSurvey:
        workload, seconds = self._spec.workload, self._spec.prepare_limit_seconds
        try:
            if self._spec.kernels:
                self._children.ask(ChildRole.KERNELS, CompileRequest(), seconds=seconds)
                self._children.end(ChildRole.KERNELS)
            return self._children.ask_for_survey(seconds)
        except ChildError as error:
            refuse_killed(error, workload, "capture and profile")
            raise error.as_autotune_error() or explain_survey_failure(
                workload, error.outcome, error.detail, seconds=seconds, limit_bytes=self._spec.limit_bytes
            ) from error

    def _check_results_and_bytes(self, plan: Plan, measurement: Measurement) -> Measurement:
        expected = self._expected
        tolerance = 0.0 if self._spec.exact else plan_tolerance(self._spec.device_kind)
        is_own = expected is not None and expected.arguments == self._spec.workload.arguments
        if expected is None:
            detail = "results not compared: eager fits at no batch size that the factory takes"
            measurement = replace(measurement, detail=detail)
        elif not is_own:
            check = self._check_plan(ChildRole.NUMERICS, plan, tolerance, compares=True)
            assert check.comparison is not None
            measurement = replace(measurement, max_error=check.comparison.max_error)
            if check.memory is None:
                return replace(measurement, outcome=Outcome.WRONG_RESULT, detail=check.comparison.detail)
            measurement = replace(
                measurement, detail=f"results compared at batch {expected.arguments[self._spec.batch_argument]}"
            )
        check = self._check_plan(ChildRole.PLAN_BYTES, plan, tolerance, compares=is_own)
        if (comparison := check.comparison) is not None:
            detail = comparison.detail or measurement.detail
            measurement = replace(measurement, max_error=comparison.max_error, detail=detail)
        if check.memory is None:
            return replace(measurement, outcome=Outcome.WRONG_RESULT)
        measurement = replace(
            measurement,
            peak_bytes=check.memory.peak_bytes,
            floor_bytes=check.memory.floor_bytes,
            meter=check.memory.meter,
        )
        if measurement.max_error is None:
            return measurement
        return replace(measurement, verified=describe_comparison(self._expected, self._spec, measurement.max_error))

    def _check_plan(self, role: ChildRole, plan: Plan, tolerance: float, *, compares: bool) -> PlanCheck:
        check, self._expected = check_plan(
            self._children, self._expected, role, plan, tolerance=tolerance, compares=compares
        )
        return check

    def _measure_seconds(
        self,
        plan: Plan,
        measurement: Measurement,
        beat: float | None,
        digests: Mapping[str, str] | None = None,
        budget_bytes: int | None = None,
    ) -> Measurement:
        prepared = self.prepare()
        eager = TimedSide(partial(self._children.ask, ChildRole.EAGER_SECONDS)) if prepared.baseline_fits else None
        planned = TimedSide(partial(self._children.ask, ChildRole.PLAN_SECONDS), plan, digests, prepared.floor_bytes)
        most_bytes = None
        if digests is not None and budget_bytes is not None:
            most_bytes = int(budget_bytes * (1 + HOPELESS_EXCESS))
        rests = not self._can_keep_memory(self.baseline().charged_bytes)
        timing = self._time(planned, eager, beat=beat, most_bytes=most_bytes, rests=rests)
        if timing.stopped_early:
            count, ratio = len(timing.step_seconds), timing.time_ratio
            detail = f"{count} steps took {ratio:.3f} of eager's time, surely more than {beat:.3f}: no more were timed"
            measurement = replace(measurement, outcome=Outcome.STOPPED_EARLY, detail=detail)
        if timing.end.mismatch:
            return replace(measurement, outcome=Outcome.WRONG_RESULT, detail=describe_mismatch(timing.end))
        steps, beside = timing.step_seconds, timing.baseline_seconds
        if timing.baseline_failure is not None:
            # seconds without eager's would be compared with the ratios of other measurements
            beside = self.baseline().baseline_seconds[: len(steps)]
            steps = steps[: len(beside)]
            failure = f"plain eager ended beside it ({timing.baseline_failure}): its times are set beside eager's own, measured before"
            measurement = replace(measurement, detail="; ".join(filter(None, (measurement.detail, failure))))
        # libraries of two processes hold different amounts: the charge above its own floor, on the floor of the bytes
        floor_bytes = timing.end.floor_bytes if measurement.floor_bytes is None else measurement.floor_bytes
        return replace(
            measurement,
            floor_bytes=floor_bytes,
            charged_bytes=timing.step_charged_bytes + floor_bytes,
            step_seconds=steps,
            baseline_seconds=beside,
            stall_seconds=timing.stall_seconds,
            transfer_bytes=timing.last_block.transfer_bytes,
            lanes=timing.last_block.lanes,
            meter=timing.last_block.meter,
            load=timing.load,
            disturbed=self._disturbance(timing),
        )

    def _time(
        self,
        timed: TimedSide,
        eager: TimedSide | None = None,
        *,
        beat: float | None = None,
        most_bytes: int | None = None,
        rests: bool = True,
    ) -> PlanTiming:
        """Time blocks of one side, with eager's blocks between them if there is another side."""
        return time_beside_eager(
            timed,
            eager,
            samples=self._spec.samples,
            patience_seconds=min(PATIENCE_SECONDS, self._children.time_limit_seconds / 3),
            beat=beat,
            most_bytes=most_bytes,
            rests=rests,
            counters=self._children.counters,
        )

    def _can_keep_memory(self, eager_bytes: int | None) -> bool:
        """Return True if the processes of plan and eager can both keep their memory between two steps."""
        if self._spec.device_kind == "cpu" and self._free_bytes is None:
            self._free_bytes = available_bytes()  # read once: later the children hold a part of it
        free_bytes = self._free_bytes
        return eager_bytes is not None and free_bytes is not None and free_bytes > KEEPING_FACTOR * eager_bytes

    def _disturbance(self, timing: PlanTiming) -> str:
        """Explain why other work disturbed the times, compared with the baseline's if that was undisturbed."""
        baseline = self._baseline
        undisturbed = baseline is not None and not baseline.disturbed
        reference = baseline.median_seconds if baseline is not None and undisturbed else None
        return explain_disturbance(timing.load, timing.eager_blocks, reference)
