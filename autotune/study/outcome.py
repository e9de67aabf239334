"""What a study hands back: the best plan as files, or why there is none."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import AutotuneError, ConfigError, InfeasibleError, NumericsError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.predict.bounds import peak_lower_bound
from autotune.predict.simulate import Estimate
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial
from autotune.study.verdicts.confirm import Confirmed
from autotune.study.verdicts.ranking import Rules
from autotune.units import fmt_bytes

_OTHER_PLANS = "name another directory by plans: in the config"


@dataclass(frozen=True, slots=True)
class Result:
    """What a study found."""

    baseline: Trial
    best: Trial | None
    """None where the study was interrupted before any plan was known to fit."""
    trials: tuple[Trial, ...]
    budget_bytes: int
    """What the step itself may take."""
    floor_bytes: int
    plan_path: Path | None
    report_path: Path | None
    interrupted: int = 0
    """Number of the signal that ended it early; 0 for none."""
    confirmed: tuple[Confirmed, ...] = ()
    """Plans that were measured afresh, the best first."""


def check_plans(config: Config) -> None:
    """Refuse a directory that could not take the plan in the end, before anything is measured."""
    place = Path(config.plans)
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{place}: no plan can be written there, {there} is no directory; {_OTHER_PLANS}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{place}: no plan can be written there, {there} is read-only; {_OTHER_PLANS}")


def write_plan(config: Config, run_dir: Path, device: Device, rules: Rules, best: Trial) -> Path:
    """Write the plan beside its records, and once more under its own name; ConfigError where it has only the first."""
    assert best.plan is not None
    assert best.estimate is not None
    file = planfile.PlanFile(
        workload=config.ref,
        graph_digest=best.graph_digest,
        budget=config.budget,
        budget_bytes=rules.budget_bytes,
        floor_bytes=rules.floor_bytes,
        settings=best.settings,
        plan=replace(best.plan, memory_format=config.memory_format),
        estimate=best.estimate,
        device=device,
        measurement=best.measurement,
        verified=(best.measurement.verified if best.measurement else "") or planfile.NOT_VERIFIED,
    )
    kept, path = run_dir / "plan.json", Path(config.plans) / f"{run_dir.name}.json"
    planfile.write(kept, file, cure=f"free space there, then: autotune resume {run_dir}")
    planfile.write(path, file, cure=f"take it from {kept}")
    return path


def withdraw_plan(config: Config, run_dir: Path) -> None:
    """Take away a plan that failed after it was written; a file of its name that is no longer the same stays."""
    kept, path = run_dir / "plan.json", Path(config.plans) / f"{run_dir.name}.json"
    if kept.exists():
        if path.exists() and path.read_bytes() == kept.read_bytes():
            path.unlink()
        kept.unlink()


def impossible(config: Config, rules: Rules, graph: TrainGraph, costs: Costs) -> InfeasibleError | None:
    """The error of a budget that is proved to be too small, before anything is planned: the op that forbids it."""
    low, op = peak_lower_bound(graph, costs)
    if low <= rules.budget_bytes:
        return None
    what = f"{graph.ops[op].name} alone, whatever is computed again" if op >= 0 else "its start"
    return InfeasibleError(
        f"{config.ref} needs {fmt_bytes(low)} at {what}: no plan fits; "
        f"{_left(config, rules)}. {_more(stores=bool(costs.stores))}"
    )


def too_small(config: Config, rules: Rules, lowest_bytes: int, op: str, *, stores: bool) -> InfeasibleError:
    """No plan fits: the lowest peak that was reached, and the op that needs it."""
    return InfeasibleError(
        f"{config.ref} needs {fmt_bytes(lowest_bytes)} at {op or 'its start'} with the smallest plan that was found; "
        f"{_left(config, rules)}. {_more(stores=stores)}"
    )


def _left(config: Config, rules: Rules) -> str:
    return f"the budget {config.budget} leaves the step {fmt_bytes(max(rules.budget_bytes, 0))}"


def _more(*, stores: bool) -> str:
    return "Raise --budget" if stores else "Raise --budget or allow --store ssd=DIR"


def why_none(config: Config, rules: Rules, trials: Sequence[Trial], lowest: Estimate, run_dir: Path) -> AutotuneError:
    """Why no trial won, after all of them were run."""
    seen = [trial.measurement for trial in trials if trial.plan is not None and trial.measurement is not None]
    wrong = next((one for one in seen if one.outcome is Outcome.WRONG_RESULT), None)
    if wrong is not None:
        return NumericsError(f"{config.ref}: no plan passed: {wrong.detail}. See {run_dir}/trials.jsonl")
    charged: dict[Plan, int] = {}
    for trial in trials:
        taken = trial.measurement.step_charged_bytes if trial.measurement is not None else None
        if trial.plan is not None and taken is not None:
            charged[trial.plan] = max(taken, charged.get(trial.plan, taken))
    if charged and min(charged.values()) > rules.budget_bytes:
        return too_small(config, rules, min(charged.values()), lowest.peak_op, stores=bool(config.stores))
    # bytes alone did not rule all of them out
    failed = [one for one in seen if one.outcome not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.STOPPED_EARLY)]
    reason = next((one.detail for one in failed or seen if one.detail), "none was run")
    return InfeasibleError(f"{config.ref}: no plan ran to its end: {reason}. See {run_dir}/trials.jsonl")
