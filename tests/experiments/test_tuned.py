"""What is told of tuned steps is what the tool itself tells."""

import json

from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.study.captures import MeasuredCapture
from experiments.benchmarks.tuned import __main__ as run
from experiments.benchmarks.tuned import gains


def test_a_ratio_is_the_tools_own_also_where_the_machine_changed_its_pace_in_between() -> None:
    seen = Measurement(Outcome.OK, step_seconds=(1.1, 1.1, 2.2, 2.2), baseline_seconds=(1.0, 1.0, 1.0, 2.0))
    assert run.time_ratio(to_json(seen)) == seen.time_ratio == 1.1


def test_a_plan_without_eager_beside_it_has_no_ratio() -> None:
    assert run.time_ratio(to_json(Measurement(Outcome.OK, step_seconds=(1.0,)))) is None


def test_the_best_plan_has_the_interval_of_its_re_measurements_and_the_kind_of_its_first_trial() -> None:
    interval = {"middle": 0.95, "low": 0.94, "high": 0.97, "samples": 8, "confidence": 0.95}
    document = {
        "best": {"kind": "confirm", "plan": "b"},
        "trials": [
            {"kind": "baseline", "plan": None},
            {"kind": "planner", "plan": "a"},
            {"kind": "move", "plan": "b"},
            {"kind": "confirm", "plan": "b"},
        ],
        "confirmed": [{"verdict": "slower", "time_ratio": None}, {"verdict": "BEST", "time_ratio": interval}],
    }
    assert run.find_origin(document) == "move"
    record = {"best_time_ratio": 0.96, "best_time": run.find_confirmed(document)}
    assert run.format_time(record) == "0.950 (0.940 to 0.970; 95 % of 8)"
    assert run.format_time({"best_time_ratio": 0.96, "best_time": None}) == "0.960x"


def test_compared_kernels_are_told_with_their_noise_and_the_chosen_one_with_its_tuned_time() -> None:
    measured = [
        MeasuredCapture("", "", "ok", 1.0, noise=0.01, charged_bytes=2**21),
        MeasuredCapture("inductor", "", "ok", 0.9, noise=0.02, charged_bytes=2**20),
        MeasuredCapture("inductor", "channels_last", "refused", detail="differs from eager's"),
        MeasuredCapture("", "channels_last", "crashed"),
    ]
    record = {"captures": [to_json(capture) for capture in measured], "best_time_ratio": 0.88, "best_time": None}
    eager, chosen, refused, crashed = run.format_choices(record)
    assert eager.endswith("| 2.0 | 1.000 ± 0.010 |  |")
    assert chosen.endswith("| 1.0 | 0.900 ± 0.018 | 0.880x |")
    assert refused.endswith("| - | differs from eager's |  |")
    assert crashed.endswith("| - | crashed |  |")
    assert run.format_choices({"best_time_ratio": 0.88}) == []


def test_a_gain_is_over_the_faster_of_the_planners_plans_and_decided_by_its_interval(tmp_path):
    def result(tuned: float) -> dict:
        seconds = {gains.TUNED: tuned, gains.FASTEST: 1.1, gains.LOWEST: 1.0}
        blocks = [
            {"round": number, "variant": variant, "seconds": [taken]}
            for number in range(8)
            for variant, taken in (("eager", 1.0), *seconds.items(), ("eager", 1.0))
        ]
        kernels = {"kernels": "inductor", "memory_format": "", "rebuild_price": 4.0}
        facts = {"machine": {"silicon": "x"}, "commit": "c", "date": "d", "load_before": 0.0, "command": "y"}
        return {**facts, "run": f"net {tuned}", "tuned_on": kernels, "sessions": [{"blocks": blocks, "failed": {}}]}

    assert gains.gain(result(0.8)).middle == 0.8
    for tuned in (0.8, 1.0, 1.2):
        (tmp_path / f"{tuned}.json").write_text(json.dumps(result(tuned)))
    rows = [row for row in gains.summarize(tmp_path).splitlines() if row.startswith("| net")]
    assert [row.split(" | ")[-1] for row in rows] == ["yes |", "not decided |", "no |"]
    assert "| inductor |" in rows[0]
