"""Store the trials of a study: on disk first, then in Optuna, which is updated from the disk where it lags."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autotune
from autotune.errors import ConfigError
from autotune.measure.survey import PreparedWorkload
from autotune.planners.candidates import Candidate
from autotune.planners.knobs import Settings
from autotune.planners.space import Space
from autotune.predict.simulate import Estimate
from autotune.records import trial as trials_file
from autotune.records.config import Config
from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir, resume_command
from autotune.records.tracking_address import sqlite_address
from autotune.records.trial import Trial, TrialKind
from autotune.study import optuna_space as space
from autotune.study.front.budget_scale import BudgetScale, find_budget_scale
from autotune.study.optuna_space import Parameters, to_parameters
from autotune.study.verdicts.ranking import Rules, TrialScore, allocator_overheads, plan_hash, score_trial

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

FRONT_OBJECTIVES = ("step_bytes", "time_ratio")
"""Objectives of a study of the Pareto front."""
WINNER = "winner"
"""User attribute of a study: number of the confirmed trial, or None where no plan won."""


@dataclass(frozen=True, slots=True)
class StudyIdentity:
    """Name, objectives and sampler of an Optuna study. A new name starts another study in the same file."""

    name: str
    objectives: tuple[str, ...]
    """`time_ratio`, or `step_bytes` and `time_ratio`."""
    attributes: dict[str, Any]
    """User attributes for people who open the study: budget, seed, versions."""
    sampler: "BaseSampler"
    lasting: bool = True
    """True if the study is kept on disk."""


class TrialStore:
    """Trials file and Optuna study of one run directory, kept in step. Trial numbers are the same in both."""

    def __init__(self, run_dir: Path, identity: StudyIdentity, space: Space, rules: Rules, trials: list[Trial]) -> None:
        self.run_dir, self.rules, self.trials = run_dir, rules, trials
        self._path = RunDir(run_dir).trials
        self._space, self._rules, self._objectives = space, rules, identity.objectives
        with self._writing():
            self.study = _open(RunDir(run_dir).optuna, identity)
            self._catch_up()

    @property
    def space(self) -> Space:
        """Planners and knobs that the study searches."""
        return self._space

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the scores that the study minimizes."""
        return self._objectives

    @property
    def overheads(self) -> list[float]:
        """Measured allocator overheads so far, as shares of the predicted peak."""
        return allocator_overheads(self.trials)

    @property
    def measured_settings(self) -> list[Settings]:
        """Settings of all trials but the smallest plan's, which was made for another budget."""
        return [trial.settings for trial in self.trials if trial.kind != TrialKind.SMALLEST]

    @property
    def planned_plan_fits(self) -> bool:
        """True if a planned candidate ran within the budget."""
        planned = [trial.measurement for trial in self.trials if trial.kind == TrialKind.PLANNER]
        return any(result is not None and result.outcome is Outcome.OK for result in planned)

    def next_number(self) -> int:
        """Return the number of the next trial, for one that Optuna does not suggest."""
        return len(self.study.get_trials(deepcopy=False))

    @property
    def budget_scale(self) -> BudgetScale | None:
        """Range of the budgets of a study of the Pareto front; None for another objective, or before the smallest plan."""
        return find_budget_scale(self.trials, self._rules) if self._objectives == FRONT_OBJECTIVES else None

    def suggest(self, request: "optuna.Trial") -> tuple[Settings, int | None]:
        """Suggest a trial's settings, and the peak bytes that its planners have to meet.

        The bytes are None where the study has one budget.
        """
        with self._writing():
            settings = space.suggest_settings(request, self._space)
            scale = self.budget_scale
            return settings, None if scale is None else scale.to_bytes(space.suggest_budget(request))

    def ask(self, fixed: Parameters | None = None, target_bytes: int | None = None) -> "optuna.Trial":
        """Return a new trial of Optuna's, at fixed parameters if there are any, and at a budget if it is a parameter."""
        if fixed and target_bytes is not None:
            fixed = {**fixed, **self._budget_parameter(target_bytes)[0]}
        with self._writing():
            if fixed:
                self.study.enqueue_trial(fixed)
            return self.study.ask()

    def reserve(self) -> "optuna.Trial":
        """Reserve the number of a trial that Optuna did not suggest: add a running trial without parameters to its study."""
        import optuna

        with self._writing():
            self.study.add_trial(
                optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, system_attrs={"fixed_params": {}})
            )
            return optuna.trial.Trial(self.study, self.study.get_trials(deepcopy=False)[-1]._trial_id)

    def record(self, trial: Trial, request: "optuna.Trial | None" = None) -> TrialScore:
        """Sync a trial to disk, then add it to Optuna: as the result of its `request`, or as a trial of our own."""
        trials_file.append_trial(self._path, trial)
        self.trials.append(trial)
        with self._writing():
            return self._add_to_optuna(trial, request)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise a failure of Optuna's database as a ConfigError with the next step."""
        import optuna
        from sqlalchemy.exc import DatabaseError

        try:
            yield
        except (optuna.exceptions.StorageInternalError, DatabaseError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ConfigError(
                f"{RunDir(self._path.parent).optuna}: cannot be written ({reason}); the trials are kept: free space there, or end "
                f"the program that locks the file, then: {resume_command(self._path.parent)}"
            ) from error

    def retry(self, request: "optuna.Trial") -> None:
        """Mark an unfinished trial as failed in Optuna, and enqueue its parameters, if any, for the next session."""
        import optuna

        with self._writing():
            self.study.tell(request, state=optuna.trial.TrialState.FAIL)
            if request.params:
                self.study.enqueue_trial(request.params, user_attrs={"retry_of": request.number})

    def record_winner(self, best: Trial | None) -> None:
        """Name the winner in the study's user attributes: its best value may be a lucky measurement of another plan."""
        number = None if best is None else best.number
        with self._writing():
            if self.study.user_attrs.get(WINNER) != number:
                self.study.set_user_attr(WINNER, number)

    def _add_to_optuna(self, trial: Trial, request: "optuna.Trial | None") -> TrialScore:
        import optuna

        score = score_trial(trial, self._rules, self.overheads)
        values = [getattr(score, objective) for objective in self._objectives]
        # every trial has the same constraints: the Gaussian process sampler refuses anything else
        constraints = {"memory": score.memory, "numerics": score.numerics}
        attributes = _attributes(trial, score)
        if request is None:
            # the smallest plan was made for a budget of zero, and a move changed the plan: settings make another one
            is_made_otherwise = trial.kind == TrialKind.SMALLEST or trial.move
            params, distributions = ({}, {}) if is_made_otherwise else to_parameters(trial.settings, self._space)
            if params and trial.target_bytes is not None:
                budget, distribution = self._budget_parameter(trial.target_bytes)
                params, distributions = {**params, **budget}, {**distributions, **distribution}
            self.study.add_trial(
                optuna.trial.create_trial(
                    values=values,
                    params=params,
                    distributions=distributions,
                    user_attrs=attributes,
                    constraints=constraints,
                )
            )
            return score
        for key, value in attributes.items():
            request.set_user_attr(key, value)
        for key, violation in constraints.items():
            if key not in request.constraints:
                request.set_constraint(key, violation)
        self.study.tell(request, values)
        return score

    def _budget_parameter(self, target_bytes: int) -> tuple[Parameters, "dict[str, BaseDistribution]"]:
        """Return a target as a parameter with its distribution; both are empty where the study has one budget."""
        scale = self.budget_scale
        return ({}, {}) if scale is None else space.budget_parameter(scale.to_share(target_bytes))

    def _catch_up(self) -> None:
        """Add every trial on disk that Optuna lacks, and fail those that are still marked as running."""
        import optuna

        states = optuna.trial.TrialState
        recorded = {trial.number for trial in self.trials}
        for trial in self.trials:
            stored = self.study.get_trials(deepcopy=False)
            for _ in range(trial.number - len(stored)):
                self.study.add_trial(optuna.trial.create_trial(state=states.FAIL, user_attrs={"lost": True}))
            if trial.number >= len(stored):
                self._add_to_optuna(trial, None)
            elif not stored[trial.number].state.is_finished():
                trial_id = stored[trial.number]._trial_id
                if stored[trial.number].state is states.WAITING:  # an older file: Optuna tells no result of it
                    self.study._storage.set_trial_state_values(trial_id, states.RUNNING)
                self._add_to_optuna(trial, optuna.trial.Trial(self.study, trial_id))
        for running in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if running.number not in recorded:
                self.study.tell(running.number, state=states.FAIL)


def add_plan(trial: Trial, candidate: Candidate, estimate: Estimate) -> Trial:
    """Return a trial with its plan, the origin of the plan, and the plan's estimate."""
    return replace(
        trial,
        plan=candidate.plan,
        estimate=estimate,
        target_bytes=candidate.target_bytes,
        parent=candidate.parent,
        move=candidate.move,
    )


def _attributes(trial: Trial, score: TrialScore) -> dict[str, Any]:
    """Return the user attributes of a trial, for people who open the study in another program."""
    attributes: dict[str, Any] = {"kind": trial.kind.value, "imputed": score.imputed}
    if trial.plan is not None:
        attributes["plan_hash"] = plan_hash(trial.plan)
    if trial.estimate is not None:
        attributes |= {"estimate_peak_bytes": trial.estimate.peak_bytes, "estimate_seconds": trial.estimate.seconds}
    if trial.measurement is not None:
        attributes |= {
            "outcome": trial.measurement.outcome.value,
            "detail": trial.measurement.detail[:500],
            "peak_bytes": trial.measurement.peak_bytes,
            "charged_bytes": trial.measurement.charged_bytes,
        }
    return attributes


def _open(path: Path, identity: StudyIdentity) -> "optuna.Study":
    """Open the study; a file that is broken, or of another version, is replaced: the trials file has all of its trials."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        return _load(path, identity)
    except (
        DatabaseError,
        optuna.exceptions.StorageInternalError,
        RuntimeError,
    ) as error:  # the last for another version's schema
        text = f"{error} {error.__cause__}"
        is_broken = isinstance(error, RuntimeError) or "not a database" in text or "malformed" in text
        if not path.exists() or not is_broken:  # it is locked, or the disk is full
            raise
        path.replace(path.with_suffix(".db.broken"))
    return _load(path, identity)


def _load(path: Path, identity: StudyIdentity) -> "optuna.Study":
    """Open the study, read its trials and write its attributes, so that a broken file fails here."""
    import optuna

    study = optuna.create_study(
        storage=_storage(path) if identity.lasting else optuna.storages.InMemoryStorage(),
        study_name=identity.name,
        directions=["minimize"] * len(identity.objectives),
        sampler=identity.sampler,
        load_if_exists=True,
    )
    study.get_trials(deepcopy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(identity.objectives))
    for key, value in identity.attributes.items():
        study.set_user_attr(key, value)
    return study


def _storage(path: Path) -> "optuna.storages.RDBStorage":
    import optuna
    import sqlalchemy

    storage = optuna.storages.RDBStorage(sqlite_address(path.resolve()))
    # a trial is thirty small transactions, and each would wait for the disk; after a power cut, trials.jsonl has all
    sqlalchemy.event.listen(
        storage.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF")
    )
    storage.engine.dispose()  # close connections without the setting
    return storage


def make_identity(
    config: Config, prepared: PreparedWorkload, rules: Rules, searched: Space, trials: Sequence[Trial]
) -> StudyIdentity:
    """Return the identity of a study, which depends on workload, device, objective and search space."""
    seed = config.seed + len(trials)  # a resumed study must not draw the same trials again
    digest = space.short_digest([config.objective, sorted(searched.items())])
    return StudyIdentity(
        name=f"autotune.{prepared.graph.name}.{prepared.device.key}.{config.objective}.{digest}",
        objectives=FRONT_OBJECTIVES if config.objective == "pareto" else ("time_ratio",),
        attributes={
            "workload": str(config.ref),
            "graph_digest": prepared.graph.digest,
            "budget": config.budget,
            "budget_bytes": rules.budget_bytes,
            "floor_bytes": rules.floor_bytes,
            "sampler": config.sampler,
            "seed": seed,
            "autotune": autotune.__version__,
            "optuna": version("optuna"),
            "note": "imputed trials were told the simulator's numbers; a constraint above 0 is violated",
        },
        sampler=space.make_sampler(
            config.sampler, searched, config.trials or 0, seed, with_budget=config.objective == "pareto"
        ),
    )
