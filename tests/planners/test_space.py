"""Planners' knobs as Optuna's parameters, there and back."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import optuna
import pytest

from autotune.errors import ConfigError
from autotune.planners import KINDS, build_planners
from autotune.planners.knobs import Choice, Float, Int
from autotune.planners.space import build_space, preset_settings
from autotune.study.optuna_space import check_sampler, is_conditional, make_sampler, suggest_settings, to_parameters

FLAT = {"recompute": {"greedy": {"greed": Float(0.5, 2.0)}}, "offload": {"keep": {}}}


def test_without_a_store_no_planner_that_needs_one_is_searched():
    assert set(build_space(KINDS, ())["offload"]) == {"keep"}
    assert build_space(KINDS, ("ramdisk",))["offload"]["window"]["store"] == Choice(("ramdisk",))


def test_windows_are_searched_only_where_something_can_solve_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    knobs = build_space(KINDS, ())["recompute"]["greedy"]
    assert "windows" not in knobs
    assert "greed" in knobs
    monkeypatch.setitem(sys.modules, "ortools", ModuleType("ortools"))
    sys.modules["ortools"].__spec__ = ModuleSpec("ortools", None)
    assert "windows" in build_space(KINDS, ())["recompute"]["greedy"]


def test_a_default_that_the_device_lacks_gives_way():
    space = build_space(KINDS, ("ramdisk",))
    names = {"order": "traced", "update": "at_end", "recompute": "keep", "offload": "window"}
    assert preset_settings(KINDS, space, names)["offload"] == {
        "planner": "window",
        "window": 1,
        "store": "ramdisk",
        "share": 1.0,
        "what": "activations",
        "least_bytes": 1,
    }


@pytest.mark.parametrize("stores", [(), ("ssd",)])
def test_whatever_is_suggested_builds_planners_and_comes_back_as_the_same_parameters(stores):
    space = build_space(KINDS, stores)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(60):
        trial = study.ask()
        settings = suggest_settings(trial, space)
        build_planners(settings)
        assert to_parameters(settings, space) == (trial.params, trial.distributions)


def test_share_of_recompute_is_a_choice_only_where_a_store_takes_the_rest():
    space = build_space(KINDS, ("ssd",))
    names = {"order": "traced", "update": "at_end", "recompute": "greedy"}
    assert "share" not in preset_settings(KINDS, space, names | {"offload": "keep"})["recompute"]
    assert "share" in preset_settings(KINDS, space, names | {"offload": "window"})["recompute"]


def test_settings_outside_the_space_become_no_parameters():
    assert to_parameters({"recompute": {"planner": "greedy", "greed": 9.0}, "offload": {"planner": "keep"}}, FLAT) == (
        {},
        {},
    )
    assert to_parameters({"recompute": {"planner": "segments"}, "offload": {"planner": "keep"}}, FLAT) == ({}, {})
    assert to_parameters({}, FLAT) == ({}, {})


def test_auto_is_a_gaussian_process_only_where_no_knob_hangs_on_a_choice():
    assert not is_conditional(FLAT)
    assert is_conditional(build_space(KINDS, ()))
    assert isinstance(make_sampler("auto", FLAT, 30, 0), optuna.samplers.GPSampler)
    assert isinstance(make_sampler("auto", FLAT, 250, 0), optuna.samplers.TPESampler)
    assert isinstance(make_sampler("auto", build_space(KINDS, ()), 30, 0), optuna.samplers.TPESampler)
    many = {"order": {"one": {f"knob{i}": Int(0, 9) for i in range(16)}}, "offload": {"keep": {}}}
    assert isinstance(make_sampler("auto", many, 30, 0), optuna.samplers.TPESampler)


def test_cma_es_is_refused_by_name_where_its_package_is_missing_or_the_objective_has_two_values(monkeypatch):
    monkeypatch.setattr("autotune.study.optuna_space.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"sampler 'cmaes' needs the package cmaes; install it: .*\[cmaes\]"):
        make_sampler("cmaes", FLAT, 30, 0)
    monkeypatch.setattr("autotune.study.optuna_space.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="minimizes one value, objective 'pareto' has several; write sampler: tpe"):
        check_sampler("cmaes", objective="pareto")
    check_sampler("tpe", objective="pareto")


def test_an_unknown_sampler_is_refused_by_name():
    with pytest.raises(ConfigError, match="'anneal'; known: auto, cmaes, gp, random, tpe"):
        make_sampler("anneal", FLAT, 30, 0)


def test_gaussian_process_learns_beside_a_baseline_that_has_no_parameters():
    study = optuna.create_study(sampler=make_sampler("gp", FLAT, 30, 3))
    zero = {"memory": 0.0, "numerics": 0.0}
    study.add_trial(optuna.trial.create_trial(value=1.0, constraints=zero))
    found = []
    for _ in range(14):
        trial = study.ask()
        greed = suggest_settings(trial, FLAT)["recompute"]["greed"]
        for key in zero:
            trial.set_constraint(key, -1.0)
        study.tell(trial, (greed - 1.2) ** 2)
        found.append(abs(greed - 1.2))
    assert min(found[10:]) < 0.01
    assert sum(found[10:]) / 4 < sum(found[:10]) / 10 / 2
