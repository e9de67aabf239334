"""The harness: prepares a workload, measures its baseline and its plans in child processes that it replaces."""

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.costs import Costs
from autotune.errors import CaptureError, ConfigError, InfeasibleError, NumericsError
from autotune.graph import TrainGraph
from autotune.harness.child import Child
from autotune.harness.messages import Failed, Spec
from autotune.judge import held_to
from autotune.measurement import Device, Measurement, Outcome
from autotune.meters.cgroup import remove_stale
from autotune.plan import Plan
from autotune.planfile import WorkloadRef
from autotune.records import from_json, to_json
from autotune.units import fmt_bytes

CAPTURE_TOLERANCE = 1e-5
"""How far the captured step may lie from eager; a plan may lie nowhere but on the captured step."""
CUDA_TOLERANCE = 1e-3
"""How far a plan may lie from its reference on a GPU, whose kernels add in no fixed order."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What is known of a workload on this device without running a step of it."""

    graph: TrainGraph
    costs: Costs
    device: Device
    floor_bytes: int
    """Of the process that captured and profiled."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a workload on this device before any plan but the traced one has run."""

    graph: TrainGraph
    costs: Costs
    device: Device
    floor_bytes: int
    """Of a process that runs plans: interpreter, libraries, kernels' code."""
    baseline_fits: bool
    """Whether a plain eager step fits the memory, or the limit, at all."""
    capture_error: float | None
    """Distance of the captured step to eager; None if they could not be compared at any batch size."""


@dataclass(frozen=True, slots=True)
class _Numerics:
    """Where plans are compared with a reference: which workload, and what it lies in."""

    arguments: dict[str, Any]
    reference: str
    capture_error: float


