"""The first two phases of a study: capture and profile, then the baseline and the budget."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.survey import Prepared
from autotune.planners.candidates import MakePlanning, planned
from autotune.predict.simulate import simulate
from autotune.records.config import Config, dump, load_config
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import write_json
from autotune.records.trial import Trial, append
from autotune.study.events import Phase, Progress, Ready, Resolved
from autotune.study.interrupts import Interrupts
from autotune.study.runner import Runner
from autotune.study.verdicts.ranking import Rules, baseline_step_bytes


@dataclass(frozen=True, slots=True)
class Task:
    """One session's work: what is asked, what runs it, where it is written, who listens, what may stop it, what makes plans."""

    config: Config
    runner: Runner
    run_dir: Path
    progress: Progress
    interrupts: Interrupts
    deadline: float
    """On the monotonic clock."""
    planning: MakePlanning = planned
    lasting: bool = True
    """Whether Optuna's study is kept on disk."""


def prepare(task: Task, trials: list[Trial]) -> Prepared:
    """Capture and profile; refuse a directory that holds another study."""
    config, run_dir = task.config, task.run_dir
    if (run_dir / "config.yaml").exists():
        before = load_config(str(run_dir / "config.yaml")).budget
        if before != config.budget:
            raise ConfigError(f"{run_dir}: was begun for {before}, not {config.budget}; tune under another --name")
    task.progress(Phase("prepare"))
    with task.interrupts.breakable(patient=False):
        prepared = task.runner.prepare()
    for trial in trials:
        if trial.graph_digest != prepared.graph.digest:
            raise ConfigError(
                f"{run_dir}: holds trials of {trial.workload} as graph {trial.graph_digest[:8]}; {config.ref} is now "
                f"{prepared.graph.digest[:8]}; tune under another --name"
            )
    for name, record in (("graph", prepared.graph), ("costs", prepared.costs), ("device", prepared.device)):
        write_json(run_dir / f"{name}.json", to_json(record))
    if not (run_dir / "config.yaml").exists():
        (run_dir / "config.yaml").write_text(dump(config))
    task.progress(Ready(prepared.graph, prepared.costs, prepared.device))
    return prepared


def resolve(task: Task, prepared: Prepared, trials: list[Trial]) -> Rules:
    """Trial 0, plain eager, unless `trials` has it; then the budget is known in bytes."""
    config = task.config
    task.progress(Phase("baseline"))
    if not trials:
        trial = Trial(0, "baseline", str(config.ref), prepared.graph.digest, started=time.time())
        seen = Measurement(Outcome.OUT_OF_MEMORY, "the plain step does not fit", device=prepared.device)
        if prepared.baseline_fits:
            with task.interrupts.breakable(patient=False):
                seen = task.runner.baseline()
        if seen.outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY):
            raise ConfigError(f"{config.ref}: the plain step ended as {seen.outcome}: {seen.detail}")
        append(task.run_dir / "trials.jsonl", replace(trial, measurement=seen))
        trials.append(replace(trial, measurement=seen))
    first = trials[0].measurement or Measurement(Outcome.OUT_OF_MEMORY)
    traced = simulate(prepared.graph, lower(prepared.graph, Plan.traced(prepared.graph)), prepared.costs)
    measured = None if first.outcome is Outcome.OUT_OF_MEMORY else baseline_step_bytes(first)
    whole = traced.peak_bytes if measured is None else measured
    budget_bytes = config.parsed_budget.step_bytes(floor_bytes=prepared.floor_bytes, baseline_step_bytes=whole)
    plain = first.median_seconds
    task.progress(Resolved(budget_bytes, prepared.floor_bytes, traced.seconds / plain if plain else None))
    return Rules(budget_bytes, prepared.floor_bytes, prepared.tolerance, traced.seconds)
