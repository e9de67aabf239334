"""What a run directory holds, read back."""

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
from autotune.predict.step_view import Walk
from autotune.records import plan_file as planfile
from autotune.records.budget import Budget
from autotune.records.device import Device
from autotune.records.json_codec import from_json
from autotune.records.plan_file import PlanFile
from autotune.records.trial import Trial, load
from autotune.study.verdicts.confirm import Confirmed, confirmed
from autotune.study.verdicts.ranking import Rules, baseline_step_bytes, winner


@dataclass(frozen=True)
class Records:
    """What a run directory holds. Graph, costs, device and plan are None where a run ended before they were written."""

    name: str
    config: Mapping[str, Any]
    trials: tuple[Trial, ...]
    graph: TrainGraph | None = None
    costs: Costs | None = None
    device: Device | None = None
    plan: PlanFile | None = None

    @classmethod
    def load(cls, run_dir: Path) -> "Records":
        """Read a run directory; ConfigError where it is none."""
        import yaml

        if not (run_dir / "config.yaml").exists() and not (run_dir / "trials.jsonl").exists():
            raise ConfigError(f"{run_dir}: no run is recorded here; give a directory that autotune tune made")
        config = yaml.safe_load(_text(run_dir / "config.yaml") or "{}")
        return cls(
            run_dir.name,
            config if isinstance(config, dict) else {},
            tuple(load(run_dir / "trials.jsonl")),
            _record(TrainGraph, run_dir / "graph.json"),
            _record(Costs, run_dir / "costs.json"),
            _record(Device, run_dir / "device.json"),
            planfile.read(run_dir / "plan.json") if (run_dir / "plan.json").exists() else None,
        )

    @cached_property
    def baseline(self) -> Trial | None:
        """Plain PyTorch eager."""
        return next((trial for trial in self.trials if trial.kind == "baseline"), None)

    @cached_property
    def best(self) -> Trial | None:
        """The winner, by the rules of the study."""
        return None if self.rules is None else winner(self.trials, self.rules)

    @cached_property
    def confirmed(self) -> list[Confirmed]:
        """Plans that were measured afresh, the best first."""
        return [] if self.rules is None else confirmed(self.trials, self.rules)

    @cached_property
    def rules(self) -> Rules | None:
        """What the trials were held to; None while nothing was measured."""
        step = self.budget_step_bytes
        if step is None:
            return None
        # outcomes were judged when they were recorded, so no tolerance is needed
        return Rules(step, self.floor_bytes or 0, None, self.traced.seconds if self.traced else 0.0)

    @cached_property
    def floor_bytes(self) -> int | None:
        """The process's floor, as the plan was held to it or else as first measured."""
        if self.plan is not None:
            return self.plan.floor_bytes
        seen = (trial.measurement.floor_bytes for trial in self.trials if trial.measurement)
        return next((floor for floor in seen if floor is not None), None)

    @cached_property
    def has_ratios(self) -> bool:
        """Whether the baseline ran, so that times can be told as ratios."""
        return any(trial.measurement and trial.measurement.time_ratio is not None for trial in self.trials)

    @cached_property
    def budget_step_bytes(self) -> int | None:
        """What the step itself may take; None while nothing was measured."""
        if self.plan is not None:
            return self.plan.budget_bytes
        if "budget" not in self.config:
            return None
        budget = Budget.parse(str(self.config["budget"]))
        seen = self.baseline.measurement if self.baseline else None
        whole = baseline_step_bytes(seen) if seen else None
        if whole is None and self.traced is not None:
            whole = self.traced.peak_bytes
        if (self.floor_bytes if budget.share is None else whole) is None:
            return None
        return budget.step_bytes(floor_bytes=self.floor_bytes or 0, baseline_step_bytes=whole or 0)

    @cached_property
    def traced(self) -> Walk | None:
        """The step with no plan, walked."""
        if self.graph is None or self.costs is None:
            return None
        return Walk(self.graph, self.costs, Plan.traced(self.graph))

    @cached_property
    def chosen(self) -> Walk | None:
        """The best plan, walked."""
        if self.graph is None or self.costs is None or self.best is None or self.best.plan is None:
            return None
        return Walk(self.graph, self.costs, self.best.plan)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _record(kind: Any, path: Path) -> Any:
    text = _text(path)
    if not text:
        return None
    try:
        return from_json(kind, json.loads(text), where=str(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error.msg}); restore the file or start a new run directory") from None