class Harness:
    """Children do the work; this side imports no torch. Not for use from several threads, nor from one that may end
    before `close`: the children die with the thread that started them.
    """

    def __init__(
        self,
        workload: WorkloadRef,
        *,
        log_dir: Path,
        stores: Mapping[str, Path] | None = None,
        device_kind: str = "cpu",
        limit_bytes: int | None = None,
        time_limit_seconds: float = 300.0,
        prepare_limit_seconds: float = 1800.0,
        samples: int = 8,
        seed: int = 0,
        profile_cache: Path | None = None,
        memory_format: str = "",
    ) -> None:
        self._workload = workload
        self._log_dir = log_dir
        self._stores = {name: str(directory) for name, directory in (stores or {}).items()}
        self._device_kind = device_kind
        self._limit_bytes = limit_bytes
        self._memory_format = memory_format
        self.time_limit_seconds = time_limit_seconds
        """For one request: a fresh process must start, capture and run a few steps within it."""
        self._prepare_limit = prepare_limit_seconds
        self._samples = samples
        self._seed = seed
        self._profile_cache = str(profile_cache) if profile_cache is not None else ""
        log_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=log_dir))
        self._numbers = itertools.count(1)
        self._children: dict[str, Child] = {}
        self._limit = ""
        self._baseline: Measurement | None = None
        self._reference = ""
        self._surveyed: Surveyed | None = None
        self._prepared: Prepared | None = None
        self._numerics: _Numerics | None = None
        remove_stale()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all children and remove all temporary files; the logs stay."""
        self.renew()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def renew(self) -> None:
        """End all children: the next measurement comes from fresh processes."""
        for name in list(self._children):
            self._end(name)

    def baseline(self) -> Measurement:
        """Plain eager steps, measured once, in processes of their own. Not fitting is an answer, an Outcome."""
        if self._baseline is None:
            self._baseline = replace(self._measure_baseline(), limit=self._limit)
        return self._baseline

    def survey(self) -> Surveyed:
        """Graph, costs and device: ops are profiled on made-up tensors, no step runs."""
        if self._surveyed is None:
            found = self._ask_to_prepare()
            self._surveyed = Surveyed(
                graph=from_json(TrainGraph, found["graph"], where="graph"),
                costs=from_json(Costs, found["costs"], where="costs"),
                device=from_json(Device, found["device"], where="device"),
                floor_bytes=int(found["floor_bytes"]),
            )
        return self._surveyed

    def prepare(self) -> Prepared:
        """The survey, the baseline, and how far the captured step lies from eager."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    def measure(self, plan: Plan, *, budget_bytes: int | None = None) -> Measurement:
        """Results first, then bytes, then seconds beside eager. A failure of the plan is an Outcome; a PlanError, a
        ConfigError or a StoreError of the child's is raised. `budget_bytes`: what the step itself may be charged, the
        floor not included.
        """
        return replace(self._measure(plan, budget_bytes), limit=self._limit, device=self.prepare().device)

    def _measure(self, plan: Plan, budget_bytes: int | None) -> Measurement:
        self.prepare()
        seen = Measurement(Outcome.OK)
        try:
            seen = self._look_at_results_and_bytes(plan, seen)
            if seen.outcome is Outcome.OK:
                seen = held_to(self._look_at_seconds(plan, seen), budget_bytes)
        except Failed as failure:
            if (ours := failure.ours()) is not None:
                raise ours from None
            return replace(seen, outcome=failure.outcome, detail=failure.detail)
        return seen

    def _measure_baseline(self) -> Measurement:
        seen = Measurement(Outcome.OK)
        reference = str(self._scratch / "eager")
        try:
            found = self._ask("eager", {"do": "baseline_bytes", "reference": reference})
            seen = replace(seen, **found, max_error=0.0)
            self._end("eager")
            self._reference = reference
            found = self._in_turns(None, eager=False)
            times = tuple(found["step_seconds"])
            assert seen.floor_bytes is not None
            charged = found["charged_bytes"] - found["floor_bytes"] + seen.floor_bytes
            return replace(seen, charged_bytes=charged, step_seconds=times, baseline_seconds=times)
        except Failed as failure:
            if (ours := failure.ours()) is not None:
                raise ours from None
            return replace(seen, outcome=failure.outcome, detail=failure.detail)

    def _prepare(self) -> Prepared:
        baseline = self.baseline()
        if baseline.outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY):
            raise ConfigError(f"{self._workload}: a plain eager step ends as {baseline.outcome}: {baseline.detail}")
        known = self.survey()
        self._numerics, floor = self._find_numerics(Plan.traced(known.graph))
        return Prepared(
            graph=known.graph,
            costs=known.costs,
            device=known.device,
            floor_bytes=known.floor_bytes if floor is None else floor,
            baseline_fits=baseline.outcome is Outcome.OK,
            capture_error=self._numerics.capture_error if self._numerics is not None else None,
        )

    def _ask_to_prepare(self) -> dict[str, Any]:
        try:
            return self._ask("prepare", {"do": "prepare"}, seconds=self._prepare_limit)
        except Failed as failure:
            if (ours := failure.ours()) is not None:
                raise ours from None
            match failure.outcome:
                case Outcome.OUT_OF_MEMORY:
                    limit = (
                        f"a limit of {fmt_bytes(self._limit_bytes)}" if self._limit_bytes else "this machine's memory"
                    )
                    raise InfeasibleError(
                        f"{self._workload} does not even fit {limit} one operator at a time; make the batch smaller"
                    ) from None
                case Outcome.TIMEOUT:
                    raise CaptureError(
                        f"{self._workload} took more than {self._prepare_limit:g} s to capture and profile"
                    ) from None
            raise CaptureError(f"cannot capture and profile {self._workload}: {failure.detail}") from None
        finally:
            self._end("prepare")

    def _find_numerics(self, traced: Plan) -> tuple[_Numerics | None, int | None]:
        """Where eager and the traced plan both fit: here, or at the largest smaller batch; and, if here, the floor."""
        if self._reference:
            try:
                return self._capture_error("bytes", self._workload.arguments, self._reference, traced)
            except Failed as failure:
                if failure.outcome is not Outcome.OUT_OF_MEMORY:
                    raise failure.ours() or CaptureError(
                        f"{self._workload}: the captured step fails: {failure.detail}"
                    ) from None
        for batch in self._smaller_batches():
            arguments = {**self._workload.arguments, "batch": batch}
            reference = str(self._scratch / f"eager-{batch}")
            try:
                self._ask("eager", {"do": "baseline_bytes", "reference": reference}, arguments=arguments)
                self._end("eager")
                same = self._ask("numerics", {"do": "wiring"}, arguments=arguments)
                if same == self._ask("bytes", {"do": "wiring"}):
                    return self._capture_error("numerics", arguments, reference, traced)[0], None
                self._end("numerics")
            except Failed as failure:
                self._end("numerics")
                if failure.error == ConfigError.__name__:
                    break  # the factory takes no batch
        return None, None

    def _capture_error(
        self, name: str, arguments: dict[str, Any], reference: str, traced: Plan
    ) -> tuple[_Numerics, int]:
        request = {"do": "plan_bytes", "plan": to_json(traced), "reference": reference, "tolerance": float("inf")}
        found = self._ask(name, request, arguments=arguments)
        error = float(found["max_error"])
        if error > self._capture_tolerance:
            raise NumericsError(
                f"the captured step of {self._workload} differs from eager: {found['detail']}, "
                f"tolerated is {self._capture_tolerance:g}; leave out what breaks it, or report the model"
            )
        if error > 0 and self._device_kind == "cpu":
            reference = f"{reference}-traced"
            self._ask(name, {"do": "trace", "reference": reference}, arguments=arguments)
        return _Numerics(arguments, reference, error), int(found["floor_bytes"])

    def _smaller_batches(self) -> list[int]:
        try:
            batch = int(self._ask("bytes", {"do": "batch_size"})["batch"])
        except Failed:
            return []
        batch = int(self._workload.arguments.get("batch", batch))
        return [batch >> halvings for halvings in range(1, batch.bit_length())]

    @property
    def _capture_tolerance(self) -> float:
        return CUDA_TOLERANCE if self._device_kind == "cuda" else CAPTURE_TOLERANCE

    def _look_at_results_and_bytes(self, plan: Plan, seen: Measurement) -> Measurement:
        numerics = self._numerics
        here = numerics is not None and numerics.arguments == self._workload.arguments
        request = {"do": "plan_bytes", "plan": to_json(plan), "reference": "", "tolerance": self._plan_tolerance}
        if numerics is None:
            seen = replace(seen, detail="results not compared: eager fits at no batch size that the factory takes")
        elif not here:
            found = self._ask("numerics", request | {"reference": numerics.reference}, arguments=numerics.arguments)
            seen = replace(seen, **_known(found, "outcome", "detail", "max_error"))
            if seen.outcome is not Outcome.OK:
                return seen
            seen = replace(seen, detail=f"results compared at batch {numerics.arguments['batch']}")
        elif numerics is not None:
            request |= {"reference": numerics.reference}
        found = self._ask("bytes", request)
        named = ("outcome", "detail", "max_error", "peak_bytes", "floor_bytes", "meter")
        return replace(seen, **_known(found, *named))

    def _look_at_seconds(self, plan: Plan, seen: Measurement) -> Measurement:
        eager = self.prepare().baseline_fits
        found = self._in_turns(plan, eager=eager)
        if found.get("outcome") == Outcome.WRONG_RESULT:
            return replace(seen, **_known(found, "outcome", "detail", "max_error"))
        assert seen.floor_bytes is not None
        return replace(
            seen,
            # two processes differ in what their libraries hold: what the step was charged is told over one floor
            charged_bytes=found["charged_bytes"] - found["floor_bytes"] + seen.floor_bytes,
            step_seconds=tuple(found["step_seconds"]),
            baseline_seconds=tuple(found["baseline_seconds"]),
            stall_seconds=found["stall_seconds"],
            transfer_bytes=found["transfer_bytes"],
            meter=found["meter"],
        )

    def _in_turns(self, plan: Plan | None, *, eager: bool) -> dict[str, Any]:
        """Blocks of the plan's steps (without a plan: of eager's), with blocks of `eager` steps between them.

        Each side has a process of its own, which rests while the other's runs: in one process the heap that a plan
        leaves behind made eager's steps on GPT-2 a fifth slower than they are.
        """
        mine = "seconds" if plan is not None else "beside"
        patience = self.time_limit_seconds / 3
        self._ask(mine, {"do": "begin", "plan": None if plan is None else to_json(plan)})
        eager = eager and self._ask_beside({"do": "begin", "plan": None}) is not None
        begun = time.monotonic()
        seconds: list[float] = []
        stalls: list[float] = []
        baseline: list[float] = []
        charged = 0
        while len(seconds) < self._samples and (not seconds or time.monotonic() - begun < patience):
            if eager:
                found = self._ask_beside({"do": "block"})
                eager, baseline = found is not None, baseline + (found["seconds"] if found is not None else [])
            block = self._ask(mine, {"do": "block"})
            seconds += block["seconds"]
            stalls += block["stalls"]
            charged = max(charged, block["charged_bytes"])
        if eager:
            self._ask_beside({"do": "stop"})
        return {
            "step_seconds": seconds[: self._samples],
            "baseline_seconds": baseline[: self._samples] if eager else [],
            "charged_bytes": charged,
            "stall_seconds": statistics.median(stalls),
            "transfer_bytes": block["transfer_bytes"],
            "meter": block["meter"],
        } | self._ask(mine, {"do": "finish"})

    def _ask_beside(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Ask the process of eager's steps; what fails there is no fault of the plan's, which then has no ratio."""
        try:
            return self._ask("beside", request)
        except Failed:
            return None

    @property
    def _plan_tolerance(self) -> float:
        return CUDA_TOLERANCE if self._device_kind == "cuda" else 0.0

    def _ask(
        self,
        name: str,
        request: dict[str, Any],
        *,
        arguments: dict[str, Any] | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Ask the child of this name, a new one if need be; one that fails is ended, and the next request gets a new one."""
        child = self._children.get(name)
        begun = request["do"] in ("block", "finish")  # only the one that began can go on: if it died, it says why
        if child is None or not (child.alive or begun):
            self._end(name)
            child = self._children[name] = self._start(
                name, self._workload.arguments if arguments is None else arguments
            )
        try:
            return child.ask(request, self.time_limit_seconds if seconds is None else seconds)
        except BaseException:
            self._end(name)
            raise

    def _start(self, name: str, arguments: dict[str, Any]) -> Child:
        spec = Spec(
            reference=self._workload.reference,
            arguments=arguments,
            scratch=str(self._scratch),
            stores=self._stores,
            device_kind=self._device_kind,
            seed=self._seed,
            return_memory=name not in ("seconds", "beside", "prepare"),
            limit_bytes=self._limit_bytes,
            profile_cache=self._profile_cache,
            memory_format=self._memory_format,
        )
        child = Child.start(spec, self._log_dir / f"{name}-{next(self._numbers)}.log")
        self._limit = child.limit
        return child

    def _end(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.end()
            shutil.rmtree(self._scratch / f"initial-{child.pid}", ignore_errors=True)  # as large as the model


def _known(found: dict[str, Any], *names: str) -> dict[str, Any]:
    """Fields of a Measurement out of a child's reply."""
    picked = {name: found[name] for name in names if found.get(name) is not None}
    if "outcome" in picked:
        picked["outcome"] = Outcome(picked["outcome"])
    if not picked.get("detail"):
        picked.pop("detail", None)
    return picked
