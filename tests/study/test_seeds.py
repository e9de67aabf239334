"""Settings from elsewhere: which are taken, and what a slower store makes of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.plan import Plan
from autotune.measure.device import profile as device_profile
from autotune.planners import KINDS, default_settings
from autotune.planners.knobs import Settings
from autotune.planners.space import build_space
from autotune.predict.simulate import Estimate
from autotune.records import plan_file as planfile
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.records.trial import Trial, TrialKind, append_trial
from autotune.study.priors.observations import EarlierRun
from autotune.study.seeds import Seeds, read_seeds
from autotune.study.verdicts.ranking import TrialScore
from autotune.workloads.reference import WorkloadRef
from tests.measure.test_device_profile import DEVICE, PROFILE

FAST, SLOW = StoreCost(2e9, 2e9, 1e9, 1e9), StoreCost(1e9, 0.5e9, 1e9, 1e9)
SEARCHED = build_space(KINDS, {"ssd"})
ESTIMATE = Estimate(1000, "op", 1000, 1.0, 0.0, 0, 0.0, 0, 0.0)


def windowed(**knobs: int) -> Settings:
    chosen = {
        "planner": "window",
        "window": 2,
        "store": "ssd",
        "share": 1.0,
        "what": "activations",
        "least_bytes": 4096,
    }
    return {
        **default_settings(),
        "recompute": {"planner": "greedy", "greed": 1.5, "windows": 0, "share": 1.0},
        "offload": {**chosen, **knobs},
    }


def offload(found: list[Settings]) -> dict[str, object]:
    (settings,) = found
    return settings["offload"]


def test_where_the_store_is_slower_the_window_is_as_many_times_wider_and_small_values_stay() -> None:
    there = Seeds((windowed(),), {"ssd": FAST})
    slower = offload(there.adapt({"ssd": SLOW}, SEARCHED))  # reads take four times as long
    assert (slower["window"], slower["least_bytes"]) == (8, 1024)
    faster = offload(Seeds((windowed(window=8),), {"ssd": SLOW}).adapt({"ssd": FAST}, SEARCHED))
    assert (faster["window"], faster["least_bytes"]) == (4, 8192)
    same = offload(there.adapt({"ssd": FAST}, SEARCHED))
    assert (same["window"], same["least_bytes"]) == (2, 4096)


def test_rescaled_knobs_stay_within_what_a_planner_takes() -> None:
    here = Seeds((windowed(window=8, least_bytes=1),), {"ssd": FAST}).adapt({"ssd": SLOW}, SEARCHED)
    assert (offload(here)["window"], offload(here)["least_bytes"]) == (8, 1)


def test_settings_are_taken_as_they_are_where_the_other_store_is_unknown() -> None:
    assert Seeds((windowed(),)).adapt({"ssd": SLOW}, SEARCHED) == [windowed()]


def test_settings_that_cannot_be_searched_here_are_left_out_and_equal_ones_taken_once() -> None:
    unknown = {**windowed(), "recompute": {"planner": "of a later version"}}
    assert Seeds((unknown, windowed(), windowed())).adapt({}, SEARCHED) == [windowed()]
    assert Seeds((windowed(),)).adapt({}, build_space(KINDS, set())) == []


@pytest.mark.parametrize(("there", "here"), [("arena", "system"), ("system", "arena")])
def test_settings_and_scores_of_another_kind_of_device_get_this_ones_only_allocator(there: str, here: str) -> None:
    searched = {**SEARCHED, "allocator": {here: SEARCHED["allocator"][here]}}
    recorded = {**windowed(), "allocator": {"planner": there}}
    expected = {**windowed(), "allocator": {"planner": here}}
    score = TrialScore(0.9, 1000, 0.0, 0.0, imputed=False)
    seeds = Seeds((recorded,), earlier=EarlierRun("digest", DEVICE, 1, ((recorded, score),)))
    assert seeds.adapt({"ssd": SLOW}, searched) == [expected]
    assert seeds.adapt_scores({"ssd": SLOW}, searched) == [(expected, score)]


def test_a_knob_that_settings_lack_gets_its_default() -> None:
    """A machine without CP-SAT searches no windows, so its settings have none."""
    searched = {**SEARCHED, "recompute": {"greedy": dict(KINDS["recompute"]["greedy"].knobs)}}
    recorded = {**windowed(), "recompute": {"planner": "greedy", "greed": 1.5, "share": 1.0}}
    assert Seeds((recorded,)).adapt({"ssd": SLOW}, searched) == [windowed()]


def trial(number: int, ratio: float, settings: Settings, **changes: object) -> Trial:
    seen = Measurement(Outcome.OK, step_seconds=(ratio,), baseline_seconds=(1.0,), device=DEVICE)
    made = Trial(number, TrialKind.SEARCH, "net()", "digest", settings, Plan((0,)), ESTIMATE, seen)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_of_a_run_the_fastest_plans_that_held_are_taken_with_what_its_stores_did(tmp_path: Path) -> None:
    trials = [
        trial(0, 1.0, {}, kind=TrialKind.BASELINE, plan=None),
        trial(1, 0.5, windowed(window=1), measurement=Measurement(Outcome.WRONG_RESULT)),
        trial(2, 0.6, windowed(window=2), kind=TrialKind.REPEAT),
        *(trial(number, 2.0 - number / 10, windowed(window=number)) for number in range(3, 8)),
        trial(8, 1.25, windowed(window=7), kind=TrialKind.CONFIRM),
    ]
    for one in trials:
        append_trial(tmp_path / "trials.jsonl", one)
    (tmp_path / "costs.json").write_text(json.dumps(to_json(Costs((), (), {"ssd": FAST}))))
    found = read_seeds(tmp_path, tmp_path / "runs")
    assert [settings["offload"]["window"] for settings in found.settings] == [7, 6, 5]
    assert found.stores == {"ssd": FAST}


def test_of_a_run_whose_eager_step_did_not_fit_the_fastest_plans_by_seconds_are_taken(tmp_path: Path) -> None:
    baseline = Measurement(Outcome.OUT_OF_MEMORY)
    append_trial(tmp_path / "trials.jsonl", trial(0, 1.0, {}, kind=TrialKind.BASELINE, plan=None, measurement=baseline))
    for number in range(1, 6):
        seen = Measurement(Outcome.OK, step_seconds=(6.0 - number,), device=DEVICE)
        append_trial(tmp_path / "trials.jsonl", trial(number, 1.0, windowed(window=number), measurement=seen))
    found = read_seeds(tmp_path, tmp_path / "runs")
    assert [settings["offload"]["window"] for settings in found.settings] == [5, 4, 3]


def test_a_plan_file_brings_its_settings_and_its_devices_profile_the_stores(tmp_path: Path) -> None:
    file = PlanFile(WorkloadRef("net"), "digest", "65%", 1, 1, windowed(), Plan((0,)), ESTIMATE, DEVICE)
    planfile.write(tmp_path / "plan.json", file)
    assert read_seeds(tmp_path / "plan.json", tmp_path / "runs") == Seeds((windowed(),))
    device_profile.write(device_profile.profile_path(tmp_path / "runs", DEVICE), PROFILE)
    assert read_seeds(tmp_path / "plan.json", tmp_path / "runs") == Seeds((windowed(),), PROFILE.stores)


def test_a_source_that_holds_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no plan was measured here"):
        read_seeds(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="cannot read the plan"):
        read_seeds(tmp_path / "nothing.json", tmp_path)
