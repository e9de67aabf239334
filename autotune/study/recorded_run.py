"""Read a run directory."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.predict.step_view import StepTimeline
from autotune.records import plan_file as planfile
from autotune.records import yaml_file
from autotune.records.budget import Budget
from autotune.records.device import Device
from autotune.records.json_codec import read_optional
from autotune.records.measurement import Outcome
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import RunDir, resume_command
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study.batch.records import BatchSearch, read_batch_search
from autotune.study.verdicts.confirm import ConfirmationStatus, ConfirmedPlan, compare_confirmed
from autotune.study.verdicts.front import FrontPoint, FrontStatus, assess_front
from autotune.study.verdicts.ranking import Rules, baseline_step_bytes, select_winner
from autotune.study.verdicts.statistics import Interval, block_ratios, median_interval


@dataclass(frozen=True)
class RecordedRun:
    """Records of a run directory. Graph, costs, device and plan are None where a run ended before they were written."""

    name: str
    config: Mapping[str, Any]
    trials: tuple[Trial, ...]
    graph: TrainGraph | None = None
    costs: Costs | None = None
    device: Device | None = None
    plan: PlanFile | None = None
    run_dir: Path | None = None
    """Directory that the records were read from."""

    @classmethod
    def load(cls, run_dir: Path) -> "RecordedRun":
        """Read a run directory; ConfigError where nothing is recorded in it."""
        files = RunDir(run_dir)
        if not files.is_recorded and files.batch_search.exists():
            go_on = f"continue with: {resume_command(run_dir)}"
            raise ConfigError(f"{run_dir}: its search for a batch size has not ended, so it has no study yet; {go_on}")
        if not files.is_recorded:
            raise ConfigError(f"{run_dir}: no run is recorded here; name a directory that autotune tune wrote")
        config = yaml_file.read(files.config).data if files.config.exists() else {}
        return cls(
            run_dir.name,
            config,
            tuple(load_trials(files.trials)),
            _record(TrainGraph, files.graph),
            _record(Costs, files.costs),
            _record(Device, files.device),
            planfile.read(files.plan) if files.plan.exists() else None,
            run_dir,
        )

    @property
    def plan_path(self) -> Path | None:
        """Plan file of the best trial; None where the run wrote no plan."""
        return None if self.run_dir is None or self.plan is None else RunDir(self.run_dir).plan

    @cached_property
    def batch_search(self) -> BatchSearch | None:
        """Search that chose the batch size of the study; None for a study of one size."""
        return None if self.run_dir is None else read_batch_search(self.run_dir)

    @cached_property
    def baseline(self) -> Trial | None:
        """Plain PyTorch eager."""
        return next((trial for trial in self.trials if trial.kind == TrialKind.BASELINE), None)

    @cached_property
    def best(self) -> Trial | None:
        """Winner by the rules of the study; None where no plan won."""
        return None if self.rules is None else select_winner(self.trials, self.rules)

    @cached_property
    def confirmed(self) -> list[ConfirmedPlan]:
        """Re-measured plans, the best first."""
        return [] if self.rules is None else compare_confirmed(self.trials, self.rules)

    @property
    def is_front(self) -> bool:
        """True if the study searched a Pareto front rather than one plan."""
        return self.config.get("objective") == "pareto"

    @cached_property
    def front_plans(self) -> list[FrontPoint]:
        """Re-measured plans of a study of the Pareto front with their status, the smallest first; else empty."""
        return assess_front(self.trials, self.rules) if self.is_front and self.rules is not None else []

    @cached_property
    def front(self) -> list[FrontPoint]:
        """Verified points of the Pareto front, the smallest first; empty for another objective."""
        return [point for point in self.front_plans if point.status is FrontStatus.FRONT]

    @property
    def is_confirmed(self) -> bool:
        """True if the best plan was re-measured after the search, which had chosen it by its first times."""
        return self._find_confirmed() is not None

    @cached_property
    def time_ratio(self) -> Interval | None:
        """Time of the best plan over eager's: re-measured where it was, else by its own blocks; None where too few ran."""
        best = self.best
        if best is None or best.measurement is None or best.measurement.time_ratio is None:
            return None
        if (confirmed := self._find_confirmed()) is not None:
            return confirmed.ratio
        ratios = block_ratios(best.measurement)
        return median_interval(ratios) if len(ratios) > 1 else None

    def _find_confirmed(self) -> ConfirmedPlan | None:
        """Return the re-measurement of the best plan; None without one that came to an end."""
        plan = None if self.best is None else self.best.plan
        ended = (each for each in self.confirmed if each.status is not ConfirmationStatus.FAILED)
        return next((each for each in ended if each.trial.plan == plan), None)

    @cached_property
    def rules(self) -> Rules | None:
        """Rules of the study; None while nothing is measured."""
        step = self.budget_step_bytes
        if step is None:
            return None
        # the numerical tolerance was applied when the outcomes were recorded
        seconds = self.traced.seconds if self.traced else 0.0
        return Rules(step, self.floor_bytes or 0, None, seconds, self.budget_tolerance)

    @cached_property
    def budget_tolerance(self) -> float:
        """Share by which the charge may exceed the budget: as recorded, else as today's rule has it."""
        if self.run_dir is not None and "budget_tolerance" in (study := _document(RunDir(self.run_dir).study)):
            return float(study["budget_tolerance"])
        return Budget.parse(str(self.config["budget"])).tolerance if "budget" in self.config else 0.0

    @cached_property
    def floor_bytes(self) -> int | None:
        """Floor of the process: from the plan file, else the one that plans were judged with, else the first measured one."""
        if self.plan is not None:
            return self.plan.floor_bytes
        if self.run_dir is not None and (judged := read_judged_floor(self.run_dir)) is not None:
            return judged
        floors = (trial.measurement.floor_bytes for trial in self.trials if trial.measurement)
        return next((floor for floor in floors if floor is not None), None)

    @cached_property
    def has_ratios(self) -> bool:
        """True if the baseline ran, so that times are ratios to it."""
        return any(trial.measurement and trial.measurement.time_ratio is not None for trial in self.trials)

    @cached_property
    def budget_step_bytes(self) -> int | None:
        """Maximum charge of the step; None while nothing is measured."""
        if self.plan is not None:
            return self.plan.budget_bytes
        if "budget" not in self.config:
            return None
        budget = Budget.parse(str(self.config["budget"]))
        result = self.baseline.measurement if self.baseline else None
        # as the study takes it: the peak of a baseline that ran out of memory is not that of its step
        fits = result is not None and result.outcome is not Outcome.OUT_OF_MEMORY
        baseline_bytes = baseline_step_bytes(result) if result is not None and fits else None
        if baseline_bytes is None and self.traced is not None:
            baseline_bytes = self.traced.peak_bytes
        if (self.floor_bytes is None and budget.is_of_process) or (baseline_bytes is None and budget.share is not None):
            return None
        return budget.step_bytes(floor_bytes=self.floor_bytes or 0, baseline_step_bytes=baseline_bytes or 0)

    @cached_property
    def traced(self) -> StepTimeline | None:
        """Timeline of the traced step, without a plan."""
        if self.graph is None or self.costs is None:
            return None
        return StepTimeline(self.graph, self.costs, Plan.traced(self.graph))

    @cached_property
    def chosen(self) -> StepTimeline | None:
        """Timeline of the best plan."""
        if self.graph is None or self.costs is None or self.best is None or self.best.plan is None:
            return None
        return StepTimeline(self.graph, self.costs, self.best.plan)


def read_session_end(run_dir: Path, trials: int) -> dict[str, Any]:
    """Return the content of `study.json`, which a session writes last; empty where the last session was killed before.

    `trials` is the number of recorded trials. With more of them than the file counts, it is an earlier session's.
    """
    document = _document(RunDir(run_dir).study)
    return document if document.get("trials", trials) == trials else {}


def read_judged_floor(run_dir: Path) -> int | None:
    """Return the bytes of the idle process that a run's plans were judged with; None where no session ended."""
    nbytes = _document(RunDir(run_dir).study).get("floor_bytes")
    return nbytes if isinstance(nbytes, int) else None


def _document(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty where the file is missing or was cut short."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        return document if isinstance(document, dict) else {}
    return {}


def _record(kind: Any, path: Path) -> Any:
    return read_optional(kind, path, remedy="restore the file or start a new run directory")
