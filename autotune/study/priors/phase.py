"""Make the priors of a study and connect them to its sampler: the calls of the session."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.measure.survey import PreparedWorkload
from autotune.planners.candidates import Planning
from autotune.planners.knobs import Settings
from autotune.planners.space import Space
from autotune.records.config import Config
from autotune.study.events import Logged, PhaseStarted, Progress, StudyPhase
from autotune.study.priors.discrepancy import Calibration
from autotune.study.priors.observations import Priors, observe_earlier, read_priors, write_priors
from autotune.study.priors.simulated import simulate_settings
from autotune.study.seeds import Seeds
from autotune.study.verdicts.ranking import NEW_RUNS, Rules

if TYPE_CHECKING:
    from autotune.study.trial_store import TrialStore

MOST_SIMULATED = 80
"""Maximum number of simulated settings; the sampler's own time grows with it."""
SIMULATED_PER_TRIAL = 20
"""Number of simulated settings per trial that the study may still measure."""
SIMULATION_SHARE = 0.03
"""Maximum share of the study's time for simulating settings."""
MODEL_SAMPLERS = frozenset({"auto", "gp", "tpe"})
"""Samplers that read the trials of a study as a whole; the others cannot use observations of other origin."""


def adapt_seeds(
    seeds: Seeds, prepared: PreparedWorkload, searched: Space, rules: Rules, *, run_dir: Path, progress: Progress
) -> list[Settings]:
    """Return the settings of another run that can be planned here; where there are none, a line is reported.

    The trials of that run are kept in this run's directory, so that a resumed study needs the other run no more.
    """
    stores = prepared.costs.stores
    if seeds.earlier is not None:
        source = seeds.earlier.classify(prepared.graph.digest, prepared.device, rules.budget_bytes)
        observations = observe_earlier(source, seeds.adapt_scores(stores, searched))
        write_priors(run_dir, replace(read_priors(run_dir), earlier=observations))
    settings = seeds.adapt(stores, searched)
    if not settings:
        progress(Logged("none of the settings of --seed-from can be planned here", "seeds"))
    return settings


def attach_priors(
    store: "TrialStore",
    planning: Planning,
    config: Config,
    target_bytes: int,
    progress: Progress,
) -> None:
    """Let the study's sampler read the trials with settings alone, and the priors of the run directory.

    With `config.priors` settings are simulated first. Neither the stored study nor the trials change. Raises ConfigError
    where the file of priors is damaged.
    """
    from optuna.samplers import GPSampler

    from autotune.study.priors.sampler import PriorSampler

    if config.sampler not in MODEL_SAMPLERS or isinstance(store.study.sampler, PriorSampler):
        return

    # settings are simulated for one budget, which is a variable of a front
    priors = Priors() if config.objective == "pareto" else read_priors(store.run_dir)
    if config.priors and priors.simulated is None and config.objective != "pareto":
        progress(PhaseStarted(StudyPhase.PRIORS))
        searched = sum(trial.kind not in NEW_RUNS for trial in store.trials)
        remaining = MOST_SIMULATED if config.trials is None else config.trials - searched
        simulated = simulate_settings(
            planning,
            store.space,
            store.rules,
            target_bytes=target_bytes,
            overheads=store.overheads,
            count=min(MOST_SIMULATED, SIMULATED_PER_TRIAL * remaining),
            seconds=SIMULATION_SHARE * config.time_seconds,
            seed=config.seed,
        )
        priors = replace(priors, simulated=simulated)
        write_priors(store.run_dir, priors)
    observations = priors.observations if config.priors else priors.earlier
    calibration = Calibration(observations, store.rules) if observations else None
    if calibration is None and isinstance(
        store.study.sampler, GPSampler
    ):  # it leaves out trials without settings itself
        return
    store.study.sampler = PriorSampler(
        store.study.sampler,
        store.space,
        store.objectives,
        lambda: () if calibration is None else calibration.update(store.trials),
        config.seed,
    )
