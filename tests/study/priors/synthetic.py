"""A search problem with a known answer: a small space, true times, and a simulator that errs as it is told to."""

import math
import random
from collections.abc import Callable

import optuna

from autotune.ir.plan import Plan
from autotune.planners.knobs import Float, Settings
from autotune.planners.space import Space
from autotune.predict.simulate import Estimate
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.optuna_space import make_sampler, suggest_settings
from autotune.study.priors.discrepancy import Calibration
from autotune.study.priors.observations import PriorObservation, PriorSource
from autotune.study.priors.sampler import PriorSampler
from autotune.study.verdicts.ranking import Rules, TrialScore

SPACE: Space = {
    "order": {"traced": {}, "list_by_bytes": {}, "depth_first": {}, "longest_path": {}},
    "recompute": {"keep": {}, "greedy": {"greed": Float(1.0, 3.0)}, "per_block": {}},
    "reorder": {"keep": {}, "again": {}},
}
RULES = Rules(1000, 0, None, 1.0)
ORDERS = {"traced": 0.10, "list_by_bytes": 0.04, "depth_first": 0.0, "longest_path": 0.07}
RECOMPUTATIONS = {"keep": 0.12, "greedy": 0.0, "per_block": 0.09}
REORDERINGS = {"keep": 0.0, "again": 0.03}
BEST_GREED = 2.4

optuna.logging.set_verbosity(optuna.logging.ERROR)


def true_log(settings: Settings) -> float:
    """Logarithm of the true time ratio; 0 is the best of the space."""
    names = {kind: str(chosen["planner"]) for kind, chosen in settings.items()}
    greed = float(settings["recompute"].get("greed", BEST_GREED))
    parts = ORDERS[names["order"]], RECOMPUTATIONS[names["recompute"]], REORDERINGS[names["reorder"]]
    return sum(parts) + 0.15 * (greed - BEST_GREED) ** 2


def useful_log(settings: Settings) -> float:
    """Prediction of a simulator that is 20 % too slow, and off by a few percent for each combination."""
    dice = random.Random(str([chosen["planner"] for chosen in settings.values()]))
    return 0.2 + true_log(settings) + dice.gauss(0.0, 0.02)


def misleading_log(settings: Settings) -> float:
    """Prediction of a simulator that has it all upside down."""
    return -true_log(settings)


def observe(settings: Settings, log: float, source: PriorSource = PriorSource.SIMULATED) -> PriorObservation:
    return PriorObservation(source, settings, TrialScore(math.exp(log), 900, -0.1, 0.0, imputed=True))


def draw(count: int, seed: int) -> list[Settings]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [suggest_settings(study.ask(), SPACE) for _ in range(count)]


def measured(number: int, settings: Settings, log: float, predicted: float) -> Trial:
    result = Measurement(Outcome.OK, step_seconds=(math.exp(log),), baseline_seconds=(1.0,))
    estimate = Estimate(900, "op", 900, math.exp(predicted), 0.0, 0, 0.0, 0, 0.0)
    return Trial(number, TrialKind.SEARCH, "net()", "digest", settings, Plan((number,)), estimate, result)


def search(
    sampler: str,
    seed: int,
    count: int,
    predict: Callable[[Settings], float] | None = None,
    *,
    enough: float = -math.inf,
) -> list[float]:
    """Return the best true logarithm after each of `count` measured trials, or of fewer once it is at most `enough`.

    The sampler has observations if there is a simulator.
    """
    study = optuna.create_study(sampler=make_sampler(sampler, SPACE, count, seed))
    trials: list[Trial] = []
    if predict is not None:
        observations = [observe(settings, predict(settings)) for settings in draw(40, 1000 + seed)]
        calibration = Calibration(observations, RULES)
        study.sampler = PriorSampler(study.sampler, SPACE, ("time_ratio",), lambda: calibration.update(trials), seed)
    dice, best = random.Random(seed), list[float]()
    for number in range(count):
        request = study.ask()
        settings = suggest_settings(request, SPACE)
        log = true_log(settings)
        seen = log + dice.gauss(0.0, 0.005)
        request.set_user_attr("kind", "search")
        for name in ("memory", "numerics"):
            request.set_constraint(name, 0.0)
        study.tell(request, math.exp(seen))
        trials.append(measured(number, settings, seen, (predict or true_log)(settings)))
        best.append(min([log, *best[-1:]]))
        if best[-1] <= enough:
            break
    return best
