"""Preparation of a study's sampler: which samplers are wrapped, and which observations they read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from autotune.records.config import Config
from autotune.study.events import ignore_event
from autotune.study.optuna_space import make_sampler, suggest_settings
from autotune.study.priors.observations import Priors, PriorSource, write_priors
from autotune.study.priors.phase import attach_priors
from autotune.study.priors.sampler import PriorSampler
from tests.study.priors.synthetic import RULES, SPACE, draw, observe, useful_log
from tests.study.priors.test_sampler import Recorder, completed


def attach(directory: Path, sampler: optuna.samplers.BaseSampler, **fields: Any) -> optuna.Study:
    """Return a study without trials, after its sampler got the priors in a directory; nothing can be simulated."""
    study, planning = optuna.create_study(sampler=sampler), SimpleNamespace()
    store: Any = SimpleNamespace(
        run_dir=directory, study=study, space=SPACE, objectives=("time_ratio",), rules=RULES, trials=[]
    )
    attach_priors(store, planning, Config(workload="w", **fields), 1000, ignore_event)
    return study


@pytest.mark.parametrize("fields", [{}, {"objective": "pareto"}, {"objective": "pareto", "priors": True}])
def test_trials_without_settings_are_kept_from_a_tpe_sampler_also_without_observations(
    tmp_path: Path, fields: dict[str, Any]
):
    tpe, gp = (make_sampler(name, SPACE, 8, 0) for name in ("tpe", "gp"))
    wrapped = attach(tmp_path, tpe, **fields).sampler
    assert isinstance(wrapped, PriorSampler)
    assert wrapped.sampler is tpe
    assert attach(tmp_path, gp, **fields).sampler is gp  # it leaves them out itself


@pytest.mark.parametrize(("priors", "count"), [(True, 6), (False, 1)])
def test_a_run_that_goes_on_without_priors_reads_the_trials_of_another_run_and_no_simulated_settings(
    tmp_path: Path, priors: bool, count: int
):
    earlier, *simulated = draw(6, 5)
    observed = (observe(earlier, useful_log(earlier), PriorSource.SAME_STUDY),)
    predicted = tuple(observe(settings, useful_log(settings)) for settings in simulated)
    write_priors(tmp_path, Priors(earlier=observed, simulated=predicted))
    recorder = Recorder()
    study = attach(tmp_path, recorder, priors=priors)
    first = study.ask()
    suggest_settings(first, SPACE)
    first.set_user_attr("kind", "search")
    study.tell(first, 1.0)
    suggest_settings(study.ask(), SPACE)
    shown = [trial for trial in completed(recorder.shown[1]) if not trial.user_attrs]
    assert len(shown) == count
