"""The trials of a study: on disk first, then told to Optuna, which is caught up from the disk whenever it lags."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.measure.survey import Prepared
from autotune.planners.space import Space
from autotune.records import trial as trials_file
from autotune.records.config import Config
from autotune.records.trial import Trial
from autotune.study import optuna_space as space
from autotune.study.optuna_space import Parameters, parameters
from autotune.study.verdicts.ranking import Rules, Verdict, plan_hash, verdict, wastes

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler


@dataclass(frozen=True, slots=True)
class Identity:
    """What an Optuna study is opened by: a change of any part starts another in the same file."""

    name: str
    objectives: tuple[str, ...]
    """`time_ratio`, or `step_bytes` and `time_ratio`."""
    attributes: dict[str, Any]
    """For people who open it: budget, seed, versions."""
    sampler: "BaseSampler"
    lasting: bool = True
    """Whether it is kept on disk."""


class Ledger:
    """`trials.jsonl` and `optuna.db` of one run directory, kept in step. Trial numbers are the same in both."""

    def __init__(self, run_dir: Path, known: Identity, space: Space, rules: Rules, trials: list[Trial]) -> None:
        self.trials = trials
        self._path = run_dir / "trials.jsonl"
        self._space, self._rules, self._objectives = space, rules, known.objectives
        self.study = _open(run_dir / "optuna.db", known)
        self._catch_up()

    @property
    def wastes(self) -> list[float]:
        """What the allocator was seen to waste so far."""
        return wastes(self.trials)

    def next_number(self) -> int:
        """Of a trial that Optuna is not asked for."""
        return len(self.study.get_trials(deepcopy=False))

    def ask(self, fixed: Parameters | None = None) -> "optuna.Trial":
        """A new trial, at these parameters if any are given."""
        if fixed:
            self.study.enqueue_trial(fixed)
        return self.study.ask()

    def record(self, trial: Trial, asked: "optuna.Trial | None" = None) -> Verdict:
        """Sync the trial to disk, then tell Optuna: as the answer to what it asked, or as one more it knows."""
        trials_file.append(self._path, trial)
        self.trials.append(trial)
        return self._tell(trial, asked)

    def retry(self, asked: "optuna.Trial") -> None:
        """Give a trial up that was broken off; the next session begins with its parameters."""
        import optuna

        self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
        self.study.enqueue_trial(asked.params, user_attrs={"retry_of": asked.number})

    def _tell(self, trial: Trial, asked: "optuna.Trial | None") -> Verdict:
        import optuna

        seen = verdict(trial, self._rules, self.wastes)
        values = [getattr(seen, objective) for objective in self._objectives]
        # every trial has the same constraints: the Gaussian process sampler refuses anything else
        constraints = {"memory": seen.memory, "numerics": seen.numerics}
        attributes = _attributes(trial, seen)
        if asked is None:
            # the smallest plan was made for a budget of nothing: its settings do not make it again
            params, drawn = ({}, {}) if trial.kind == "smallest" else parameters(trial.settings, self._space)
            self.study.add_trial(
                optuna.trial.create_trial(
                    values=values, params=params, distributions=drawn, user_attrs=attributes, constraints=constraints
                )
            )
            return seen
        for key, value in attributes.items():
            asked.set_user_attr(key, value)
        for key, violation in constraints.items():
            if key not in asked.constraints:
                asked.set_constraint(key, violation)
        self.study.tell(asked, values)
        return seen

    def _catch_up(self) -> None:
        """Tell Optuna every trial on disk that it lacks, and fail those that it still thinks are running."""
        import optuna

        states = optuna.trial.TrialState
        recorded = {trial.number for trial in self.trials}
        for trial in self.trials:
            known = self.study.get_trials(deepcopy=False)
            for _ in range(trial.number - len(known)):
                self.study.add_trial(optuna.trial.create_trial(state=states.FAIL, user_attrs={"lost": True}))
            if trial.number >= len(known):
                self._tell(trial, None)
            elif not known[trial.number].state.is_finished():
                self._tell(trial, optuna.trial.Trial(self.study, known[trial.number]._trial_id))
        for left in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if left.number not in recorded:
                self.study.tell(left.number, state=states.FAIL)


def _attributes(trial: Trial, seen: Verdict) -> dict[str, Any]:
    """What someone who opens the study without us wants beside values and parameters."""
    made: dict[str, Any] = {"kind": trial.kind, "imputed": seen.imputed}
    if trial.plan is not None:
        made["plan_hash"] = plan_hash(trial.plan)
    if trial.estimate is not None:
        made |= {"estimate_peak_bytes": trial.estimate.peak_bytes, "estimate_seconds": trial.estimate.seconds}
    if trial.measurement is not None:
        made |= {
            "outcome": trial.measurement.outcome.value,
            "detail": trial.measurement.detail[:500],
            "peak_bytes": trial.measurement.peak_bytes,
            "charged_bytes": trial.measurement.charged_bytes,
        }
    return made


def _open(path: Path, known: Identity) -> "optuna.Study":
    """The study of this identity; a file that no longer opens is begun anew, for nothing stands in it alone."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = _load(path, known)
    except (DatabaseError, optuna.exceptions.StorageInternalError):
        path.replace(path.with_suffix(".db.broken"))
        study = _load(path, known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(known.objectives))
    for key, value in known.attributes.items():
        study.set_user_attr(key, value)
    return study


def _load(path: Path, known: Identity) -> "optuna.Study":
    import optuna

    return optuna.create_study(
        storage=_storage(path) if known.lasting else optuna.storages.InMemoryStorage(),
        study_name=known.name,
        directions=["minimize"] * len(known.objectives),
        sampler=known.sampler,
        load_if_exists=True,
    )


def _storage(path: Path) -> "optuna.storages.RDBStorage":
    import optuna
    import sqlalchemy

    storage = optuna.storages.RDBStorage(f"sqlite:///{path.resolve()}")
    # a trial is thirty small transactions, each a disk's wait; trials.jsonl, synced, is what a power cut must not cost
    sqlalchemy.event.listen(storage.engine, "connect", lambda made, _: made.execute("PRAGMA synchronous=OFF"))
    storage.engine.dispose()  # connections that were opened before
    return storage


def _identity(config: Config, prepared: Prepared, rules: Rules, searched: Space, trials: Sequence[Trial]) -> Identity:
    seed = config.seed + len(trials)  # a resumed study must not draw the same trials again
    digest = space.digest([config.objective, sorted(searched.items())])
    return Identity(
        name=f"autotune.{prepared.graph.name}.{prepared.device.key}.{config.objective}.{digest}",
        objectives=("step_bytes", "time_ratio") if config.objective == "pareto" else ("time_ratio",),
        attributes={
            "workload": str(config.ref),
            "graph_digest": prepared.graph.digest,
            "budget": config.budget,
            "budget_bytes": rules.budget_bytes,
            "floor_bytes": rules.floor_bytes,
            "sampler": config.sampler,
            "seed": seed,
            "autotune": version("autotune"),
            "optuna": version("optuna"),
            "note": "imputed trials were told the simulator's numbers; a constraint above 0 is violated",
        },
        sampler=space.make_sampler(config.sampler, searched, config.trials or 0, seed),
    )
