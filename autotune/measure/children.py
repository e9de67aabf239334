"""The harness's child processes by role: started at the first request, replaced after a failure, removed with their files."""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from autotune.errors import WorkerError
from autotune.measure.allocator_env import allocator_environment
from autotune.measure.child import Child
from autotune.measure.machine_counters import MachineCounters, read_counters
from autotune.measure.messages import (
    BeginTiming,
    ChildError,
    DigestsRequest,
    Expects,
    FinishTiming,
    PlanCheckRequest,
    ReplyT,
    SurveyRequest,
    TimeBlock,
    TimedDigestsRequest,
    WorkProgress,
    ignore_progress,
)
from autotune.measure.scratch import Scratch
from autotune.measure.spec import Spec
from autotune.measure.survey import WorkloadSurvey
from autotune.records.measurement import KILLED, Outcome
from autotune.workloads.loop import Loop
from autotune.workloads.reference import WorkloadRef


class ChildRole(StrEnum):
    """Purpose of a child process; the values name the log files."""

    SURVEY = "prepare"
    """Capture and profiling."""
    UNLIMITED_SURVEY = "profile"
    """Capture and profiling where the memory limit has no room for them: no step runs there."""
    KERNELS = "kernels"
    """Compilation, without a memory limit: compilers take more than some models."""
    EAGER = "eager"
    """Bytes and results of plain eager steps."""
    PLAN_BYTES = "bytes"
    """Bytes and results of plans."""
    NUMERICS = "numerics"
    """Results of plans at a smaller batch."""
    PLAN_SECONDS = "seconds"
    """Times of plans."""
    EAGER_SECONDS = "beside"
    """Times of plain eager steps, between those of a plan."""


_UNLIMITED = (ChildRole.KERNELS, ChildRole.UNLIMITED_SURVEY)
_RETURN_MEMORY = (ChildRole.PLAN_BYTES, ChildRole.EAGER, ChildRole.NUMERICS)


class Children:
    """Processes of one workload. All share the spec, except for the fields that are set here."""

    def __init__(self, spec: Spec) -> None:
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        self._directory = Scratch(spec.log_dir, "scratch-")
        self.scratch = self._directory.path
        self.time_limit_seconds = spec.time_limit_seconds * Loop.parse(spec.loop).accumulate
        self.limit = ""
        """Mechanism that enforces the memory limit; empty without a limit, and until the first child has started."""
        self.living: dict[ChildRole, Child] = {}
        self.report: Callable[[WorkProgress], None] = ignore_progress
        """Receives the progress of requests."""
        self._spec = spec
        self._numbers = itertools.count(1)

    def ask(
        self,
        role: ChildRole,
        request: Expects[ReplyT],
        *,
        arguments: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> ReplyT:
        """Send a request to the child of this role; start one if none lives, with other factory `arguments` if given.

        A plan whose allocator needs another environment gets a new child. Raises ChildError where the child does not
        answer; it is ended, and the next request starts a new one.
        """
        child, environment = self.living.get(role), self._environment(request)
        usable = child is not None and environment in (None, child.environment)
        # only the process that began timing can continue it: if it died, its own error says why
        continues = isinstance(request, TimedDigestsRequest | TimeBlock | FinishTiming)
        if child is None or not (usable and (child.alive or continues)):
            self.end(role)
            child = self.living[role] = self._start(role, arguments, environment or {})
        try:
            return child.ask(request, self.time_limit_seconds if seconds is None else seconds)
        except BaseException:
            self.end(role)
            raise

    def start_early(self, *roles: ChildRole) -> None:
        """Start the children of these roles, which import their libraries meanwhile; call it while nothing is timed."""
        for role in roles:
            if role not in self.living:
                self.living[role] = self._start(role, None, {})

    def ask_for_survey(self, seconds: float) -> WorkloadSurvey:
        """Capture and profile in a child that ends afterwards; without the memory limit where that has no room for it.

        A profiled op has synthetic tensors beside the workload's own, so it may need more than a plan does.
        """
        try:
            return self.ask(ChildRole.SURVEY, SurveyRequest(), seconds=seconds)
        except ChildError as error:
            if error.outcome is not Outcome.OUT_OF_MEMORY or self._spec.limit_bytes is None:
                raise
            self.report(WorkProgress("profiling again without the memory limit, which has no room for single ops"))
            return self.ask(ChildRole.UNLIMITED_SURVEY, SurveyRequest(), seconds=seconds)
        finally:
            self.end(ChildRole.SURVEY)
            self.end(ChildRole.UNLIMITED_SURVEY)

    def try_to_ask(self, role: ChildRole, request: Expects[ReplyT]) -> ReplyT | None:
        """Send a request whose failure does not matter; None then."""
        try:
            return self.ask(role, request)
        except ChildError:
            return None

    def counters(self) -> MachineCounters | None:
        """Read the machine's counters, with the CPU time of the living children as the measurement's own."""
        return read_counters([child.pid for child in self.living.values()])

    def end(self, role: ChildRole) -> None:
        """End the child of this role, if there is one, and remove its files."""
        child = self.living.pop(role, None)
        if child is not None:
            child.end()
            shutil.rmtree(self.scratch / f"initial-{child.pid}", ignore_errors=True)  # as large as the model

    def end_all(self) -> None:
        """End every child."""
        for role in list(self.living):
            self.end(role)

    def close(self) -> None:
        """End every child and remove the temporary files; the logs stay."""
        self.end_all()
        self._directory.remove()

    def _environment(self, request: Expects[Any]) -> dict[str, str] | None:
        """Return the variables that a request needs; None where any environment will do or no plan is involved."""
        match request:
            case BeginTiming(plan) | PlanCheckRequest(plan=plan) | DigestsRequest(plan) if plan is not None:
                return allocator_environment(plan.allocator, self._spec.device_kind, os.environ)
        return None

    def _start(self, role: ChildRole, arguments: Mapping[str, Any] | None, environment: Mapping[str, str]) -> Child:
        spec = replace(self._spec, scratch=self.scratch, return_memory=role in _RETURN_MEMORY)
        if role in _UNLIMITED:
            spec = replace(spec, limit_bytes=None)
        if arguments is not None:
            spec = replace(spec, workload=replace(spec.workload, arguments=dict(arguments)))
        child = Child.start(spec, spec.log_dir / f"{role}-{next(self._numbers)}.log", environment)
        child.report = self.report
        if role not in _UNLIMITED:
            self.limit = child.limit
        return child


def refuse_killed(error: ChildError, workload: WorkloadRef, work: str) -> None:
    """Raise WorkerError where another process killed the child; a segmentation fault is the workload's."""
    if error.outcome is Outcome.CRASHED and not error.error and error.detail.startswith(KILLED):
        raise WorkerError(
            f"{workload}: the process of {work} was {error.detail.partition(':')[0]}; run the command again, its records are kept"
        ) from None
