"""The harness: prepares a workload, measures its baseline and its plans in child processes that it replaces."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autotune.errors import CaptureError, ConfigError, InfeasibleError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.children import Children
from autotune.measure.early_stop import hopeless
from autotune.measure.messages import Failed, Spec
from autotune.measure.meters.cgroup import remove_stale
from autotune.measure.numerics import Numerics, find_numerics, plan_tolerance
from autotune.measure.survey import Prepared, Surveyed
from autotune.records.device import Device
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Lanes, Measurement, Outcome, held_to
from autotune.units import fmt_bytes
from autotune.workloads.reference import WorkloadRef


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
        spec = Spec(
            reference=workload.reference,
            arguments=workload.arguments,
            stores={name: str(directory) for name, directory in (stores or {}).items()},
            device_kind=device_kind,
            seed=seed,
            limit_bytes=limit_bytes,
            profile_cache=str(profile_cache) if profile_cache is not None else "",
            memory_format=memory_format,
        )
        self._workload = workload
        self._device_kind = device_kind
        self._limit_bytes = limit_bytes
        self._prepare_limit = prepare_limit_seconds
        self._samples = samples
        self._children = Children(spec, log_dir, time_limit_seconds)
        self._baseline: Measurement | None = None
        self._reference = ""
        self._surveyed: Surveyed | None = None
        self._prepared: Prepared | None = None
        self._numerics: Numerics | None = None
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
        """End all children: the next measurement comes from fresh processes."""
        self._children.end_all()

    def baseline(self) -> Measurement:
        """Plain eager steps, measured once, in processes of their own. Not fitting is an answer, an Outcome."""
        if self._baseline is None:
            self._baseline = replace(self._measure_baseline(), limit=self._children.limit)
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

    def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
        """Results first, then bytes, then seconds beside eager. A failure of the plan is an Outcome, as is a full disk; a
        PlanError, a ConfigError or any other StoreError of the child's is raised. `budget_bytes`: what the step itself
        may be charged, the floor not included. `beat`: a ratio to eager's time; a plan whose steps all stay above it is
        stopped early.
        """
        return replace(
            self._measure(plan, budget_bytes, beat), limit=self._children.limit, device=self.prepare().device
        )

    def _measure(self, plan: Plan, budget_bytes: int | None, beat: float | None) -> Measurement:
        self.prepare()
        seen = Measurement(Outcome.OK)
        try:
            seen = self._look_at_results_and_bytes(plan, seen)
            if seen.outcome is Outcome.OK:
                seen = held_to(self._look_at_seconds(plan, seen, beat), budget_bytes)
        except Failed as failure:
            if (ours := failure.ours()) is not None:
                raise ours from None
            return replace(seen, outcome=failure.outcome, detail=failure.detail)
        return seen

    def _measure_baseline(self) -> Measurement:
        seen = Measurement(Outcome.OK)
        reference = str(self._children.scratch / "eager")
        try:
            found = self._children.ask("eager", {"do": "baseline_bytes", "reference": reference})
            seen = replace(seen, **found, max_error=0.0)
            self._children.end("eager")
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
        self._numerics, floor = find_numerics(
            self._children,
            self._workload,
            Plan.traced(known.graph),
            reference=self._reference,
            device_kind=self._device_kind,
        )
        return Prepared(
            graph=known.graph,
            costs=known.costs,
            device=known.device,
            floor_bytes=known.floor_bytes if floor is None else floor,
            baseline_fits=baseline.outcome is Outcome.OK,
            capture_error=self._numerics.capture_error if self._numerics is not None else None,
            verified=self._verified(0.0),
        )

    def _ask_to_prepare(self) -> dict[str, Any]:
        try:
            return self._children.ask("prepare", {"do": "prepare"}, seconds=self._prepare_limit)
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
            self._children.end("prepare")

    def _look_at_results_and_bytes(self, plan: Plan, seen: Measurement) -> Measurement:
        numerics = self._numerics
        here = numerics is not None and numerics.arguments == self._workload.arguments
        request = {
            "do": "plan_bytes",
            "plan": to_json(plan),
            "reference": "",
            "tolerance": plan_tolerance(self._device_kind),
        }
        if numerics is None:
            seen = replace(seen, detail="results not compared: eager fits at no batch size that the factory takes")
        elif not here:
            found = self._children.ask(
                "numerics", request | {"reference": numerics.reference}, arguments=numerics.arguments
            )
            seen = replace(seen, **_known(found, "outcome", "detail", "max_error"))
            if seen.outcome is not Outcome.OK:
                return seen
            seen = replace(seen, detail=f"results compared at batch {numerics.arguments['batch']}")
        elif numerics is not None:
            request |= {"reference": numerics.reference}
        found = self._children.ask("bytes", request)
        named = ("outcome", "detail", "max_error", "peak_bytes", "floor_bytes", "meter")
        seen = replace(seen, **_known(found, *named))
        right = seen.outcome is Outcome.OK and seen.max_error is not None
        return replace(seen, verified=self._verified(seen.max_error or 0.0)) if right else seen

    def _verified(self, error: float) -> str:
        """Describe how a plan whose error is within the gate was compared; empty where nothing could be."""
        numerics = self._numerics
        if numerics is None:
            return ""
        how = numerics.how
        if self._device_kind == "cuda" and error:
            how = f"{numerics.gate}, worst {error:.2g} of the bound"
        elif self._device_kind == "cpu" and numerics.capture_error:
            how = f"bit-equal to the captured step, and that within the {how}"
        here = numerics.arguments == self._workload.arguments
        return how if here else f"{how}; compared at batch {numerics.arguments['batch']}"

    def _look_at_seconds(self, plan: Plan, seen: Measurement, beat: float | None) -> Measurement:
        eager = self.prepare().baseline_fits
        found = self._in_turns(plan, eager=eager, beat=beat)
        if found.pop("given_up"):
            detail = f"none of {len(found['step_seconds'])} steps took less than {beat:.3f} of eager's time: no more were timed"
            seen = replace(seen, outcome=Outcome.STOPPED_EARLY, detail=detail)
        if found.get("outcome") == Outcome.WRONG_RESULT:
            return replace(seen, **_known(found, "outcome", "detail", "max_error"))
        steps, beside = tuple(found["step_seconds"]), tuple(found["baseline_seconds"])
        if (lost := found["lost"]) is not None:
            # seconds alone would be taken for ratios among those of other measurements
            beside = self.baseline().baseline_seconds[: len(steps)]
            steps = steps[: len(beside)]
            said = f"plain eager ended beside it ({lost}): its times are set beside eager's own, measured before"
            seen = replace(seen, detail="; ".join(filter(None, (seen.detail, said))))
        assert seen.floor_bytes is not None
        return replace(
            seen,
            # two processes differ in what their libraries hold: what the step was charged is told over one floor
            charged_bytes=found["charged_bytes"] - found["floor_bytes"] + seen.floor_bytes,
            step_seconds=steps,
            baseline_seconds=beside,
            stall_seconds=found["stall_seconds"],
            transfer_bytes=found["transfer_bytes"],
            lanes=found["lanes"] and from_json(Lanes, found["lanes"], where="lanes"),
            meter=found["meter"],
        )

    def _in_turns(self, plan: Plan | None, *, eager: bool, beat: float | None = None) -> dict[str, Any]:
        """Blocks of the plan's steps (without a plan: of eager's), with blocks of `eager` steps between them, until there
        are samples enough or the plan cannot `beat` the ratio that it has to.

        Each side has a process of its own, which rests while the other's runs: in one process the heap that a plan
        leaves behind made eager's steps on GPT-2 a fifth slower than they are. `lost`: why eager's ended, if it did.
        """
        mine = "seconds" if plan is not None else "beside"
        patience = self._children.time_limit_seconds / 3
        self._children.ask(mine, {"do": "begin", "plan": None if plan is None else to_json(plan)})
        lost: str | None = None

        def beside(request: dict[str, Any]) -> list[float]:
            """Seconds of eager's turn; none once its process has ended."""
            nonlocal lost
            if eager and lost is None:
                try:
                    return list(self._children.ask("beside", request).get("seconds", ()))
                except Failed as failure:
                    lost = failure.detail
            return []

        beside({"do": "begin", "plan": None})
        begun = time.monotonic()
        seconds: list[float] = []
        stalls: list[float] = []
        baseline: list[float] = []
        given_up = False
        while len(seconds) < self._samples and (not seconds or time.monotonic() - begun < patience) and not given_up:
            baseline += beside({"do": "block"})
            block = self._children.ask(mine, {"do": "block"})
            seconds += block["seconds"]
            stalls += block["stalls"]
            given_up = beat is not None and len(seconds) < self._samples and hopeless(seconds, baseline, beat)
        if eager and lost is None:
            self._children.try_to_ask("beside", {"do": "stop"})
        return {
            "step_seconds": seconds[: self._samples],
            "baseline_seconds": baseline[: self._samples],
            "lost": lost,
            "charged_bytes": block["charged_bytes"],
            "stall_seconds": statistics.median(stalls),
            "transfer_bytes": block["transfer_bytes"],
            "lanes": block["lanes"],
            "meter": block["meter"],
            "given_up": given_up,
        } | self._children.ask(mine, {"do": "finish", "verify": not given_up})


def _known(found: dict[str, Any], *names: str) -> dict[str, Any]:
    """Fields of a Measurement out of a child's reply."""
    picked = {name: found[name] for name in names if found.get(name) is not None}
    if "outcome" in picked:
        picked["outcome"] = Outcome(picked["outcome"])
    if not picked.get("detail"):
        picked.pop("detail", None)
    return picked
