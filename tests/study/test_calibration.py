"""Error bars: from what was measured of this workload on this silicon, else from the project's own errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind, append_trial
from autotune.study.offline.calibration import MIN_PLANS, compute_error_ranges, load_past_runs, median_trial_seconds

DEVICE = Device("cpu", "Intel(R) Xeon(R) CPU @ 2.20GHz", 2**34, 2, "2.13.0")
ARENA: Settings = {"allocator": {"planner": "arena"}}
SYSTEM: Settings = {"allocator": {"planner": "system"}}
WEIGHTS: Settings = {**ARENA, "offload": {"planner": "window", "what": "all"}}
EXPECTED = Estimate(1000, "op", 1000, 1.0, 0.0, 0, 0.0, 0, 0.0)


def measured(number: int, *, peak: int = 1000, charged: int = 1010, seconds: float = 0.8, **changes: object) -> Trial:
    seen = Measurement(
        Outcome.OK, peak_bytes=500 + peak, charged_bytes=500 + charged, floor_bytes=500, step_seconds=(seconds,) * 3
    )
    trial = Trial(number, TrialKind.SEARCH, "net()", "digest", ARENA, None, EXPECTED, seen, started=40.0 * number)
    return replace(trial, **changes)  # type: ignore[arg-type]


def test_without_a_past_the_bars_are_the_projects_own_errors_and_say_so() -> None:
    made = compute_error_ranges(ARENA, [], 0.0)
    assert made.nbytes[0] < 1 < made.nbytes[1] <= 1.05
    assert made.seconds[0] < 0.62
    assert made.seconds[1] > 1.19
    assert "eight models" in made.source


def test_weights_that_leave_and_malloc_have_wider_bars_of_bytes() -> None:
    assert (
        compute_error_ranges(ARENA, [], 0.0).nbytes[1]
        < compute_error_ranges(WEIGHTS, [], 0.0).nbytes[1]
        < compute_error_ranges(SYSTEM, [], 0.0).nbytes[1]
    )


def test_enough_plans_measured_here_make_the_bars_alone() -> None:
    run = [
        measured(number, peak=990 + number, charged=1000 + 2 * number, seconds=0.7 + 0.01 * number)
        for number in range(9)
    ]
    made = compute_error_ranges(ARENA, [run], 0.0)
    assert made.nbytes == (1.000, 1.016)
    assert made.seconds == pytest.approx((0.70, 0.78))
    assert made.ratio == pytest.approx((0.70 / 0.74, 0.78 / 0.74))
    assert made.source == "9 plans of this workload measured here"


def test_times_of_a_busy_machine_are_no_errors_of_the_prediction_and_its_bytes_are() -> None:
    run = [measured(number, seconds=0.7 + 0.01 * number) for number in range(9)]
    seen = replace(run[0].measurement, step_seconds=(7.0,) * 3, charged_bytes=1600, disturbed="busy")
    made = compute_error_ranges(ARENA, [[*run, replace(run[0], number=9, measurement=seen)]], 0.0)
    assert made.seconds == pytest.approx((0.70, 0.78))
    assert made.nbytes[1] == 1.1


def test_a_few_plans_measured_here_can_only_widen_the_bars() -> None:
    few = [measured(number, charged=1200, seconds=2.0) for number in range(MIN_PLANS - 1)]
    made, usual = compute_error_ranges(ARENA, [few], 0.0), compute_error_ranges(ARENA, [], 0.0)
    assert made.nbytes == (usual.nbytes[0], 1.2)
    assert made.seconds == (usual.seconds[0], 2.0)
    assert made.source == usual.source


def test_plans_of_another_allocator_repeats_and_plans_that_were_not_run_do_not_count() -> None:
    odd = [
        *(measured(number, charged=9000, settings=SYSTEM) for number in range(9)),
        *(measured(number, charged=9000, kind=TrialKind.REPEAT) for number in range(9)),
        measured(9, measurement=Measurement(Outcome.OVER_BUDGET, "not run")),
        measured(9, estimate=None),
    ]
    assert compute_error_ranges(ARENA, [odd], 0.0) == compute_error_ranges(ARENA, [], 0.0)


def test_a_run_that_was_slow_as_a_whole_does_not_widen_the_ratio() -> None:
    quick = [measured(number, seconds=0.5 + 0.01 * number) for number in range(5)]
    slow = [measured(number, seconds=1.0 + 0.02 * number) for number in range(5)]
    made = compute_error_ranges(ARENA, [quick, slow], 0.0)
    assert made.seconds == pytest.approx((0.5, 1.08))
    assert made.ratio == pytest.approx((0.50 / 0.52, 0.54 / 0.52))


def test_the_devices_noise_widens_seconds_by_a_factor_and_no_bytes() -> None:
    quiet, noisy = compute_error_ranges(ARENA, [], 0.0), compute_error_ranges(ARENA, [], 0.1)
    assert noisy.nbytes == quiet.nbytes
    assert noisy.seconds == pytest.approx((quiet.seconds[0] / 1.1, quiet.seconds[1] * 1.1))
    assert noisy.ratio == pytest.approx((quiet.ratio[0] / 1.1, quiet.ratio[1] * 1.1))
    assert compute_error_ranges(ARENA, [], 4.2).seconds[0] > 0, "no step takes no time"


def test_a_trial_takes_until_the_next_one_starts() -> None:
    assert median_trial_seconds([]) is None
    assert median_trial_seconds([[measured(1)]]) is None
    run = [measured(number) for number in range(4)]
    run.insert(2, measured(5, kind=TrialKind.REPEAT, started=81.0))
    assert median_trial_seconds([run]) == 40.0


def stored(runs: Path, name: str, device: Device = DEVICE, **changes: object) -> None:
    (runs / name).mkdir(parents=True)
    (runs / name / "device.json").write_text(json.dumps(to_json(device)))
    append_trial(runs / name / "trials.jsonl", measured(0, **changes))


def test_only_runs_of_this_workload_on_this_silicon_count_and_broken_ones_stop_nobody(tmp_path: Path) -> None:
    stored(tmp_path, "mine", replace(DEVICE, silicon="Intel Xeon Processor", torch="2.12.0"))
    stored(tmp_path, "another workload", workload="net(batch=2)")
    stored(tmp_path, "another silicon", replace(DEVICE, silicon="AMD EPYC"))
    stored(tmp_path, "broken")
    with (tmp_path / "broken/trials.jsonl").open("a") as file:
        file.write("no JSON\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/trials.jsonl").touch()
    found = load_past_runs(tmp_path, "net()", DEVICE)
    assert [[trial.number for trial in run] for run in found] == [[0]]
